# SPDX-License-Identifier: Apache-2.0
"""A run described in Megatron-LM's words becomes a native layout, and says what has no counterpart."""

from __future__ import annotations

import pytest

from accelerate.config.megatron import MegatronLMPlugin
from accelerate.core.errors import ConfigurationError
from accelerate.parallelism_config import ParallelismConfig
from accelerate.run.resolve import _native_layout
from accelerate.state import PartialState


def test_the_layout_fields_become_sizes_and_handlers() -> None:
    PartialState(cpu=True)
    plugin = MegatronLMPlugin(
        tp_degree=2,
        pp_degree=2,
        num_micro_batches=4,
        sequence_parallelism=True,
        use_distributed_optimizer=True,
    )
    layout = _native_layout(plugin, {}, 16)
    assert {name: size for name, size in layout.sizes.items() if size > 1} == {
        "pp": 2,
        "dp_shard": 4,
        "tp": 2,
    }
    assert layout.tp_handler.sequence_parallel and layout.pp_handler.num_microbatches == 4
    assert plugin.without_counterpart() == []


def test_fields_without_counterpart_are_named() -> None:
    plugin = MegatronLMPlugin(
        recompute_activations=True, lr_decay_style="cosine", gradient_clipping=1.0
    )
    assert sorted(plugin.without_counterpart()) == ["lr_decay_style", "recompute_activations"]


def test_two_layouts_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="megatron_lm_plugin and parallelism_config"):
        _native_layout(MegatronLMPlugin(), {"parallelism_config": ParallelismConfig()}, 1)
