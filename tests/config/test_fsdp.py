# SPDX-License-Identifier: Apache-2.0
"""FullyShardedDataParallelPlugin: what each version makes of words, variables and objects, and what it refuses."""

import functools

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

from accelerate.config.fsdp import FullyShardedDataParallelPlugin as Plugin


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.delenv("FSDP_VERSION", raising=False)


def test_defaults_of_version_1():
    plugin = Plugin()
    assert (plugin.fsdp_version, plugin.sharding_strategy) == (1, fsdp.ShardingStrategy.FULL_SHARD)
    assert plugin.state_dict_type == fsdp.StateDictType.FULL_STATE_DICT
    assert plugin.state_dict_config == fsdp.FullStateDictConfig(
        offload_to_cpu=True, rank0_only=True
    )
    assert plugin.cpu_offload == fsdp.CPUOffload(offload_params=False)
    assert plugin.use_orig_params is False and plugin.auto_wrap_policy is None


def test_defaults_of_version_2():
    plugin = Plugin(fsdp_version=2)
    assert plugin.reshard_after_forward is True and plugin.sharding_strategy is None
    assert plugin.state_dict_type == fsdp.StateDictType.SHARDED_STATE_DICT
    assert type(plugin.cpu_offload) is fsdp.OffloadPolicy
    assert plugin.use_orig_params is None and plugin.activation_checkpointing is False


def test_variables(monkeypatch):
    for name, text in {
        "FSDP_VERSION": "2",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Head",
        "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
        "FSDP_OFFLOAD_PARAMS": "true",
        "FSDP_ACTIVATION_CHECKPOINTING": "yes",
    }.items():
        monkeypatch.setenv(name, text)
    plugin = Plugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is False
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy
    assert plugin.transformer_cls_names_to_wrap == ["Block", "Head"]
    assert plugin.state_dict_type == fsdp.StateDictType.FULL_STATE_DICT
    assert (
        isinstance(plugin.cpu_offload, fsdp.CPUOffloadPolicy)
        and plugin.activation_checkpointing is True
    )


@pytest.mark.parametrize(
    "word, expected", [("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("false", False), (4, 4)]
)
def test_words_of_version_1_mean_something_to_version_2(word, expected):
    assert Plugin(fsdp_version=2, reshard_after_forward=word).reshard_after_forward is expected


@pytest.mark.parametrize(
    "options, named",
    [
        ({"fsdp_version": 3}, "fsdp_version='3'"),
        ({"fsdp_version": 2, "reshard_after_forward": "sometimes"}, "reshard_after_forward"),
        ({"fsdp_version": 2, "sharding_strategy": "NO_SHARD"}, "NO_SHARD"),
        ({"fsdp_version": 2, "reshard_after_forward": "HYBRID_SHARD"}, "dp_replicate_size"),
        ({"fsdp_version": 1, "reshard_after_forward": True}, "fsdp_version=2"),
        ({"fsdp_version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "LOCAL_STATE_DICT"),
        ({"fsdp_version": 2, "forward_prefetch": True}, "forward_prefetch"),
        ({"fsdp_version": 2, "cpu_offload": fsdp.CPUOffload(True)}, "OffloadPolicy"),
        (
            {"fsdp_version": 2, "mixed_precision_policy": fsdp.MixedPrecision()},
            "MixedPrecisionPolicy",
        ),
        ({"mixed_precision_policy": {"param_dtype": "int7"}}, "int7"),
        (
            {"activation_checkpointing": True, "activation_checkpointing_offload": True},
            "fsdp_version=2",
        ),
        ({"activation_checkpointing_offload": True}, "activation_checkpointing=True"),
        ({"auto_wrap_policy": "TRANSFORMER_WRAP"}, "did you mean TRANSFORMER_BASED_WRAP"),
        ({"sharding_strategy": "FULL"}, "FULL_SHARD"),
        ({"backward_prefetch": "xyz"}, "BACKWARD_PRE"),
    ],
)
def test_refusals_name_the_field(options, named):
    with pytest.raises(ValueError, match=named):
        Plugin(**options)


def test_mixed_precision():
    plugin = Plugin(
        fsdp_version=2,
        mixed_precision_policy={"param_dtype": "bf16", "reduce_dtype": torch.float32},
    )
    assert plugin.mixed_precision_policy == fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plugin.set_mixed_precision("fp16")  # a policy that is set stays
    assert plugin.mixed_precision_policy.param_dtype == torch.bfloat16
    plugin.set_mixed_precision("fp16", override=True)
    half = torch.float16
    assert plugin.mixed_precision_policy == fsdp.MixedPrecisionPolicy(half, half, half)
    older = Plugin(fsdp_version=1)
    older.set_mixed_precision("bf16", buffer_autocast=True)
    assert older.mixed_precision_policy.buffer_dtype == torch.float32
    with pytest.raises(ValueError, match="int8"):
        older.set_mixed_precision("int8")


def test_state_dict_type_takes_its_configs_along():
    plugin = Plugin(fsdp_version=2)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert isinstance(plugin.state_dict_config, fsdp.FullStateDictConfig)
    assert isinstance(plugin.optim_state_dict_config, fsdp.FullOptimStateDictConfig)


def test_auto_wrap_policies_become_functions_of_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
    plugin = Plugin(
        auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=[{"Linear"}]
    )
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {torch.nn.Linear}}
    plugin = Plugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    with pytest.warns(UserWarning, match="transformer_cls_names_to_wrap is empty, .*Sequential"):
        plugin.set_auto_wrap_policy(model)
    model._no_split_modules = "ReLU"
    plugin = Plugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    plugin.set_auto_wrap_policy(model)
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {torch.nn.ReLU}}
    plugin = Plugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=5)
    plugin.set_auto_wrap_policy(model)
    assert isinstance(plugin.auto_wrap_policy, functools.partial)
    assert plugin.auto_wrap_policy.func is size_based_auto_wrap_policy
    plugin = Plugin(
        auto_wrap_policy="TRANSFORMER_BASED_WRAP", transformer_cls_names_to_wrap=["Foo"]
    )
    with pytest.raises(ValueError, match="class Foo"):
        plugin.set_auto_wrap_policy(model)


def test_efficient_loading_is_published_and_needs_synchronised_states(monkeypatch):
    import os

    with pytest.warns(UserWarning, match="sync_module_states"):
        plugin = Plugin(cpu_ram_efficient_loading=True, sync_module_states=False)
    assert plugin.sync_module_states is True
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    module = torch.nn.Linear(2, 2, device="meta")
    plugin.param_init_fn(module)
    assert module.weight.device.type == "cpu"


@pytest.mark.parametrize("word", ["HYBRID_SHARD_ZERO2", "_hybrid_shard_zero2", "5", 5])
def test_every_spelling_of_the_api_for_hybrid_sharding(word):
    assert (
        Plugin(sharding_strategy=word).sharding_strategy
        is fsdp.ShardingStrategy._HYBRID_SHARD_ZERO2
    )
