# SPDX-License-Identifier: Apache-2.0
"""An optimizer of matrices in full precision, in the place of torch's Muon, which rounds to bfloat16.

And a model that it trains, in all layouts.
"""

import torch
import torch.distributed as dist
from layouts import sized, units_of
from states import reset_states
from torch import nn

from accelerate import Accelerator

WIDTH, BATCH = 8, 8


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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.odd = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.odd(x))


def shapes(parameter, group):
    """Element by element in groups with `aux`."""
    if group["aux"]:
        return None
    return parameter.shape


def make(seed=0, mixed=True):
    """(model, optimizers): one optimizer with groups of both kinds, or one of each kind."""
    torch.manual_seed(seed)
    model = Model()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    if mixed:
        groups = [
            {"params": matrices[:3]},
            {"params": vectors, "lr": 0.01, "aux": True},
            {"params": matrices[3:], "momentum": 0.8},
        ]
        return model, [Orthogonal(groups)]
    return model, [Orthogonal(matrices), torch.optim.AdamW(vectors, lr=0.01)]


def batches(steps=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(steps)]


def loss_of(model, x):
    return (model(x) - x[:, :3].cos()).square().mean()


def start(layout, **options):
    reset_states()
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    layouts = {
        "one": {},
        "ddp": {},
        "fsdp": {"fsdp_plugin": units_of("Block")},
        "fsdp whole": sized(dp_shard_size=world),
        "fsdp full": {"fsdp_plugin": units_of("Block", state_dict_type="FULL_STATE_DICT")},
        "tp": sized(plan if world > 1 else None, tp_size=world),
        "hsdp": sized(dp_replicate_size=2, dp_shard_size=2),
        "fsdp x tp": sized(plan, dp_shard_size=2, tp_size=2),
        "pp": sized(pp_size=2, dp_replicate_size=max(world // 2, 1)),
        "pp x fsdp": sized(pp_size=2, dp_shard_size=max(world // 2, 1)),
    }
    return Accelerator(cpu=True, **layouts[layout], **options)
