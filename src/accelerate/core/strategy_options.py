# SPDX-License-Identifier: Apache-2.0
"""Rows of the registry of options that belong to one strategy: FSDP, DeepSpeed, Megatron-LM, parallel sizes, fp8."""

from __future__ import annotations

from typing import Any

from . import constants
from .errors import ConfigurationError
from .option import Group, Option, parse_bool
from .pipeline_schedules import PIPELINE_SCHEDULES

SP_ATTENTION = ("flash_attention_2", "flash_attention_3", "sdpa")
_OFFLOAD = ("none", "cpu", "nvme")


def _numbered(words: list[str]) -> dict[str, str]:
    """The numbers of a torch enum's members, in the order of the words, as other spellings of them."""
    return {str(number): word for number, word in enumerate(words, start=1)}


def _reshard(text: str, where: str) -> None:
    if text.isdigit() or text.upper() in constants.FSDP_SHARDING_STRATEGY:
        return
    try:
        parse_bool(text, where)
    except ConfigurationError:
        raise ConfigurationError(
            f"{where}={text!r}: use true, false, or the size of the groups to reshard to; "
            f"version 1 takes one of {', '.join(constants.FSDP_SHARDING_STRATEGY)}"
        ) from None


def _sp_attention(text: str, where: str) -> None:
    if text not in SP_ATTENTION and "/" not in text:
        raise ConfigurationError(
            f"{where}={text!r}: use one of {', '.join(SP_ATTENTION)}, or a kernel of the Hub (owner/name)"
        )


def _fsdp(name: str, kind: str, help: str, default: Any = None, **more: Any) -> Option:
    more.setdefault("variable", name.upper())
    return Option(name, kind, help, default, key=f"fsdp_config.{name}", when=("use_fsdp",), **more)


FSDP = Group(
    "FSDP",
    "Sharding with FSDP; only with --use_fsdp.",
    (
        _fsdp(
            "fsdp_version",
            "text",
            "1 (FullyShardedDataParallel) or 2 (fully_shard).",
            "1",
            choices=("1", "2"),
            question="Version of FSDP",
        ),
        _fsdp(
            "fsdp_offload_params",
            "truth",
            "Keep parameters and gradients in host memory.",
            "false",
            question="Keep parameters in host memory?",
        ),
        _fsdp(
            "fsdp_min_num_params",
            "int",
            "Smallest number of parameters that is wrapped on its own, for SIZE_BASED_WRAP.",
            100000000,
            least=0,
            question="Smallest number of parameters wrapped",
        ),
        _fsdp(
            "fsdp_sharding_strategy",
            "text",
            "Version 1: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2.",
            "FULL_SHARD",
            choices=tuple(constants.FSDP_SHARDING_STRATEGY),
            aliases=_numbered(constants.FSDP_SHARDING_STRATEGY) | {"_hybrid_shard_zero2": "HYBRID_SHARD_ZERO2"},
            question="What is sharded?",
        ),
        _fsdp(
            "fsdp_reshard_after_forward",
            "text",
            "Version 2: free the gathered parameters after the forward pass.",
            "true",
            check=_reshard,
            question="Free the gathered parameters after the forward pass?",
        ),
        _fsdp(
            "fsdp_auto_wrap_policy",
            "text",
            "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP.",
            choices=tuple(constants.FSDP_AUTO_WRAP_POLICY),
            question="Which layers are wrapped?",
        ),
        _fsdp(
            "fsdp_transformer_layer_cls_to_wrap",
            "text",
            "Class names of the layers to wrap, with commas.",
            variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
            question="Class names of the layers (empty: the model's own)",
        ),
        _fsdp(
            "fsdp_backward_prefetch",
            "text",
            "Version 1: BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH.",
            choices=tuple(constants.FSDP_BACKWARD_PREFETCH),
            aliases=_numbered(constants.FSDP_BACKWARD_PREFETCH[:2]),
        ),
        _fsdp(
            "fsdp_state_dict_type",
            "text",
            "FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT.",
            choices=tuple(constants.FSDP_STATE_DICT_TYPE),
            aliases=_numbered(constants.FSDP_STATE_DICT_TYPE),
            question="How are weights saved?",
        ),
        _fsdp(
            "fsdp_forward_prefetch",
            "truth",
            "Version 1: gather the next layer's parameters during the forward pass.",
            "false",
        ),
        _fsdp("fsdp_use_orig_params", "truth", "Version 1: keep the model's own parameters visible.", "true"),
        _fsdp(
            "fsdp_cpu_ram_efficient_loading",
            "truth",
            "Only rank 0 reads the weights; the others receive them.",
            "true",
            question="Load weights on rank 0 only?",
        ),
        _fsdp("fsdp_sync_module_states", "truth", "Version 1: each module starts from rank 0's values.", "true"),
        _fsdp(
            "fsdp_activation_checkpointing",
            "truth",
            "Recompute activations in the backward pass.",
            "false",
            question="Recompute activations in the backward pass?",
        ),
        _fsdp("fsdp_activation_checkpointing_offload", "truth", "Move kept activations to host memory.", "false"),
    ),
)


