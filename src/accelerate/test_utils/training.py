# SPDX-License-Identifier: Apache-2.0
"""A regression small enough to check by hand: y = a x + b with noise, and the model of one number each."""

from __future__ import annotations

import numpy
import torch


class RegressionDataset(torch.utils.data.Dataset):
    """`length` samples {"x": x, "y": a x + b + noise}, the noise of deviation 0.1; the same for the same seed."""

    def __init__(self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None) -> None:
        generator = numpy.random.default_rng(seed)
        self.length = length
        self.x = generator.normal(size=(length,)).astype(numpy.float32)
        self.y = a * self.x + b + generator.normal(scale=0.1, size=(length,)).astype(numpy.float32)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, numpy.float32]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(torch.nn.Module):
    """x a + b, of two parameters; with `double_output` the pair of that and its double."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.tensor(a).float())
        self.b = torch.nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output

    def forward(self, x: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        assert x is not None
        out = x * self.a + self.b
        return (out, 2 * out) if self.double_output else out
