# SPDX-License-Identifier: Apache-2.0
"""Compiled layouts on 2 ranks: the numbers of the plain loop, and no compilation after the first window."""

import logging
import sys
from pathlib import Path

import pytest
import torch
from rank_pool import on_ranks
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.config.parallel import PipelineParallelConfig, TorchContextParallelConfig
from accelerate.config.training import TorchDynamoPlugin
from accelerate.parallelism_config import ParallelismConfig

sys.path.append(str(Path(__file__).parents[1] / "parallel"))
import test_layout_chain as chain
from layouts import compare_state

BLOCKS = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_cls_names_to_wrap": ["Block"]}
PRELOADED = ("torch._inductor.compile_fx",)
pytestmark = pytest.mark.usefixtures("float64")


def layouts():
    """What each requests of the Accelerator, and the strategy that it gets. Plugins are made anew."""
    stages = PipelineParallelConfig(num_microbatches=2)
    first = FullyShardedDataParallelPlugin(
        fsdp_version=1, use_orig_params=True, sync_module_states=True, **BLOCKS
    )
    ring = TorchContextParallelConfig("alltoall")
    return {
        "fsdp1": ({"fsdp_plugin": first}, "FSDP1"),
        "cp": ({"parallelism_config": ParallelismConfig(cp_size=2, cp_handler=ring)}, "FSDP2"),
        "sp": ({"parallelism_config": ParallelismConfig(sp_size=2)}, "FSDP2"),
        "pp": (
            {"parallelism_config": ParallelismConfig(pp_size=2, pp_handler=stages)},
            "pipeline parallel",
        ),
        "megatron tp": (
            {"megatron_lm_plugin": MegatronLMPlugin(tp_degree=2, sequence_parallelism=True)},
            "tensor parallel",
        ),
        "megatron pp": (
            {"megatron_lm_plugin": MegatronLMPlugin(pp_degree=2, num_micro_batches=4)},
            "pipeline parallel",
        ),
    }


@on_ranks(2)
@pytest.mark.parametrize(
    "regional",
    [
        pytest.param(True, id="regional"),
        pytest.param(False, id="whole", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize(
    "layout",
    [
        "fsdp1",
        pytest.param(
            "cp", marks=pytest.mark.thorough
        ),  # FSDP2, as in tests/parallel/test_compile_layouts.py
        pytest.param("sp", marks=pytest.mark.thorough),  # FSDP2, as "cp" has
        "pp",
        # The strategies of tests/parallel/test_compile_layouts.py and of "pp".
        pytest.param("megatron tp", marks=pytest.mark.thorough),
        pytest.param("megatron pp", marks=pytest.mark.thorough),
    ],
)
def test_other_layouts(layout, regional):
    logging.disable(logging.WARNING)
    options, strategy = layouts()[layout]
    expected, *_ = chain.plain_run()[0][1]
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=chain.ACCUMULATION,
        dataloader_config=DataLoaderConfiguration(split_batches=True),
        dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=regional),
        **options,
    )
    assert accelerator.plan.strategy == strategy
    model, optimizer, scheduler = chain.make(seed=accelerator.process_index)
    loader = DataLoader(chain.Sequences(), batch_size=8)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    chain.train(accelerator, model, optimizer, scheduler, loader)
    counts = torch._dynamo.utils.counters["stats"]
    graphs = counts["unique_graphs"]
    assert graphs > 0, "nothing was compiled"
    rest = accelerator.skip_first_batches(loader, chain.STEPS * chain.ACCUMULATION)
    chain.train(accelerator, model, optimizer, scheduler, rest)
    assert counts["unique_graphs"] == graphs, f"{graphs} graphs, then {counts}"
    compare_state(accelerator, model, expected)
