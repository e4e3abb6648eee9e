# SPDX-License-Identifier: Apache-2.0
"""An optimizer of matrices in full precision, in the place of torch's Muon, which rounds to bfloat16."""

import torch


def orthogonal(matrix, steps=5):
    """Newton-Schulz iterations towards the orthogonal factor of a matrix."""
    x = matrix / (matrix.norm() + 1e-7)
    if x.shape[0] > x.shape[1]:
        return orthogonal(matrix.T, steps).T
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x - 4.775 * (a @ x) + 2.0315 * (a @ a @ x)
    return x


class Orthogonal(torch.optim.Optimizer):
    """Momentum, orthogonalized. Groups with `aux` are updated element by element.

    `work` counts the multiplications of all steps in this process.
    """

    def __init__(self, groups, lr=0.02, momentum=0.9, decay=0.1, aux=False):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": decay, "aux": aux})
        self.work = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1 - group["momentum"])
                update = mean / (1 - 0.5 ** state["count"])
                if not group["aux"]:
                    rows = update.flatten(1)
                    update = orthogonal(rows).view(update.shape)
                    self.work += min(rows.shape) ** 2 * max(rows.shape)
                parameter.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])
        return loss
