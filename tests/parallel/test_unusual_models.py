# SPDX-License-Identifier: Apache-2.0
"""Models with parameters in containers, transposed ones and a recorded graph: exact=True against one process."""

import pytest
import torch
from layouts import compare_state
from rank_pool import on_ranks
from states import reset_states
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.core.errors import PrepareError
from accelerate.core.imports import is_torch_version
from accelerate.utils import DistributedDataParallelKwargs
from accelerate.utils import FullyShardedDataParallelPlugin as Plugin

ROWS = torch.randn(14, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
SIZES = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 20}
LAYOUTS = {
    "static graph": {"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]},
    "fsdp2": {"fsdp_plugin": Plugin(fsdp_version=2, **SIZES)},
    "fsdp1": {"fsdp_plugin": Plugin(fsdp_version=1, **SIZES)},
}


class Containers(nn.Module):
    """Parameters in a dict and a list, which are modules without a forward, and a transposed one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.matrices = nn.ParameterDict({"square": torch.randn(6, 6) / 3})
        self.rows = nn.ParameterList([torch.randn(6, 6) / 3])
        self.turned = nn.Parameter((torch.randn(4, 6) / 3).t())

    def forward(self, x):
        x = torch.tanh(self.first(x)) @ self.matrices["square"]
        return torch.tanh(x @ self.rows[0]) @ self.turned


def make_run(kind):
    torch.manual_seed(0)
    model = Containers().double()
    loader = DataLoader(TensorDataset(ROWS), batch_size=2 if kind == "ours" else 8)
    return model, torch.optim.Rprop(model.parameters(), lr=0.01), loader


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_process(layout):
    # 14 rows are windows of 8 and of 6, each of two batches: the last one is smaller.
    expected, plain, loader = make_run("plain")
    for _ in range(2):
        for (rows,) in loader:
            expected(rows).square().mean().backward()
            plain.step()
            plain.zero_grad()
    accelerator = Accelerator(
        cpu=True, exact=True, gradient_accumulation_steps=2, **LAYOUTS[layout]
    )
    model, optimizer, loader = accelerator.prepare(*make_run("ours"))
    for _ in range(2):
        for (rows,) in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    compare_state(accelerator, model, expected.state_dict(), 1e-10)


class Scales(nn.Module):
    """A scalar and an empty parameter, which FSDP2 leaves unsharded, around a layer that evaluates by a kernel."""

    def __init__(self, scalar):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)
        self.scale = nn.Parameter(torch.full(() if scalar else (1,), 0.7))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, x):
        return self.layer(x[:, None].repeat(1, 3, 1))[:, 0] * self.scale.exp() + self.empty.sum()


@on_ranks(2)
@pytest.mark.parametrize("layout", ["fsdp2", "fsdp1"])
def test_scalars_and_layers_that_read_the_weights_of_others(layout, tmp_path):
    torch.manual_seed(0)
    expected = Scales(layout == "fsdp2").double()
    plain = torch.optim.AdamW(expected.parameters(), lr=0.01)
    accelerator = Accelerator(cpu=True, **LAYOUTS[layout])
    torch.manual_seed(0)
    model = Scales(layout == "fsdp2").double()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for number in range(4):
        rows = ROWS[number : number + 4]
        expected(rows).square().mean().backward()
        plain.step()
        plain.zero_grad()
        accelerator.backward(model(rows.chunk(2)[accelerator.process_index]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if number == 1:
            accelerator.save_state(tmp_path / "checkpoint")
            with torch.no_grad():
                model(ROWS)
            accelerator.load_state(tmp_path / "checkpoint")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ROWS), expected.eval()(ROWS), rtol=0, atol=1e-9)
    compare_state(accelerator, model, expected.state_dict(), 1e-9)


class Mixed(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 2).double(), nn.Linear(2, 2))


def whole_numbers():
    return nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)])


@on_ranks(2)
@pytest.mark.parametrize("version", [1, 2])
def test_what_fsdp_cannot_shard_is_refused_by_name(version):
    cases = [
        (
            lambda: nn.Sequential(nn.Embedding(5, 6, sparse=True)),
            (1, 2),
            r"^0 \(Embedding\) has sparse gradients",
        ),
        (
            lambda: nn.Linear(6, 6, dtype=torch.complex64),
            (1,),
            r"^weight has the dtype torch\.complex64",
        ),
        (
            whole_numbers,
            (1, 2) if is_torch_version("<", "2.12") else (1,),
            r"^0 has the dtype torch\.uint8",
        ),
    ]
    for make, versions, message in cases:
        if version in versions:
            with pytest.raises(PrepareError, match=message):
                Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=version)).prepare(make())


class Rearranged(nn.Linear):
    """As 4-bit layers of bitsandbytes on a CPU with AVX512: the first forward without gradients changes the weight."""

    support_avx512bf16_for_cpu, is_rearranged = True, False

    def forward(self, x):
        if (
            self.support_avx512bf16_for_cpu
            and not torch.is_grad_enabled()
            and not self.is_rearranged
        ):
            self.weight.data, self.is_rearranged = self.weight.flip(0), True
        return nn.functional.linear(x, self.weight.flip(0) if self.is_rearranged else self.weight)


@on_ranks(2)
@pytest.mark.parametrize("version", [1, 2])
def test_layers_that_change_their_weight_on_a_cpu_leave_it(version):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), Rearranged(4, 4, bias=False)).double()
    with torch.enable_grad():
        expected = model(ROWS.double())
    model = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=version)).prepare(model)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(model(ROWS.double()), expected, rtol=0, atol=1e-12)


@on_ranks(2)
def test_an_embedding_whose_forward_limits_the_norms_of_the_rows_that_it_reads():
    """DDP: as torch gives it. FSDP2: the write is seen in the first forward."""
    ids = torch.tensor([0, 3])
    model = Accelerator(cpu=True).prepare(nn.Sequential(nn.Embedding(5, 6, max_norm=0.5)))
    assert model(ids).norm(dim=-1).max() <= 0.5 + 1e-6
    reset_states()
    sharded = Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=2))
    model = sharded.prepare(nn.Sequential(nn.Embedding(5, 6, max_norm=0.5)))
    with pytest.raises(PrepareError, match=r"changes the parameter 0\.weight"):
        model(ids)


@on_ranks(2)
def test_torch_words_what_fsdp1_cannot_flatten():
    for make, message in ((lambda: Scales(True), "scale"), (Mixed, "uniform dtype")):
        with pytest.raises(ValueError, match=message):
            Accelerator(cpu=True, fsdp_plugin=Plugin(fsdp_version=1)).prepare(make())
