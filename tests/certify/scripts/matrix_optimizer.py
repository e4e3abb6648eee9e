# SPDX-License-Identifier: Apache-2.0
"""An optimizer of matrices whose work is shared between ranks.

Certified in ddp:2 fsdp:2 tp:2 pp:2 cp:2.
"""

import torch
from models import Decoder, Documents, loss_of, split_sequences
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import register_matrix_optimizer, set_seed


class Orthogonal(torch.optim.SGD):
    """SGD with gradients that are orthogonalized in full precision. torch's Muon rounds them to bfloat16."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and group["lr"]:
                    x = parameter.grad / (parameter.grad.norm() + 1e-7)
                    for _ in range(3):
                        x = 1.5 * x - 0.5 * x @ x.T @ x
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(x))
                    parameter.sub_(mean.lerp_(x, 0.5), alpha=group["lr"])


def main() -> None:
    set_seed(0)
    register_matrix_optimizer(Orthogonal)
    accelerator = Accelerator()
    model = Decoder().double()
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optimizers = Orthogonal(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, *optimizers, loader = accelerator.prepare(model, *optimizers, loader)
    for batch in loader:
        with split_sequences(accelerator, batch):
            accelerator.backward(loss_of(model, batch))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
