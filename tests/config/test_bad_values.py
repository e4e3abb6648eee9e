# SPDX-License-Identifier: Apache-2.0
"""Every field of the layouts' options: a wrong type, a wrong value, two values that contradict each other."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp

from accelerate.config.deepspeed import DeepSpeedPlugin
from accelerate.config.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelerate.config.fsdp import FullyShardedDataParallelPlugin
from accelerate.config.parallel import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from accelerate.config.precision import AutocastKwargs, GradScalerKwargs
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


TENSOR, CONTEXT, SEQUENCE = TorchTensorParallelConfig, TorchContextParallelConfig, DeepSpeedSequenceParallelConfig
PIPELINE, SIZES, COMPILE = PipelineParallelConfig, ParallelismConfig, TorchDynamoPlugin
NVME = {"device": "nvme"}

# (what is made, of which fields, what the message says)
REFUSED = [
    (TorchTensorParallelPlugin, {"tp_size": 0}, "tp_size=0"),
    (TorchTensorParallelPlugin, {"tp_size": 2, "torch_device_mesh": "cpu"}, "torch_device_mesh='cpu' with tp_size=2"),
    (TENSOR, {"enable_async_tp": "please"}, "enable_async_tp='please'"),
    (TENSOR, {"enable_async_tp": True}, "enable_async_tp=True needs"),
    (TENSOR, {"sequence_parallel": 2}, "sequence_parallel=2"),
    (TENSOR, {"loss_parallel": []}, r"loss_parallel=\[\]"),
    (TENSOR, {"plan": {}}, "plan={}"),
    (TENSOR, {"plan": {3: "colwise"}}, "key 3"),
    (CONTEXT, {"cp_comm_strategy": 3}, "cp_comm_strategy: 3"),
    (SEQUENCE, {"sp_seq_length": "long"}, "sp_seq_length='long'"),
    (SEQUENCE, {"sp_seq_length": -8}, "sp_seq_length=-8"),
    (SEQUENCE, {"sp_seq_length_is_variable": "maybe"}, "sp_seq_length_is_variable='maybe'"),
    (SEQUENCE, {"sp_seq_length_is_variable": "no"}, "sp_seq_length. must be provided"),
    (SEQUENCE, {"sp_attn_implementation": 3}, "sp_attn_implementation=3"),
    (PIPELINE, {"schedule": 3}, "schedule=3"),
    (PIPELINE, {"schedule": "1f2b"}, "schedule='1f2b': use one of gpipe"),
    (PIPELINE, {"num_microbatches": 2.0}, "num_microbatches=2.0"),
    (PIPELINE, {"stages_per_rank": 0, "schedule": "interleaved"}, "stages_per_rank=0"),
    (PIPELINE, {"stages_per_rank": 2}, "stages_per_rank=2: under schedule='gpipe'"),
    (PIPELINE, {"split_points": 3}, "split_points=3"),
    (PIPELINE, {"split_points": ["layers.1", 2]}, "split_points holds 2"),
    (PIPELINE, {"balance": "luck"}, "balance='luck'"),
    (PIPELINE, {"example_inputs": [1]}, r"example_inputs=\[1\]"),
    (PIPELINE, {"balance": "time", "example_inputs": {}}, "balance='time'"),
    (PIPELINE, {"placement": "last"}, "placement='last'"),
    (PIPELINE, {"placement": {"norm": "middle"}}, "norm='middle'"),
    (PIPELINE, {"loss_fn": "mse"}, "loss_fn='mse'"),
    (PIPELINE, {"whole_inputs": [None]}, "whole_inputs holds None"),
    (PIPELINE, {"gather_output": "some"}, "gather_output='some'"),
    (SIZES, {"dp_replicate_size": 1.5}, "dp_replicate_size=1.5"),
    (SIZES, {"dp_shard_size": True}, "dp_shard_size=True"),
    (SIZES, {"cp_backend": ""}, "cp_backend must be one of"),
    (SIZES, {"sp_backend": 0}, "sp_backend must be one of"),
    (SIZES, {"tp_size": 2, "tp_handler": {}}, "tp_handler takes a TorchTensorParallelConfig, not <class 'dict'>"),
    (SIZES, {"pp_handler": 1}, "pp_handler takes a PipelineParallelConfig, not <class 'int'>"),
    (SIZES, {"cp_size": 2, "cp_handler": SEQUENCE()}, "cp_backend=torch requires"),
    (SIZES, {"sp_size": 2, "sp_handler": SEQUENCE(7, False)}, "sp_seq_length=7 with sp_size=2"),
    (FullyShardedDataParallelPlugin, {"fsdp_version": 2.5}, "fsdp_version=2.5"),
    (FullyShardedDataParallelPlugin, {"fsdp_version": True}, "fsdp_version=True"),
    (fsdp1, {"sharding_strategy": 9}, "sharding_strategy=9"),
    (
        fsdp1,
        {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": "SHARD_GRAD_OP"},
        "sharding_strategy=FULL_SHARD and reshard_after_forward=SHARD_GRAD_OP",
    ),
    (
        fsdp2,
        {"sharding_strategy": "FULL_SHARD", "reshard_after_forward": False},
        "reshard_after_forward=False and sharding_strategy=FULL_SHARD",
    ),
    (fsdp2, {"reshard_after_forward": 1}, "reshard_after_forward=1"),
    (fsdp2, {"reshard_after_forward": 2.0}, "reshard_after_forward=2.0"),
    (fsdp1, {"backward_prefetch": 3.5}, "backward_prefetch=3.5"),
    (fsdp2, {"mixed_precision_policy": {"param_dtype": torch.int32}}, "torch.int32"),
    (fsdp2, {"mixed_precision_policy": 16}, "got int"),
    (fsdp2, {"auto_wrap_policy": 3}, "auto_wrap_policy=3 cannot be called"),
    (fsdp2, {"cpu_offload": "yes"}, "got yes"),
    (fsdp2, {"ignored_modules": 3}, "ignored_modules holds 3"),
    (fsdp2, {"ignored_modules": ["head"]}, "ignored_modules holds 'head'"),
    (fsdp2, {"ignored_modules": "(head"}, "is no regular expression"),
    (fsdp2, {"state_dict_type": "WHOLE"}, "state_dict_type='WHOLE'"),
    (
        fsdp2,
        {"state_dict_type": "FULL_STATE_DICT", "state_dict_config": fsdp.ShardedStateDictConfig()},
        "state_dict_type=FULL_STATE_DICT: it takes a FullStateDictConfig",
    ),
    (fsdp1, {"optim_state_dict_config": "cpu"}, "optim_state_dict_config='cpu'"),
    (fsdp1, {"limit_all_gathers": None}, "limit_all_gathers=None"),
    (fsdp1, {"use_orig_params": 5}, "use_orig_params=5"),
    (fsdp2, {"use_orig_params": "perhaps"}, "use_orig_params='perhaps'"),
    (fsdp1, {"param_init_fn": "zeros"}, "param_init_fn='zeros'"),
    (fsdp1, {"sync_module_states": (1,)}, "sync_module_states="),
    (fsdp1, {"forward_prefetch": 2}, "forward_prefetch=2"),
    (fsdp2, {"activation_checkpointing": 2}, "activation_checkpointing=2"),
    (fsdp2, {"activation_checkpointing_offload": True}, "requires `activation_checkpointing=True`"),
    (fsdp2, {"cpu_ram_efficient_loading": "nope"}, "cpu_ram_efficient_loading='nope'"),
    (fsdp2, {"transformer_cls_names_to_wrap": [nn.Linear]}, "transformer_cls_names_to_wrap holds"),
    (fsdp2, {"transformer_cls_names_to_wrap": 3}, "transformer_cls_names_to_wrap=3"),
    (fsdp2, {"min_num_params": 1e6}, "min_num_params"),
    (fsdp2, {"min_num_params": -1}, "min_num_params=-1"),
    (DeepSpeedPlugin, {"hf_ds_config": 3}, "Received: 3"),
    (DeepSpeedPlugin, {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0"),
    (DeepSpeedPlugin, {"gradient_accumulation_steps": "4"}, "gradient_accumulation_steps='4'"),
    (DeepSpeedPlugin, {"gradient_clipping": -1.0}, "gradient_clipping=-1.0"),
    (DeepSpeedPlugin, {"gradient_clipping": "1"}, "gradient_clipping='1'"),
    (DeepSpeedPlugin, {"zero_stage": True}, "zero_stage=True"),
    (DeepSpeedPlugin, {"zero_stage": "3"}, "zero_stage='3'"),
    (DeepSpeedPlugin, {"is_train_batch_min": "min"}, "is_train_batch_min='min'"),
    (DeepSpeedPlugin, {"offload_optimizer_device": "disk"}, "offload_optimizer_device='disk'"),
    (DeepSpeedPlugin, {"offload_param_device": True}, "offload_param_device=True"),
    (DeepSpeedPlugin, {"zero_stage": 3, "offload_param_device": "nvme"}, "needs offload_param_nvme_path"),
    (DeepSpeedPlugin, {"zero_stage": 3, "offload_optimizer_nvme_path": 3}, "offload_optimizer_nvme_path=3"),
    (DeepSpeedPlugin, {"zero3_init_flag": "on demand"}, "zero3_init_flag='on demand'"),
    (DeepSpeedPlugin, {"zero3_save_16bit_model": 16}, "zero3_save_16bit_model=16"),
    (DeepSpeedPlugin, {"transformer_moe_cls_names": ["Experts"]}, "transformer_moe_cls_names="),
    (DeepSpeedPlugin, {"enable_msamp": "O1"}, "enable_msamp='O1'"),
    (DeepSpeedPlugin, {"msamp_opt_level": "O3"}, "msamp_opt_level='O3'"),
    (DeepSpeedPlugin, {"enable_msamp": True, "zero_stage": 3}, "enable_msamp=True with zero_stage=3"),
    (from_file, {"zero_optimization": True}, "zero_optimization=True"),
    (from_file, {"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu=0"),
    (from_file, {"train_batch_size": "8"}, "train_batch_size='8'"),
    (from_file, {"zero": {"stage": 4}}, "zero_stage=4"),
    (from_file, {"zero": {"stage": 3, "offload_param": NVME}}, "needs offload_param_nvme_path"),
    (from_file, {"zero": {"offload_optimizer": "cpu"}}, "zero_optimization.offload_optimizer='cpu'"),
    (from_file, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled=True and bf16.enabled=True"),
    (from_file, {"bf16": True}, "bf16=True"),
    (from_file, {"optimizer": "AdamW"}, "optimizer='AdamW'"),
    (COMPILE, {"backend": "fast"}, "dynamo backend 'fast'"),
    (COMPILE, {"backend": "inductor", "mode": "max"}, "mode='max': use one of default"),
    (COMPILE, {"backend": "inductor", "mode": "default", "options": {"a": 1}}, "takes one of them"),
    (COMPILE, {"backend": "inductor", "fullgraph": "whole"}, "fullgraph='whole'"),
    (COMPILE, {"backend": "inductor", "dynamic": 4}, "dynamic=4"),
    (COMPILE, {"backend": "inductor", "options": ["a"]}, r"options=\['a'\]"),
    (COMPILE, {"backend": "inductor", "disable": "never"}, "disable='never'"),
    (COMPILE, {"backend": "inductor", "use_regional_compilation": 3}, "use_regional_compilation=3"),
    (MSAMPRecipeKwargs, {"opt_level": ""}, "opt_level"),
    (FP8RecipeKwargs, {"backend": 3}, "backend=3"),
    (TERecipeKwargs, {"use_autocast_during_eval": "x"}, "use_autocast_during_eval='x'"),
    (TERecipeKwargs, {"margin": -1}, "margin=-1"),
    (TERecipeKwargs, {"interval": "1"}, "interval='1'"),
    (TERecipeKwargs, {"fp8_format": 8}, "fp8_format=8"),
    (TERecipeKwargs, {"amax_history_len": 0}, "amax_history_len=0"),
    (TERecipeKwargs, {"amax_compute_algo": "mean"}, "amax_compute_algo='mean'"),
    (TERecipeKwargs, {"override_linear_precision": (True,)}, "override_linear_precision="),
    (TERecipeKwargs, {"use_mxfp8_block_scaling": 7}, "use_mxfp8_block_scaling=7"),
    (AORecipeKwargs, {"config": {"emulate": True}}, "takes a torchao.float8.Float8LinearConfig"),
    (AORecipeKwargs, {"module_filter_func": ["layer"]}, "module_filter_func="),
    (AORecipeKwargs, {"pad_inner_dim": 16}, "pad_inner_dim=16"),
    (AORecipeKwargs, {"enable_fsdp_float8_all_gather": "x"}, "enable_fsdp_float8_all_gather='x'"),
]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    monkeypatch.delenv("FSDP_VERSION", raising=False)
    monkeypatch.setattr("accelerate.config.fp8.is_available", lambda name: True)


@pytest.mark.parametrize(
    "make, options, message", REFUSED, ids=[f"{make.__name__}-{'-'.join(options)}" for make, options, _ in REFUSED]
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
        (SIZES, {"tp_handler": TENSOR()}, "tp_handler has no effect with tp_size=1: set tp_size above 1"),
        (SIZES, {"tp_size": 2, "cp_handler": CONTEXT()}, "cp_handler has no effect with cp_size=1"),
        (
            SIZES,
            {"sp_handler": SEQUENCE(), "pp_handler": PIPELINE()},
            "sp_handler and pp_handler have no effect with sp_size=1 and pp_size=1",
        ),
        (fsdp2, {"transformer_cls_names_to_wrap": ["Block"]}, "no effect with auto_wrap_policy=NO_WRAP"),
        (fsdp1, {"min_num_params": 10}, "min_num_params=10 has no effect with auto_wrap_policy=NO_WRAP"),
        (fsdp2, {"auto_wrap_policy": "SIZE_BASED_WRAP"}, "without min_num_params wraps nothing"),
        (
            DeepSpeedPlugin,
            {"offload_param_device": "cpu"},
            "offload_param_device='cpu' has no effect with zero_stage=2",
        ),
        (
            DeepSpeedPlugin,
            {"offload_optimizer_nvme_path": "/fast"},
            "offload_optimizer_nvme_path='/fast' has no effect",
        ),
        (from_file, {"zero": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}, "no effect with zero_stage=0"),
        (COMPILE, {"backend": "no", "use_regional_compilation": True}, "no effect with backend='no'"),
        (COMPILE, {"mode": "max-autotune", "fullgraph": True}, "fullgraph, mode has no effect with backend='no'"),
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
        assert fsdp2(reshard_after_forward=True, sharding_strategy="FULL_SHARD").reshard_after_forward is True
        assert fsdp2(sharding_strategy=2).reshard_after_forward is False, "the number is FSDP1's SHARD_GRAD_OP"
        assert fsdp2(ignored_modules=(layer for layer in [nn.Linear(1, 1)])).ignored_modules[0].in_features == 1
        # A mode and options are two ways to say one thing: the default of the one must not be in the other's way.
        assert "mode" not in COMPILE(backend="inductor", options={"max_autotune": True}).to_kwargs()
        SIZES(sp_size=2, sp_handler=SEQUENCE(8, False))
        DeepSpeedPlugin(zero_stage=3, offload_param_device="nvme", offload_param_nvme_path="/fast")


@pytest.mark.parametrize(
    "world, sizes, size, message",
    [
        (4, None, 3, r"reshard_after_forward=3.*divide the 4 processes. Use 2, 4, True or False"),
        (4, None, 8, "reshard_after_forward=8"),
        (1, None, 2, "Use no number, True or False"),
        (4, {"dp_replicate_size": 2, "dp_shard_size": 2}, 4, "the 2 ranks of dp_replicate=2 x dp_shard=2"),
        (8, {"dp_shard_size": 4, "cp_size": 2}, 3, "the 8 ranks of dp_shard=4 x cp=2"),
        (8, {"dp_shard_size": 4, "tp_size": 2}, 2, "reshard_after_forward=2 with tp_size=2"),
        (4, {"dp_shard_size": 2, "tp_size": 2}, 4, "the 2 ranks of dp_shard=2 x tp=2"),
    ],
)
def test_groups_to_reshard_to_divide_the_ranks(world, sizes, size, message):
    with pytest.raises(ConfigurationError, match=message):
        choose_strategy(world, sizes and SIZES(**sizes), fsdp2(reshard_after_forward=size))


def test_groups_that_divide_are_taken_and_a_pipeline_says_that_it_has_none():
    for world, sizes in ((4, None), (4, {"dp_replicate_size": 2, "dp_shard_size": 2}), (4, {"cp_size": 4})):
        plugin = fsdp2(reshard_after_forward=2)
        assert choose_strategy(world, sizes and SIZES(**sizes), plugin)[1]["plugin"].reshard_after_forward == 2
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
        ({"gradient_clipping": 1.0}, {"gradient_clipping": 0.5}, ["gradient_clipping=1.0 vs", "=0.5"]),
        ({"zero": {"stage": 1}}, {"zero_stage": 3}, ["zero_optimization.stage=1 vs", "zero_stage=3"]),
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
        plugin={"gradient_clipping": 0.5, "gradient_accumulation_steps": 3, "offload_optimizer_device": "cpu"},
        gradient_clipping="auto",
    )
    config = plugin.deepspeed_config
    assert config["gradient_clipping"] == 0.5 and config["gradient_accumulation_steps"] == 3
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu" and plugin.hf_ds_config.is_offload()
    assert not plugin.accumulation_by_default


def test_precision_that_differs_from_the_file_is_refused():
    with pytest.raises(ConfigurationError, match=r"mixed_precision='bf16'.*bf16\.enabled=False"):
        from_file(bf16={"enabled": False}).set_mixed_precision("bf16")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DataLoaderConfiguration, {"split_batches": "some"}, "DataLoaderConfiguration.split_batches='some' is not a"),
        (DataLoaderConfiguration, {"data_seed": "x"}, "DataLoaderConfiguration.data_seed='x' must be a number"),
        (GradientAccumulationPlugin, {"adjust_scheduler": 3}, "adjust_scheduler=3 is neither True nor False"),
        (ProjectConfiguration, {"total_limit": "3"}, "ProjectConfiguration.total_limit='3' must be a number"),
        (ProjectConfiguration, {"iteration": -1}, "iteration=-1 must be an integer of at least 0"),
        (DistributedDataParallelKwargs, {"bucket_cap_mb": "25"}, "bucket_cap_mb='25' must be a number"),
        (DistributedDataParallelKwargs, {"bucket_cap_mb": -1}, "bucket_cap_mb=-1: give a number of MiB above 0"),
        (ProfileKwargs, {"schedule_option": {"wait": 1}}, "give a dict with at least wait, warmup and active"),
        (ProfileKwargs, {"on_trace_ready": 3}, "on_trace_ready=3 cannot be called"),
        (GradScalerKwargs, {"init_scale": "big"}, "GradScalerKwargs.init_scale='big' must be a number"),
        (GradScalerKwargs, {"init_scale": 0}, "GradScalerKwargs.init_scale=0 must be over 0"),
        (AutocastKwargs, {"cache_enabled": 3}, "AutocastKwargs.cache_enabled=3 is neither True nor False"),
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
