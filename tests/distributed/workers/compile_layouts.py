# SPDX-License-Identifier: Apache-2.0
"""Each of 2 ranks: layouts, compiled `whole` or `regional`, some in Megatron-LM's words, against the plain loop.

Nothing is compiled after the first steps, and parameters are equal to 1e-8 in float64.
"""

import logging
import sys

import torch
from chain import ACCUMULATION, STEPS, make, off, plain_run, train
from chain import Sequences as Data
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.config.parallel import PipelineParallelConfig, TorchContextParallelConfig
from accelerate.config.training import TorchDynamoPlugin
from accelerate.parallelism_config import ParallelismConfig
from accelerate.runtime.mesh import describe
from accelerate.state import AcceleratorState, GradientState, PartialState

RING = TorchContextParallelConfig("alltoall")
BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]}


def layouts():
    """What each asks of the Accelerator, and the strategy that it gets. Plugins are made anew."""
    first = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=True, sync_module_states=True, **BLOCKS)
    yield {"fsdp_plugin": first}, "FSDP1"
    yield {"parallelism_config": ParallelismConfig(cp_size=2, cp_handler=RING)}, "FSDP2"
    yield {"parallelism_config": ParallelismConfig(sp_size=2)}, "FSDP2"
    stages = PipelineParallelConfig(num_microbatches=2)
    yield {"parallelism_config": ParallelismConfig(pp_size=2, pp_handler=stages)}, "pipeline parallel"
    yield {"megatron_lm_plugin": MegatronLMPlugin(tp_degree=2, sequence_parallelism=True)}, "tensor parallel"
    yield {"megatron_lm_plugin": MegatronLMPlugin(pp_degree=2, num_micro_batches=4)}, "pipeline parallel"


def run(options, strategy, regional, expected):
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    torch._dynamo.reset()
    counters.clear()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional),
        **options,
    )
    layout = accelerator.parallelism_config
    what = f"{next(iter(options))}, {'-' if layout is None else describe(layout)}"
    assert accelerator.plan.strategy == strategy, what
    model, optimizer, scheduler = make(seed=accelerator.process_index)
    loader = DataLoader(Data(), batch_size=8)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    train(accelerator, model, optimizer, scheduler, loader)
    graphs = counters["stats"]["unique_graphs"]
    assert graphs > 0, f"{what}: nothing was compiled"
    rest = accelerator.skip_first_batches(loader, STEPS * ACCUMULATION)
    train(accelerator, model, optimizer, scheduler, rest)
    assert counters["stats"]["unique_graphs"] == graphs, f"{what}: {graphs} graphs, then {counters['stats']}"
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        far = off([state[name] for name in expected], expected.values())
        assert far <= 1e-8, f"{what}: off by {far}"
        print(f"{what}: {graphs} graphs, off by {far:.1e}", flush=True)


def main(regional):
    PartialState(cpu=True)
    logging.disable(logging.WARNING)
    torch.set_default_dtype(torch.float64)
    expected, *_ = plain_run()[0][1]
    for options, strategy in layouts():
        run(options, strategy, regional, expected)
    print("all equal")


if __name__ == "__main__":
    main(regional={"regional": True, "whole": False}[sys.argv[1]])
