# SPDX-License-Identifier: Apache-2.0
"""Rows of the registry of options that belong to one strategy: FSDP, DeepSpeed, Megatron-LM, parallel sizes, fp8."""

from __future__ import annotations

from typing import Any

from . import constants
from .enums import PIPELINE_SCHEDULES
from .errors import ConfigurationError
from .option import Group, Option, parse_bool

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
            f"{where}={text!r}: use one of {', '.join(SP_ATTENTION)}, or a kernel from the Hub "
            "(owner/name)"
        )


def _fsdp(name: str, kind: str, help: str, default: Any = None, **more: Any) -> Option:
    more.setdefault("variable", name.upper())
    return Option(name, kind, help, default, key=f"fsdp_config.{name}", when=("use_fsdp",), **more)


FSDP = Group(
    "FSDP",
    "Sharding with FSDP (with --use_fsdp).",
    (
        _fsdp(
            "fsdp_version",
            "text",
            "Version of FSDP: 1 (FullyShardedDataParallel) or 2 (fully_shard).",
            "1",
            choices=("1", "2"),
            question="Version of FSDP",
        ),
        _fsdp(
            "fsdp_offload_params",
            "truth",
            "Keep parameters, gradients and optimizer states in host memory.",
            "false",
            question="Keep parameters in host memory?",
        ),
        _fsdp(
            "fsdp_min_num_params",
            "int",
            "With SIZE_BASED_WRAP: wrap each module that has at least this many parameters.",
            100000000,
            least=0,
            question="Minimum number of parameters of a wrapped module",
        ),
        _fsdp(
            "fsdp_sharding_strategy",
            "text",
            "Version 1: what to shard: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or "
            "HYBRID_SHARD_ZERO2.",
            "FULL_SHARD",
            choices=tuple(constants.FSDP_SHARDING_STRATEGY),
            aliases=_numbered(constants.FSDP_SHARDING_STRATEGY)
            | {"_hybrid_shard_zero2": "HYBRID_SHARD_ZERO2"},
            question="What should be sharded?",
        ),
        _fsdp(
            "fsdp_reshard_after_forward",
            "text",
            "Version 2: free the gathered parameters after the forward pass and gather them "
            "again for the backward pass. A number is the size of the groups to reshard to.",
            "true",
            check=_reshard,
            question="Free the gathered parameters after the forward pass?",
        ),
        _fsdp(
            "fsdp_auto_wrap_policy",
            "text",
            "How to choose the modules that are sharded separately: TRANSFORMER_BASED_WRAP (by "
            "class), SIZE_BASED_WRAP (by size) or NO_WRAP.",
            choices=tuple(constants.FSDP_AUTO_WRAP_POLICY),
            question="Which layers should be wrapped?",
        ),
        _fsdp(
            "fsdp_transformer_layer_cls_to_wrap",
            "text",
            "With TRANSFORMER_BASED_WRAP: class names of the layers to wrap, separated by commas.",
            variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
            question="Class names of the layers (empty: the model's own)",
        ),
        _fsdp(
            "fsdp_backward_prefetch",
            "text",
            "Version 1: when to gather the next layer's parameters in the backward pass: "
            "BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH.",
            choices=tuple(constants.FSDP_BACKWARD_PREFETCH),
            aliases=_numbered(constants.FSDP_BACKWARD_PREFETCH[:2]),
        ),
        _fsdp(
            "fsdp_state_dict_type",
            "text",
            "Format of saved models and optimizers: FULL_STATE_DICT, LOCAL_STATE_DICT or SHARDED_STATE_DICT.",
            choices=tuple(constants.FSDP_STATE_DICT_TYPE),
            aliases=_numbered(constants.FSDP_STATE_DICT_TYPE),
            question="How should weights be saved?",
        ),
        _fsdp(
            "fsdp_forward_prefetch",
            "truth",
            "Version 1: gather the next layer's parameters during the forward pass.",
            "false",
        ),
        _fsdp(
            "fsdp_use_orig_params",
            "truth",
            "Version 1: keep the model's original parameters instead of flattened ones.",
            "true",
        ),
        _fsdp(
            "fsdp_cpu_ram_efficient_loading",
            "truth",
            "Load the weights into memory only on rank 0, which sends them to the other ranks.",
            "true",
            question="Load weights only on rank 0?",
        ),
        _fsdp(
            "fsdp_sync_module_states",
            "truth",
            "Version 1: send rank 0's parameters and buffers to all ranks at the start.",
            "true",
        ),
        _fsdp(
            "fsdp_activation_checkpointing",
            "truth",
            "Recompute activations in the backward pass, which saves memory.",
            "false",
            question="Recompute activations in the backward pass?",
        ),
        _fsdp(
            "fsdp_activation_checkpointing_offload",
            "truth",
            "Version 2, with activation checkpointing: keep the saved inputs in host memory.",
            "false",
        ),
    ),
)