def _deepspeed(name: str, kind: str, help: str, variable: str | None = None, **more: Any) -> Option:
    when = ("use_deepspeed",)
    if variable is None:
        variable = f"ACCELERATE_DEEPSPEED_{name.removeprefix('deepspeed_').upper()}"
    return Option(name, kind, help, key=f"deepspeed_config.{name}", variable=variable, when=when, **more)


DEEPSPEED = Group(
    "DeepSpeed",
    "ZeRO and offloading with DeepSpeed; only with --use_deepspeed.",
    (
        _deepspeed(
            "deepspeed_config_file",
            "text",
            "DeepSpeed's own JSON configuration.",
            question="DeepSpeed JSON file (empty: none)",
        ),
        _deepspeed("zero_stage", "int", "ZeRO stage: 0, 1, 2 or 3.", least=0, greatest=3, question="ZeRO stage"),
        _deepspeed(
            "offload_optimizer_device",
            "text",
            "Device of the optimizer states: none, cpu or nvme.",
            choices=_OFFLOAD,
            question="Where are optimizer states stored?",
        ),
        _deepspeed(
            "offload_param_device",
            "text",
            "Device of the parameters: none, cpu or nvme.",
            choices=_OFFLOAD,
            question="Where are parameters stored?",
        ),
        _deepspeed("offload_optimizer_nvme_path", "text", "Folder on the NVMe disk for optimizer states."),
        _deepspeed("offload_param_nvme_path", "text", "Folder on the NVMe disk for parameters."),
        _deepspeed(
            "gradient_clipping",
            "float",
            "Largest norm of the gradients.",
            "ACCELERATE_GRADIENT_CLIPPING",
            variable_words=("auto",),
        ),
        _deepspeed(
            "zero3_init_flag",
            "truth",
            "Stage 3: build the model sharded (zero.Init).",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ),
        _deepspeed("zero3_save_16bit_model", "truth", "Stage 3: save unsharded 16-bit weights."),
        _deepspeed("deepspeed_hostfile", "text", "DeepSpeed's host file, for several machines.", ""),
        _deepspeed("deepspeed_exclusion_filter", "text", "Hosts and GPUs to leave out.", ""),
        _deepspeed("deepspeed_inclusion_filter", "text", "Hosts and GPUs to use.", ""),
        _deepspeed(
            "deepspeed_multinode_launcher",
            "text",
            "How DeepSpeed starts the other machines: pdsh, standard, openmpi, mvapich, slurm...",
            "",
        ),
        _deepspeed("deepspeed_moe_layer_cls_names", "text", "Class names of mixture-of-experts layers, with commas."),
    ),
)


def _megatron(short: str, kind: str, help: str, default: Any = None, **more: Any) -> Option:
    name = f"megatron_lm_{short}"
    key = f"megatron_lm_config.{name}"
    return Option(name, kind, help, default, key=key, variable=name.upper(), when=("use_megatron_lm",), **more)


MEGATRON = Group(
    "Megatron-LM",
    "Training with Megatron-LM; only with --use_megatron_lm.",
    (
        _megatron("tp_degree", "int", "Tensor parallel size.", 1, least=1, question="Tensor parallel size"),
        _megatron("use_custom_fsdp", "truth", "Use Megatron's own FSDP.", False),
        _megatron("no_load_optim", "truth", "Do not load the optimizer.", False),
        _megatron("eod_mask_loss", "truth", "Leave end-of-document tokens out of the loss.", False),
        _megatron("overlap_cpu_optimizer_d2h_h2d", "truth", "Overlap the offloaded optimizer's copies.", False),
        _megatron("no_save_optim", "truth", "Do not save the optimizer.", False),
        _megatron("optimizer_cpu_offload", "truth", "Keep the optimizer in host memory.", False),
        _megatron("use_precision_aware_optimizer", "truth", "Store optimizer states in a lower precision.", False),
        _megatron("decoder_last_pipeline_num_layers", "int", "Layers of the last pipeline stage."),
        _megatron("pp_degree", "int", "Pipeline parallel size.", 1, least=1, question="Pipeline parallel size"),
        _megatron("num_micro_batches", "int", "Micro-batches of a batch.", least=1),
        _megatron("sequence_parallelism", "truth", "Shard the sequence in norm and dropout layers."),
        _megatron("recompute_activations", "truth", "Selective recomputation."),
        _megatron("use_distributed_optimizer", "truth", "Shard the optimizer over the data parallel ranks."),
        _megatron("gradient_clipping", "float", "Largest norm of the gradients.", 1.0),
        _megatron("recompute_granularity", "text", "full or selective.", choices=("full", "selective")),
        _megatron("recompute_method", "text", "uniform or block.", choices=("uniform", "block")),
        _megatron("recompute_num_layers", "int", "Layers recomputed together."),
        _megatron("attention_backend", "truth", "Use the faster implementations of attention."),
        _megatron("expert_model_parallel_size", "int", "Expert parallel size.", least=1),
        _megatron("context_parallel_size", "int", "Context parallel size.", least=1),
        _megatron("attention_dropout", "float", "Dropout in attention."),
        _megatron("hidden_dropout", "float", "Dropout of hidden states."),
        _megatron("attention_softmax_in_fp32", "truth", "Attention's softmax in float32."),
        _megatron("expert_tensor_parallel_size", "int", "Tensor parallel size of the experts.", least=1),
        _megatron("calculate_per_token_loss", "truth", "Weight the loss by tokens."),
        _megatron("use_rotary_position_embeddings", "truth", "Rotary position embeddings."),
    ),
)


