# SPDX-License-Identifier: Apache-2.0
"""Which strategy a layout gets, and what is refused before anything is built."""

import pytest

from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.core.errors import ConfigurationError
from accelerate.parallel.choice import check_deepspeed_layout, choose_strategy
from accelerate.parallelism_config import ParallelismConfig

PLUGIN = FullyShardedDataParallelPlugin(fsdp_version=2)


@pytest.mark.parametrize(
    "world, sizes, plugin, expected",
    [
        (1, None, None, "single"),
        (4, None, None, "ddp"),
        (4, None, PLUGIN, "fsdp2"),
        (4, None, FullyShardedDataParallelPlugin(fsdp_version=1), "fsdp1"),
        (4, {"dp_replicate_size": 4}, None, "ddp"),
        (4, {"dp_shard_size": 4}, None, "fsdp2"),
        (4, {"dp_replicate_size": 2, "dp_shard_size": 2}, PLUGIN, "fsdp2"),
        (4, {"cp_size": 2, "dp_shard_size": 2}, PLUGIN, "fsdp2"),
        (4, {"sp_size": 4}, None, "fsdp2"),
        (4, {"tp_size": 4}, None, "tensor"),
        (4, {"dp_shard_size": 2, "tp_size": 2}, PLUGIN, "fsdp2"),
        (4, {"dp_replicate_size": 2, "tp_size": 2}, None, "fsdp2"),
        (4, {"pp_size": 4}, None, "pipeline"),
        (4, {"pp_size": 2, "tp_size": 2}, None, "pipeline"),
        (4, {"pp_size": 2, "dp_replicate_size": 2}, None, "pipeline"),
        (1, {}, None, "single"),
    ],
)
def test_the_strategy_of_a_layout(world, sizes, plugin, expected):
    name, arguments = choose_strategy(
        world, None if sizes is None else ParallelismConfig(**sizes), plugin
    )
    assert name == expected
    assert name.startswith("fsdp") == ("plugin" in arguments)
    if plugin is not None:
        assert arguments["plugin"] is plugin


@pytest.mark.parametrize(
    "world, sizes, plugin, named",
    [
        (4, {"tp_size": 2}, None, "tp_size=2 = 2 processes, but 4"),
        (4, {"pp_size": 2, "cp_size": 2}, None, "a pipeline divides batches, not sequences"),
    ],
)
def test_refusals(world, sizes, plugin, named):
    with pytest.raises(ValueError, match=named):
        choose_strategy(world, None if sizes is None else ParallelismConfig(**sizes), plugin)


def test_what_deepspeed_does_not_lay_out():
    check_deepspeed_layout(4, ParallelismConfig(dp_shard_size=4))
    for sizes, named in (
        ({"tp_size": 4}, "tp_size=4"),
        ({"sp_size": 2, "dp_shard_size": 2}, "sp_size=2"),
    ):
        with pytest.raises(ConfigurationError, match=f"{named} with a deepspeed_plugin"):
            check_deepspeed_layout(4, ParallelismConfig(**sizes))
    with pytest.raises(ConfigurationError, match="4 processes, but 2"):
        check_deepspeed_layout(2, ParallelismConfig(dp_shard_size=4))
