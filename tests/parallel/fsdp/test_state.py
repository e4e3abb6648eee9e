# SPDX-License-Identifier: Apache-2.0
"""A run that two sharded ranks have saved in its middle goes on in any layout."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.config.fsdp import FullyShardedDataParallelPlugin


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "kind", ["SHARDED_STATE_DICT", pytest.param("FULL_STATE_DICT", marks=pytest.mark.thorough)]
)
def test_a_run_saved_by_two_sharded_ranks_goes_on_in_any_layout(kind, ranks, tmp_path):
    ranks(2).run(train, tmp_path, kind, resume=False)
    ranks(1).run(train, tmp_path, "plain", resume=True)
    ranks(1).run(train, tmp_path, kind, resume=True)


def train(folder, kind, resume):
    """One half of a run, saved, then the other half; or, from what another layout saved, the other half alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    # The second group is that of norms and biases in a model that trains neither.
    optimizer = torch.optim.AdamW(
        [{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}], lr=0.05
    )
    # Prepared schedulers count the steps of one process: a constant one is the same on any number of them.
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=0.7, total_iters=10**6)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    plugin = (
        FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
        if kind != "plain"
        else None
    )
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True, gradient_accumulation_steps=2)
    loader = DataLoader(data, batch_size=8 // accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    def epoch():
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

    if not resume:
        epoch()
        accelerator.save_state(folder / "half")
        epoch()
        check(accelerator, model, folder)
    accelerator.load_state(folder / "half")
    epoch()
    check(accelerator, model, folder)
    accelerator.save_model(model, folder / f"weights-{kind}-{accelerator.num_processes}")


def check(accelerator, model, folder):
    """The end of the run is what the first that came here has reached."""
    state = accelerator.get_state_dict(model)
    path = folder / "end.pt"
    if accelerator.is_main_process:
        if not path.exists():
            torch.save(state, path)
        for name, value in torch.load(path).items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-8)
    accelerator.wait_for_everyone()