def _parallelism(short: str, kind: str, help: str, default: Any = None, size: str = "", **more: Any) -> Option:
    """`size`: the parallelism without which the option has no effect."""
    name = f"parallelism_config_{short}"
    when = ("use_parallelism_config", *([f"parallelism_config_{size}_size"] if size else []))
    if kind == "int":
        more.setdefault("least", 1)
    return Option(
        name, kind, help, default, key=f"parallelism_config.{name}", variable=name.upper(), when=when, **more
    )


PARALLELISM = Group(
    "parallelism",
    "Sizes of data, tensor, context, sequence and pipeline parallelism, which multiply to the number of processes. "
    "A size above 1 switches --use_parallelism_config on.",
    (
        _parallelism(
            "dp_replicate_size", "int", "Replicas of the model.", 1, question="How many replicas of the sharded model?"
        ),
        _parallelism("dp_shard_size", "int", "Processes that share the shards of one replica.", 1),
        _parallelism(
            "tp_size", "int", "Tensor parallel size.", 1, question="Split each matrix over how many processes?"
        ),
        _parallelism(
            "cp_size",
            "int",
            "Context parallel size.",
            1,
            question="Split the sequence over how many processes, exchanging keys and values?",
        ),
        _parallelism("cp_backend", "text", "Implementation of context parallelism.", "torch", choices=("torch",)),
        _parallelism(
            "cp_comm_strategy", "text", "allgather or alltoall.", "allgather", "cp", choices=("allgather", "alltoall")
        ),
        _parallelism(
            "sp_size",
            "int",
            "Sequence parallel size.",
            1,
            question="Split the sequence over how many processes, exchanging heads?",
        ),
        _parallelism(
            "sp_backend", "text", "Implementation of sequence parallelism.", "deepspeed", choices=("deepspeed",)
        ),
        _parallelism("sp_seq_length", "int", "Length of the sequences, in tokens.", None, "sp"),
        _parallelism("sp_seq_length_is_variable", "truth", "Sequences differ in length.", True, "sp"),
        _parallelism(
            "sp_attn_implementation", "text", "Attention of sequence parallelism.", "sdpa", "sp", check=_sp_attention
        ),
        _parallelism(
            "pp_size", "int", "Pipeline parallel size.", 1, question="Split the layers over how many processes?"
        ),
        _parallelism(
            "pp_schedule", "text", "Schedule of the pipeline.", None, "pp", choices=tuple(PIPELINE_SCHEDULES)
        ),
        _parallelism("pp_num_microbatches", "int", "Micro-batches of a batch in a pipeline.", None, "pp"),
    ),
)


def _fp8(short: str, kind: str, help: str, default: Any = None, **more: Any) -> Option:
    # The key of the format carries the prefix in the API's files, the other keys do not.
    key = "fp8_config." + ("fp8_format" if short == "format" else short)
    more.setdefault("variable", f"ACCELERATE_FP8_{short.upper()}")
    return Option(f"fp8_{short}", kind, help, default, key=key, when=("fp8",), **more)


FP8_OPTIONS: tuple[Option, ...] = (
    _fp8("backend", "text", "Implementation of 8-bit floats.", choices=("ao", "te", "msamp")),
    _fp8("use_autocast_during_eval", "switch", "8-bit floats in evaluation too.", False),
    _fp8("margin", "int", "Margin of the scaling factor.", 0, least=0),
    _fp8("interval", "int", "Steps between two updates of the scaling factor.", 1, least=1),
    _fp8("format", "text", "Number format.", "HYBRID", choices=("HYBRID", "E4M3", "E5M2")),
    _fp8("amax_history_len", "int", "Steps whose largest values are kept.", 1024, least=1),
    _fp8(
        "amax_compute_algo",
        "text",
        "How the largest value is chosen from the history.",
        "most_recent",
        choices=("max", "most_recent"),
    ),
    _fp8("opt_level", "text", "MS-AMP's optimization level.", "O2", choices=("O1", "O2")),
    _fp8("enable_fsdp_float8_all_gather", "truth", "Gather FSDP's shards as 8-bit floats.", True),
    _fp8("pad_inner_dim", "truth", "Pad inner dimensions to multiples of 16.", True),
    # Three truth values in one; a variable each is published.
    _fp8(
        "override_linear_precision",
        "text",
        "Run linear layers in higher precision in the forward pass, the input's and the weight's gradient: "
        "three truth values with commas.",
        "false,false,false",
        variable="",
    ),
)
