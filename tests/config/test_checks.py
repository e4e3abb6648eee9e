# SPDX-License-Identifier: Apache-2.0
"""Every field of the layouts' options: a wrong type, a wrong value, two values that contradict each other."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.parallel import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accelerate.config.precision import (
    AORecipeKwargs,
    AutocastKwargs,
    GradScalerKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accelerate.config.training import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from accelerate.core.errors import ConfigurationError
from accelerate.core.imports import is_available
from accelerate.parallel.choice import choose_strategy
from accelerate.parallelism_config import ParallelismConfig


def fsdp1(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=1, **options)


def fsdp2(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=2, **options)


def from_file(zero=None, plugin=None, **others):
    """A plugin of a configuration, and of fields beside it."""
    config = {"zero_optimization": {"stage": 2, **(zero or {})}, **others}
    return DeepSpeedPlugin(hf_ds_config=config, **(plugin or {}))


TENSOR, CONTEXT, SEQUENCE = (
    TorchTensorParallelConfig,
    TorchContextParallelConfig,
    DeepSpeedSequenceParallelConfig,
)
PIPELINE, SIZES, COMPILE = PipelineParallelConfig, ParallelismConfig, TorchDynamoPlugin

# (what is made, of which fields, what the message says)
REFUSED = [
    (TorchTensorParallelPlugin, {"tp_size": 0}, "tp_size=0"),
    (
        TorchTensorParallelPlugin,
        {"tp_size": 2, "torch_device_mesh": "cpu"},
        "torch_device_mesh='cpu' with tp_size=2",
    ),
    (TENSOR, {"enable_async_tp": True}, "enable_async_tp=True needs"),
    (SEQUENCE, {"sp_seq_length_is_variable": "no"}, "sp_seq_length. must be provided"),
    (PIPELINE, {"schedule": "1f2b"}, "schedule='1f2b': use one of gpipe"),
    (PIPELINE, {"stages_per_rank": 2}, "stages_per_rank=2: with schedule='gpipe'"),
    (PIPELINE, {"split_points": ["layers.1", 2]}, "split_points contains 2"),
    (SIZES, {"cp_backend": ""}, "cp_backend must be one of"),
    (
        SIZES,
        {"tp_size": 2, "tp_handler": {}},
        "tp_handler takes a TorchTensorParallelConfig, not <class 'dict'>",
    ),
    (
        SIZES,
        {"cp_size": 2, "cp_handler": SEQUENCE()},
        "cp_handler takes a TorchContextParallelConfig",
    ),
    (FullyShardedDataParallelPlugin, {"fsdp_version": 2.5}, "fsdp_version='2.5'"),
    (CONTEXT, {"cp_comm_strategy": "gather"}, "cp_comm_strategy='gather'"),
    (SEQUENCE, {"sp_attn_implementation": "eager"}, "sp_attn_implementation: eager"),
    (fsdp1, {"sharding_strategy": 9}, "sharding_strategy=9"),
    (
        fsdp2,
        {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
        "reshard_after_forward=False and sharding_strategy=FULL_SHARD",
    ),
    (fsdp2, {"reshard_after_forward": 1}, "reshard_after_forward=1"),
    (fsdp2, {"mixed_precision_policy": {"param_dtype": torch.int32}}, "torch.int32"),
    (fsdp2, {"state_dict_type": "WHOLE"}, "state_dict_type='WHOLE'"),
    (fsdp2, {"activation_checkpointing_offload": True}, "requires `activation_checkpointing=True`"),
    (fsdp2, {"cpu_ram_efficient_loading": "nope"}, "cpu_ram_efficient_loading='nope'"),
    (DeepSpeedPlugin, {"hf_ds_config": 3}, "Received: 3"),
    (
        DeepSpeedPlugin,
        {"enable_msamp": True, "zero_stage": 3},
        "enable_msamp=True with zero_stage=3",
    ),
    (COMPILE, {"backend": "fast"}, "backend='FAST' is unknown: use one of no, "),
    (COMPILE, {"backend": "inductor", "mode": "max"}, "mode='max': use one of default"),
    (MSAMPRecipeKwargs, {"opt_level": ""}, "opt_level"),
    (TERecipeKwargs, {"margin": -1}, "margin=-1"),
    (TERecipeKwargs, {"amax_compute_algo": "mean"}, "amax_compute_algo='mean'"),
    (AORecipeKwargs, {"enable_fsdp_float8_all_gather": "x"}, "enable_fsdp_float8_all_gather='x'"),
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    monkeypatch.setattr("accelerate.config.precision.is_available", lambda name: True)


@pytest.mark.parametrize(
    "make, options, message",
    REFUSED,
    ids=[f"{make.__name__}-{'-'.join(options)}" for make, options, _ in REFUSED],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_is_refused_and_named(make, options, message):
    if make is AORecipeKwargs and not is_available("torchao"):
        pytest.skip("needs torchao")
    with pytest.raises(ConfigurationError, match=message):
        make(**options)


@pytest.mark.parametrize(
    "make, options, message",
    [
        (
            SIZES,
            {"tp_handler": TENSOR()},
            "tp_handler has no effect with tp_size=1: set tp_size above 1",
        ),
        (SIZES, {"tp_size": 2, "cp_handler": CONTEXT()}, "cp_handler has no effect with cp_size=1"),
        (SIZES, {"pp_handler": PIPELINE()}, "pp_handler has no effect with pp_size=1"),
        (
            DeepSpeedPlugin,
            {"offload_param_device": "cpu"},
            "offload_param_device='cpu' has no effect with zero_stage=2",
        ),
        (
            from_file,
            {"zero": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
            "no effect with zero_stage=0",
        ),
        (
            COMPILE,
            {"backend": "no", "use_regional_compilation": True},
            "no effect with backend='no'",
        ),
        (
            COMPILE,
            {"mode": "max-autotune", "fullgraph": True},
            "fullgraph, mode has no effect with backend='no'",
        ),
    ],
)
def test_what_does_nothing_is_said_once(make, options, message):
    with pytest.warns(UserWarning, match=message) as told:
        make(**options)
    assert len(told) == 1


def test_words_of_truth_and_what_is_right_pass_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TENSOR(sequence_parallel=1, loss_parallel="no").loss_parallel is False
        assert PIPELINE(split_points="layers.2", whole_inputs="mask").split_points == ["layers.2"]
        assert (
            fsdp2(reshard_after_forward=True, sharding_strategy="FULL_SHARD").reshard_after_forward
            is True
        )
        assert fsdp2(sharding_strategy=2).reshard_after_forward is False, (
            "the number is FSDP1's SHARD_GRAD_OP"
        )
        assert (
            fsdp2(ignored_modules=(layer for layer in [nn.Linear(1, 1)]))
            .ignored_modules[0]
            .in_features
            == 1
        )
        # A mode and options are two ways to say one thing: the default of the one must not be in the other's way.
        assert "mode" not in COMPILE(backend="inductor", options={"max_autotune": True}).to_kwargs()
        SIZES(sp_size=2, sp_handler=SEQUENCE(8, False))
        DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/fast")


def test_groups_to_reshard_to_do_not_go_with_tensor_parallelism():
    with pytest.raises(ConfigurationError, match="reshard_after_forward=2 with tp_size=2"):
        choose_strategy(8, SIZES(dp_shard_size=4, tp_size=2), fsdp2(reshard_after_forward=2))


def test_groups_that_divide_are_taken_and_a_pipeline_says_that_it_has_none():
    for world, sizes in (
        (4, None),
        (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
        (4, {"cp_size": 4}),
    ):
        plugin = fsdp2(reshard_after_forward=2)
        assert (
            choose_strategy(world, sizes and SIZES(**sizes), plugin)[1][
                "plugin"
            ].reshard_after_forward
            == 2
        )
    piped = SIZES(pp_size=2, dp_shard_size=2)
    with pytest.warns(UserWarning, match="reshard_after_forward=2 has no effect with pp_size=2"):
        choose_strategy(4, piped, fsdp2(reshard_after_forward=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose_strategy(4, piped, fsdp2())
        choose_strategy(4, piped, fsdp2(reshard_after_forward=False))


@pytest.mark.parametrize(
    "file, fields, both",
    [
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, ["=2 vs", "=4"]),
        (
            {"gradient_clipping": 1.0},
            {"gradient_clipping": 0.5},
            ["gradient_clipping=1.0 vs", "=0.5"],
        ),
        (
            {"zero": {"stage": 1}},
            {"zero_stage": 3},
            ["zero_optimization.stage=1 vs", "zero_stage=3"],
        ),
        (
            {"zero": {"offload_optimizer": {"device": "cpu"}}},
            {"offload_optimizer_device": "none"},
            ["=cpu vs", "=none"],
        ),
        (
            {"zero": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/a"}}},
            {"offload_param_device": "nvme", "offload_param_nvme_path": "/b"},
            ["nvme_path=/a vs", "=/b"],
        ),
        (
            {"zero": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
            {"zero3_save_16bit_model": False},
            ["=True vs", "zero3_save_16bit_model=False"],
        ),
    ],
)
def test_a_field_that_differs_from_the_file_is_refused_with_both_values(file, fields, both):
    with pytest.raises(ConfigurationError) as caught:
        from_file(plugin=fields, **file)
    assert all(part in str(caught.value) for part in both), caught.value


def test_a_field_fills_what_the_file_leaves_open():
    plugin = from_file(
        plugin={
            "gradient_clipping": 0.5,
            "gradient_accumulation_steps": 3,
            "offload_optimizer_device": "cpu",
        },
        gradient_clipping="auto",
    )
    config = plugin.deepspeed_config
    assert config["gradient_clipping"] == 0.5 and config["gradient_accumulation_steps"] == 3
    assert (
        config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
        and plugin.hf_ds_config.is_offload()
    )
    assert not plugin.accumulation_by_default


def test_precision_that_differs_from_the_file_is_refused():
    with pytest.raises(ConfigurationError, match=r"mixed_precision='bf16'.*bf16\.enabled=False"):
        from_file(bf16={"enabled": False}).set_mixed_precision("bf16")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            DataLoaderConfiguration,
            {"split_batches": "some"},
            "DataLoaderConfiguration.split_batches='some' is not a",
        ),
        (
            GradientAccumulationPlugin,
            {"adjust_scheduler": 3},
            "adjust_scheduler=3: use True or False",
        ),
        (
            ProjectConfiguration,
            {"total_limit": "3"},
            "ProjectConfiguration.total_limit='3' must be a number",
        ),
        (
            DistributedDataParallelKwargs,
            {"bucket_cap_mb": "25"},
            "bucket_cap_mb='25' must be a number",
        ),
        (GradScalerKwargs, {"enabled": "some"}, "GradScalerKwargs.enabled='some'"),
        (
            AutocastKwargs,
            {"cache_enabled": 3},
            "AutocastKwargs.cache_enabled=3: use True or False",
        ),
        (
            DataLoaderConfiguration,
            {"device_placement": "lasy"},
            "device_placement='lasy': use one of lazy",
        ),
        (
            DataLoaderConfiguration,
            {"device_placement": "lazy", "dispatch_batches": True},
            "device_placement='lazy' does not work with dispatch_batches=True",
        ),
    ],
)
def test_fields_of_training_options(kind, options, message):
    with pytest.raises(ConfigurationError, match=message):
        kind(**options)


def test_words_are_truth_values():
    # A text that is not empty would be true.
    config = DataLoaderConfiguration(split_batches="no", even_batches=None, non_blocking="yes")
    assert (config.split_batches, config.even_batches, config.non_blocking) == (False, None, True)
    assert ProfileKwargs(activities="cpu").activities == ["cpu"]
