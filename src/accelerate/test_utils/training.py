# SPDX-License-Identifier: Apache-2.0
"""A linear regression that can be checked by hand: y = a x + b with noise, and a model with two parameters."""

from __future__ import annotations

from typing import Any

import numpy
import torch


class RegressionDataset(torch.utils.data.Dataset[dict[str, numpy.float32]]):
    """Samples {"x": x, "y": a x + b + noise}; the noise has a standard deviation of 0.1.

    Args:
        a: the slope.
        b: the intercept.
        length: the number of samples.
        seed: the seed of the samples; random by default.
    """

    def __init__(
        self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None
    ) -> None:
        generator = numpy.random.default_rng(seed)
        self.length = length
        self.x: numpy.ndarray[Any, Any] = generator.normal(size=(length,)).astype(numpy.float32)
        noise = generator.normal(scale=0.1, size=(length,)).astype(numpy.float32)
        self.y: numpy.ndarray[Any, Any] = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, numpy.float32]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(torch.nn.Module):
    """Computes a x + b.

    Args:
        a: the initial slope.
        b: the initial intercept.
        double_output: return the pair of the result and twice the result.
    """

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a: torch.nn.Parameter = torch.nn.Parameter(torch.tensor(a).float())
        self.b: torch.nn.Parameter = torch.nn.Parameter(torch.tensor(b).float())
        self.double_output = double_output

    def forward(
        self, x: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the prediction for `x`, of any shape."""
        assert x is not None
        out = x * self.a + self.b
        if self.double_output:
            return (out, 2 * out)
        return out
