# SPDX-License-Identifier: Apache-2.0
"""How client libraries call this package, beyond the documented API. Each test names the client and needs none."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from rank_pool import on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from toys import on_cpu

from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    PartialState,
    cpu_offload,
    dispatch_model,
)
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedOperationException
from accelerate.utils.fsdp_utils import get_parameters_from_modules


def loader(rows=16, size=2):
    return DataLoader(TensorDataset(torch.arange(float(rows))[:, None]), batch_size=size)


@on_ranks(2, env=on_cpu())
def test_prepare_model_for_evaluation():
    """transformers and trl prepare reference and evaluation models so: not wrapped, and in the place they have."""
    accelerator, model = Accelerator(cpu=True), nn.Linear(2, 2)
    prepared = accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    assert prepared is model and type(prepared) is nn.Linear
    prepared.eval()
    assert torch.equal(accelerator.unwrap_model(prepared).weight, model.weight)
    # The training model of the same run is wrapped as before.
    assert accelerator.prepare_model(nn.Linear(2, 2)) is not accelerator.unwrap_model(
        accelerator.prepare_model(model)
    )


@on_ranks(2, env=on_cpu())
def test_ranks_of_a_batch_sampler_that_are_set_after_prepare():
    """transformers' `batch_rebalance` sampler cuts the batches itself, and makes the wrapper pass all of them on."""
    own = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_sampler=own))
    assert prepared.batch_sampler.batch_sampler is own
    assert [batch[0].tolist() for batch in prepared] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][
        accelerator.process_index
    ]
    prepared.batch_sampler.num_processes, prepared.batch_sampler.process_index = 1, 0
    assert len(prepared) == 4
    assert [batch[0].tolist() for batch in prepared] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@on_ranks(2, env=on_cpu())
def test_even_batches_that_are_set_for_one_loader():
    """sentence-transformers sets the attribute around `prepare`."""
    accelerator = Accelerator(cpu=True)
    accelerator.even_batches = False
    uneven = accelerator.prepare(loader(rows=6))
    accelerator.even_batches = True
    assert len(list(uneven)) == [2, 1][accelerator.process_index]
    assert len(list(accelerator.prepare(loader(rows=6)))) == 2


@on_ranks(2, env=on_cpu())
def test_ddp_options_that_are_set_before_prepare():
    """transformers 4 decides on `find_unused_parameters` when it has the model."""
    accelerator = Accelerator(cpu=True)
    accelerator.ddp_handler = DistributedDataParallelKwargs(
        find_unused_parameters=True, bucket_cap_mb=3
    )
    model = accelerator.prepare(nn.Linear(2, 2))
    assert model.find_unused_parameters and model.bucket_bytes_cap == 3 * 1024**2
    assert accelerator.ddp_handler.bucket_cap_mb == 3


@on_ranks(2, env=on_cpu())
def test_main_process_first_around_local_main_process_first():
    """trl maps its data sets so. An error of the first process ends the block on all of them."""
    state, order = PartialState(cpu=True), []
    for _ in range(2):
        with state.main_process_first(), state.local_main_process_first():
            order.append(state.process_index)
    with state.local_main_process_first(), state.main_process_first():
        order.append(state.process_index)
    assert len(order) == 3
    failure = KeyError if state.is_main_process else DistributedOperationException
    with pytest.raises(failure, match="no such row"):
        with state.main_process_first(), state.local_main_process_first():
            raise KeyError("no such row")
    state.wait_for_everyone()


@on_ranks(2, env=on_cpu())
def test_reduce_in_a_loss():
    """peft's and trl's losses reduce a value of the ranks, with and without a gradient."""
    from accelerate.utils import reduce

    rank = PartialState(cpu=True).process_index
    value = torch.tensor([rank + 1.0], requires_grad=True)
    assert reduce(value.detach(), "mean").item() == 1.5
    assert reduce({"loss": value.detach() * 2}, "sum", scale=0.5)["loss"].item() == 3.0
    loss = value * reduce(value.detach(), "sum")
    loss.backward()
    assert value.grad.item() == 3.0


