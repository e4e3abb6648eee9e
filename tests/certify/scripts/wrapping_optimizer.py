# SPDX-License-Identifier: Apache-2.0
"""An optimizer around another one, with slow weights of its own (Lookahead).

Certified in ddp:2 fsdp:2 tp:2 pp:2 cp:2.
"""

from collections.abc import Callable

import torch
from models import Decoder, Documents, loss_of, split_sequences
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


class Lookahead(torch.optim.Optimizer):
    """Moves the weights back halfway to the slow ones after every second step of the inner optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})
        self.param_groups = inner.param_groups
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "slow" not in self.state[parameter]:
                    self.state[parameter]["slow"] = parameter.detach().clone()
        self.inner.step()
        self.steps += 1
        if self.steps % 2:
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                slow = self.state[parameter]["slow"]
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


def main() -> None:
    set_seed(0)
    accelerator = Accelerator()
    model = Decoder().double()
    optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = DataLoader(Documents(64), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with split_sequences(accelerator, batch):
            accelerator.backward(loss_of(model, batch))
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