def _deepspeed(name: str, kind: str, help: str, variable: str | None = None, **more: Any) -> Option:
    when = ("use_deepspeed",)
    if variable is None:
        variable = f"ACCELERATE_DEEPSPEED_{name.removeprefix('deepspeed_').upper()}"
    return Option(
        name, kind, help, key=f"deepspeed_config.{name}", variable=variable, when=when, **more
    )


DEEPSPEED = Group(
    "DeepSpeed",
    "ZeRO and offloading with DeepSpeed (with --use_deepspeed).",
    (
        _deepspeed(
            "deepspeed_config_file",
            "text",
            "JSON file with a DeepSpeed configuration.",
            question="DeepSpeed JSON file (empty: none)",
        ),
        _deepspeed(
            "zero_stage",
            "int",
            "ZeRO stage: 0, 1 (shards optimizer states), 2 (also shards gradients) or 3 (also "
            "shards parameters).",
            least=0,
            greatest=3,
            question="ZeRO stage",
        ),
        _deepspeed(
            "offload_optimizer_device",
            "text",
            "Where to offload optimizer states: none, cpu or nvme.",
            choices=_OFFLOAD,
            question="Where should optimizer states be stored?",
        ),
        _deepspeed(
            "offload_param_device",
            "text",
            "Where to offload parameters (stage 3): none, cpu or nvme.",
            choices=_OFFLOAD,
            question="Where should parameters be stored?",
        ),
        _deepspeed(
            "offload_optimizer_nvme_path",
            "text",
            "Folder on an NVMe disk for offloaded optimizer states.",
        ),
        _deepspeed(
            "offload_param_nvme_path",
            "text",
            "Folder on an NVMe disk for offloaded parameters.",
        ),
        _deepspeed(
            "gradient_clipping",
            "float",
            "Maximum gradient norm, above which gradients are clipped.",
            "ACCELERATE_GRADIENT_CLIPPING",
            variable_words=("auto",),
        ),
        _deepspeed(
            "zero3_init_flag",
            "truth",
            "Stage 3: shard the model while it is built (zero.Init).",
            "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ),
        _deepspeed(
            "zero3_save_16bit_model",
            "truth",
            "Stage 3: gather the 16-bit weights when the model is saved.",
        ),
        _deepspeed(
            "deepspeed_hostfile",
            "text",
            "Host file for DeepSpeed's launcher, for runs on several machines.",
            "",
        ),
        _deepspeed(
            "deepspeed_exclusion_filter",
            "text",
            "Hosts and GPUs of the host file to exclude, in DeepSpeed's notation "
            "(host1@host2:0,1).",
            "",
        ),
        _deepspeed(
            "deepspeed_inclusion_filter",
            "text",
            "Hosts and GPUs of the host file to use, in the same notation.",
            "",
        ),
        _deepspeed(
            "deepspeed_multinode_launcher",
            "text",
            "Program that DeepSpeed uses to start processes on other machines: pdsh, standard, "
            "openmpi, mvapich, mpich, slurm, ...",
            "",
        ),
        _deepspeed(
            "deepspeed_moe_layer_cls_names",
            "text",
            "Class names of mixture-of-experts layers, separated by commas.",
        ),
    ),
)


def _megatron(short: str, kind: str, help: str, default: Any = None, **more: Any) -> Option:
    name = f"megatron_lm_{short}"
    key = f"megatron_lm_config.{name}"
    return Option(
        name, kind, help, default, key=key, variable=name.upper(), when=("use_megatron_lm",), **more
    )


MEGATRON = Group(
    "Megatron-LM",
    "Training with Megatron-LM (with --use_megatron_lm).",
    (
        _megatron(
            "tp_degree", "int", "Tensor parallel size.", 1, least=1, question="Tensor parallel size"
        ),
        _megatron("use_custom_fsdp", "truth", "Use Megatron-LM's implementation of FSDP.", False),
        _megatron("no_load_optim", "truth", "Do not load the optimizer from checkpoints.", False),
        _megatron("eod_mask_loss", "truth", "Leave end-of-document tokens out of the loss.", False),
        _megatron(
            "overlap_cpu_optimizer_d2h_h2d",
            "truth",
            "Overlap an offloaded optimizer's copies between device and host with computation.",
            False,
        ),
        _megatron("no_save_optim", "truth", "Do not save the optimizer in checkpoints.", False),
        _megatron(
            "optimizer_cpu_offload", "truth", "Keep the optimizer states in host memory.", False
        ),
        _megatron(
            "use_precision_aware_optimizer",
            "truth",
            "Store optimizer states in a lower precision.",
            False,
        ),
        _megatron(
            "decoder_last_pipeline_num_layers",
            "int",
            "Number of layers in the last pipeline stage.",
        ),
        _megatron(
            "pp_degree",
            "int",
            "Pipeline parallel size.",
            1,
            least=1,
            question="Pipeline parallel size",
        ),
        _megatron(
            "num_micro_batches",
            "int",
            "Number of micro-batches into which a batch is split.",
            least=1,
        ),
        _megatron(
            "sequence_parallelism", "truth", "Shard the sequence in norm and dropout layers."
        ),
        _megatron(
            "recompute_activations",
            "truth",
            "Recompute the activations of attention in the backward pass (selective recomputation).",
        ),
        _megatron(
            "use_distributed_optimizer",
            "truth",
            "Shard the optimizer over the data parallel ranks.",
        ),
        _megatron(
            "gradient_clipping",
            "float",
            "Maximum gradient norm, above which gradients are clipped.",
            1.0,
        ),
        _megatron(
            "recompute_granularity",
            "text",
            "Activations to recompute: full (of entire layers) or selective (only of attention).",
            choices=("full", "selective"),
        ),
        _megatron(
            "recompute_method",
            "text",
            "With full recomputation: uniform (groups of equal size) or block (the first layers of each stage).",
            choices=("uniform", "block"),
        ),
        _megatron(
            "recompute_num_layers",
            "int",
            "Number of layers in a group (uniform), or number of recomputed layers in a stage "
            "(block).",
        ),
        _megatron("attention_backend", "truth", "Use the faster implementations of attention."),
        _megatron("expert_model_parallel_size", "int", "Expert parallel size.", least=1),
        _megatron("context_parallel_size", "int", "Context parallel size.", least=1),
        _megatron("attention_dropout", "float", "Dropout probability of attention."),
        _megatron("hidden_dropout", "float", "Dropout probability of hidden states."),
        _megatron(
            "attention_softmax_in_fp32", "truth", "Compute the softmax of attention in float32."
        ),
        _megatron(
            "expert_tensor_parallel_size", "int", "Tensor parallel size of the experts.", least=1
        ),
        _megatron(
            "calculate_per_token_loss",
            "truth",
            "Average the loss over tokens instead of micro-batches.",
        ),
        _megatron("use_rotary_position_embeddings", "truth", "Use rotary position embeddings."),
    ),
)


def _parallelism(
    short: str, kind: str, help: str, default: Any = None, size: str = "", **more: Any
) -> Option:
    """`size`: the parallelism without which the option has no effect."""
    name = f"parallelism_config_{short}"
    when = ("use_parallelism_config", *([f"parallelism_config_{size}_size"] if size else []))
    if kind == "int":
        more.setdefault("least", 1)
    return Option(
        name,
        kind,
        help,
        default,
        key=f"parallelism_config.{name}",
        variable=name.upper(),
        when=when,
        **more,
    )


PARALLELISM = Group(
    "parallelism",
    "Sizes of data, tensor, context, sequence and pipeline parallelism. Their product is the "
    "number of processes. A size above 1 turns on --use_parallelism_config.",
    (
        _parallelism(
            "dp_replicate_size",
            "int",
            "Number of replicas of the model (data parallelism).",
            1,
            question="How many replicas of the sharded model?",
        ),
        _parallelism(
            "dp_shard_size",
            "int",
            "Number of processes over which one replica is sharded (FSDP).",
            1,
        ),
        _parallelism(
            "tp_size",
            "int",
            "Tensor parallel size.",
            1,
            question="Over how many processes should each matrix be split?",
        ),
        _parallelism(
            "cp_size",
            "int",
            "Context parallel size.",
            1,
            question="Over how many processes should the sequence be split, exchanging keys and "
            "values?",
        ),
        _parallelism(
            "cp_backend",
            "text",
            "Implementation of context parallelism.",
            "torch",
            choices=("torch",),
        ),
        _parallelism(
            "cp_comm_strategy",
            "text",
            "How context parallelism exchanges keys and values: allgather or alltoall.",
            "allgather",
            "cp",
            choices=("allgather", "alltoall"),
        ),
        _parallelism(
            "sp_size",
            "int",
            "Sequence parallel size.",
            1,
            question="Over how many processes should the sequence be split, exchanging heads?",
        ),
        _parallelism(
            "sp_backend",
            "text",
            "Implementation of sequence parallelism.",
            "deepspeed",
            choices=("deepspeed",),
        ),
        _parallelism(
            "sp_seq_length",
            "int",
            "Length of the sequences in tokens, for sequence parallelism.",
            None,
            "sp",
        ),
        _parallelism(
            "sp_seq_length_is_variable",
            "truth",
            "Batches have sequences of different lengths.",
            True,
            "sp",
        ),
        _parallelism(
            "sp_attn_implementation",
            "text",
            "Attention implementation of sequence parallelism: sdpa, flash_attention_2, "
            "flash_attention_3, or a kernel from the Hub (owner/name).",
            "sdpa",
            "sp",
            check=_sp_attention,
        ),
        _parallelism(
            "pp_size",
            "int",
            "Pipeline parallel size.",
            1,
            question="Over how many processes should the layers be split?",
        ),
        _parallelism(
            "pp_schedule",
            "text",
            "Order in which pipeline stages compute their micro-batches.",
            None,
            "pp",
            choices=tuple(PIPELINE_SCHEDULES),
        ),
        _parallelism(
            "pp_loss_reduction",
            "text",
            "How to compute the loss of a batch from the losses of its micro-batches. gpipe does "
            "not use this option.",
            None,
            "pp",
            choices=("mean", "sum"),
        ),
        _parallelism(
            "pp_num_microbatches",
            "int",
            "Number of micro-batches into which a pipeline splits a batch.",
            None,
            "pp",
        ),
    ),
)


def _fp8(short: str, kind: str, help: str, default: Any = None, **more: Any) -> Option:
    # The key of the format carries the prefix in the API's files, the other keys do not.
    key = "fp8_config." + ("fp8_format" if short == "format" else short)
    more.setdefault("variable", f"ACCELERATE_FP8_{short.upper()}")
    return Option(f"fp8_{short}", kind, help, default, key=key, when=("fp8",), **more)


FP8_OPTIONS: tuple[Option, ...] = (
    _fp8(
        "backend",
        "text",
        "Library that computes in 8-bit floats: ao (torchao), te (Transformer Engine) or msamp (MS-AMP).",
        choices=("ao", "te", "msamp"),
    ),
    _fp8("use_autocast_during_eval", "switch", "Also use 8-bit floats in evaluation mode.", False),
    _fp8(
        "margin",
        "int",
        "Transformer Engine: divide scaling factors by 2 to the power of this margin.",
        0,
        least=0,
    ),
    _fp8(
        "interval",
        "int",
        "Transformer Engine: number of steps between updates of the scaling factors.",
        1,
        least=1,
    ),
    _fp8(
        "format",
        "text",
        "Transformer Engine: format of 8-bit floats, E4M3, E5M2 or HYBRID (E4M3 in the forward pass and E5M2 in the "
        "backward pass).",
        "HYBRID",
        choices=("HYBRID", "E4M3", "E5M2"),
    ),
    _fp8(
        "amax_history_len",
        "int",
        "Transformer Engine: number of steps for which the maximum absolute values (amax) are "
        "kept.",
        1024,
        least=1,
    ),
    _fp8(
        "amax_compute_algo",
        "text",
        "Transformer Engine: which of the kept values sets the scaling factor: the largest (max) "
        "or the most recent one.",
        "most_recent",
        choices=("max", "most_recent"),
    ),
    _fp8("opt_level", "text", "MS-AMP: optimization level.", "O2", choices=("O1", "O2")),
    _fp8(
        "enable_fsdp_float8_all_gather",
        "truth",
        "torchao: FSDP2 gathers parameters as 8-bit floats.",
        True,
    ),
    _fp8(
        "pad_inner_dim",
        "truth",
        "torchao: pad inner dimensions of matrix products to multiples of 16.",
        True,
    ),
    # Three truth values in one; a variable each is published.
    _fp8(
        "override_linear_precision",
        "text",
        "Transformer Engine: compute linear layers in higher precision. Three truth values separated by commas: for "
        "the forward pass, the gradient of the input and the gradient of the weight.",
        "false,false,false",
        variable="",
    ),
)