@on_ranks(2, env=on_cpu())
def test_fully_shard_by_hand_under_a_plugin():
    """trl shards its reference model itself, by the plugin and the mesh of the run."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    torch.manual_seed(0)
    plugin, mesh, model = (
        accelerator.state.fsdp_plugin,
        accelerator.torch_device_mesh,
        nn.Linear(2, 2),
    )
    assert mesh is None, "without a parallelism_config there is nothing to select dimensions by"
    ignored = get_parameters_from_modules(plugin.ignored_modules, model, accelerator.device)
    expected = model(torch.ones(1, 2))
    fully_shard(
        model, reshard_after_forward=plugin.reshard_after_forward, offload_policy=plugin.cpu_offload,
        mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(), mesh=None, ignored_params=ignored,
    )  # fmt: skip
    assert torch.equal(model(torch.ones(1, 2)), expected)


@on_ranks(2, env=on_cpu())
def test_mesh_dimensions_of_a_layout():
    """trl passes this mesh to `fully_shard`."""
    layout = ParallelismConfig(dp_shard_size=2)
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=layout,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
    )
    assert (
        accelerator.torch_device_mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)].size()
        == 2
    )


def test_wrap_policy_of_a_plugin():
    """trl and peft call this under FSDP1."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Linear"],
    )
    plugin.set_auto_wrap_policy(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    wraps = plugin.auto_wrap_policy
    assert wraps(module=nn.Linear(2, 2), recurse=False, nonwrapped_numel=0)
    assert not wraps(module=nn.ReLU(), recurse=False, nonwrapped_numel=0)


def test_parameters_of_modules():
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"inner": nn.Linear(2, 2)}))
    device = torch.device("cpu")
    assert get_parameters_from_modules([model[0]], model, device) == set(model[0].parameters())
    assert get_parameters_from_modules(r"1\.inner", model, device) == set(model[1].parameters())
    assert get_parameters_from_modules(None, model, device) == set()


def test_a_hook_that_is_called_without_inputs():
    """peft merges offloaded layers, and diffusers encodes, between a hook's two calls."""
    layer = nn.Linear(3, 3)
    weight = layer.weight.detach().clone()
    cpu_offload(layer, execution_device="cpu")
    assert layer.weight.is_meta
    layer._hf_hook.pre_forward(layer)
    assert torch.equal(layer.weight, weight)
    layer.weight.data += 1
    layer._hf_hook.post_forward(layer, torch.tensor([]))
    assert layer.weight.is_meta


def test_maps_and_indexes_of_offloaded_modules(tmp_path):
    """peft reads the index of an offloaded model, to write merged weights beside the original ones."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    dispatch_model(model, {"0": "cpu", "1": "disk"}, main_device="cpu", offload_dir=str(tmp_path))
    hook = model[1]._hf_hook
    assert hook.offload and torch.device("meta") not in hook.original_devices.values()
    dataset = hook.weights_map.dataset
    assert set(dataset.all_keys) >= {"1.weight", "1.bias"} and "1.weight" in dataset.index


def test_parser_of_launch_options(tmp_path):
    """trl adds its own commands to the launcher's parser."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import launch_command, launch_command_parser

    parser = launch_command_parser()
    known, rest = parser.parse_known_args(["--num_processes", "2", "train.py", "--rate", "1"])
    assert callable(launch_command) and rest == []
    assert (known.num_processes, known.training_script, known.training_script_args) == (
        2,
        "train.py",
        ["--rate", "1"],
    )
    assert "num_processes" in {action.dest for action in parser._actions}
    file = tmp_path / "config.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 3\nuse_cpu: true\n"
    )
    assert load_config_from_file(str(file)).num_processes == 3


@on_ranks(1, 2, env=on_cpu())
def test_loops_as_scripts_write_them(tmp_path):
    """What a run beside accelerate 1.15 has shown to differ."""
    accelerator = Accelerator(cpu=True)
    size = accelerator.num_processes
    # A loss for each process, gathered together with rows of a last batch that is not full.
    losses = [
        accelerator.gather_for_metrics((batch[0].mean(), batch[0]))[0]
        for batch in accelerator.prepare(loader(rows=9))
    ]
    assert losses[-1].numel() == 1
    # A script that may resume catches this.
    with pytest.raises(ValueError, match="there is no folder"):
        accelerator.load_state(tmp_path / "none")
    assert accelerator.should_save_model == accelerator.is_main_process
    with accelerator.split_between_processes("a prompt") as prompt:
        assert prompt == "a prompt"
    for rows in (np.arange(3), range(3), [0, 1, 2], (0, 1, 2)):
        with accelerator.split_between_processes(rows, apply_padding=True) as part:
            assert list(part) == (
                [0, 1, 2] if size == 1 else [[0, 1], [2, 2]][accelerator.process_index]
            )
