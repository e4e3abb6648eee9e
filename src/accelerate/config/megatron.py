# SPDX-License-Identifier: Apache-2.0
"""Options in Megatron-LM's words: the layout among them maps to this library's own parallelism."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from ..core import env
from ..core.errors import ConfigurationError
from ..core.messages import warn

# Fields that Megatron-LM knows under another name.
_ARGUMENTS = {
    "tp_degree": "tensor_model_parallel_size",
    "pp_degree": "pipeline_model_parallel_size",
    "sequence_parallelism": "sequence_parallel",
    "gradient_clipping": "clip_grad",
}
# Fields that the native layout takes over.
_NATIVE = {
    "tp_degree",
    "pp_degree",
    "context_parallel_size",
    "num_micro_batches",
    "sequence_parallelism",
    "use_custom_fsdp",
    "use_distributed_optimizer",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
}
_SCHEDULE = (
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_fraction",
    "weight_decay_incr_style",
    "start_weight_decay",
    "end_weight_decay",
    "min_lr",
    "train_samples",
)
# Fields that are passed on, besides those with a variable.
_PASSED_ON = (
    "pipeline_model_parallel_split_rank",
    "num_layers_per_virtual_pipeline_stage",
    "consumed_samples",
    "no_wd_decay_cond",
    "scale_lr_cond",
    "lr_mult",
    "megatron_dataset_flag",
    "eval_iters",
    "eval_interval",
)
# The sizes of a model in the words of its configuration: type -> Megatron-LM's name of the type.
_MODEL_TYPES = {"megatron-bert": "bert", "gpt2": "gpt", "llama": "gpt", "t5": "t5"}
_TOKENIZERS = {"gpt2": "GPT2BPETokenizer", "llama": "Llama2Tokenizer"}
_SIZES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "orig_vocab_size": ("vocab_size",),
}


def _from_variable(default: Any) -> Any:
    """A field that is read from MEGATRON_LM_<NAME> where it is not given."""
    return field(default=None, metadata={"default": default})


@dataclass
class MegatronLMPlugin:
    """A run described in Megatron-LM's words. A field that is None takes MEGATRON_LM_<FIELD>, else the default.

    `megatron_lm_default_args` holds the same as Megatron-LM's arguments. `parallelism()` gives the layout in this
    library's words, which is what runs: tensor, pipeline and context parallelism of PyTorch's own pieces.
    """

    tp_degree: int | None = _from_variable(1)
    pp_degree: int | None = _from_variable(1)
    use_custom_fsdp: bool | None = _from_variable(False)
    overlap_cpu_optimizer_d2h_h2d: bool | None = _from_variable(False)
    no_load_optim: bool | None = _from_variable(False)
    eod_mask_loss: bool | None = _from_variable(False)
    no_save_optim: bool | None = _from_variable(False)
    optimizer_cpu_offload: bool | None = _from_variable(False)
    use_precision_aware_optimizer: bool | None = _from_variable(False)
    decoder_last_pipeline_num_layers: int | None = _from_variable(None)
    recompute_granularity: str | None = _from_variable("full")
    recompute_method: str | None = _from_variable("uniform")
    recompute_num_layers: int | None = _from_variable(1)
    attention_backend: bool | None = _from_variable(True)
    expert_model_parallel_size: int | None = _from_variable(1)
    context_parallel_size: int | None = _from_variable(1)
    attention_dropout: float | None = _from_variable(0.0)
    hidden_dropout: float | None = _from_variable(0.0)
    attention_softmax_in_fp32: bool | None = _from_variable(True)
    expert_tensor_parallel_size: int | None = _from_variable(1)
    calculate_per_token_loss: bool | None = _from_variable(True)
    use_rotary_position_embeddings: bool | None = _from_variable(True)
    num_micro_batches: int | None = _from_variable(1)
    gradient_clipping: float | None = _from_variable(1.0)
    sequence_parallelism: bool | None = _from_variable(False)
    recompute_activations: bool | None = _from_variable(False)
    use_distributed_optimizer: bool | None = _from_variable(False)
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: bool = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        defaults = self._defaults()
        for name, default in defaults.items():
            if getattr(self, name) is None:
                found = env.value(f"MEGATRON_LM_{name.upper()}")
                setattr(self, name, default if found is None else found)
        for name in ("tp_degree", "pp_degree", "num_micro_batches", "context_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigurationError(
                    f"MegatronLMPlugin.{name}={getattr(self, name)} must be at least 1"
                )
        if self.consumed_samples is not None:  # training, validation, test
            self.consumed_samples = [*self.consumed_samples, 0, 0, 0][
                : max(3, len(self.consumed_samples))
            ]
        self.DDP_impl: str = "torch"
        self.megatron_lm_default_args: dict[str, Any] = {
            _ARGUMENTS.get(name, name): getattr(self, name) for name in (*defaults, *_PASSED_ON)
        } | {"DDP_impl": self.DDP_impl}
        if self.tensorboard_dir is not None:
            self.megatron_lm_default_args["tensorboard_dir"] = self.tensorboard_dir
            if self.set_all_logging_options:
                self.set_tensorboard_logging_options()
        self.megatron_lm_default_args.update(self.other_megatron_args or {})

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """The defaults of the fields with a variable."""
        return {
            row.name: row.metadata["default"] for row in fields(cls) if "default" in row.metadata
        }

    def parallelism(self, world_size: int) -> dict[str, int]:
        """The layout as `ParallelismConfig` sizes for `world_size` processes; the ranks left over are data parallel.

        Expert parallelism has no counterpart. Raises ConfigurationError for it, and for a layout that does not
        divide the processes. `use_custom_fsdp` and `use_distributed_optimizer` shard over the data-parallel ranks.
        """
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(self, name) > 1:
                raise ConfigurationError(
                    f"MegatronLMPlugin.{name}={getattr(self, name)}: experts are not split here; use 1"
                )
        sizes = {
            "tp_size": self.tp_degree,
            "pp_size": self.pp_degree,
            "cp_size": self.context_parallel_size,
        }
        inner = self.tp_degree * self.pp_degree * self.context_parallel_size  # type: ignore[operator]
        if world_size % inner:
            raise ConfigurationError(
                f"MegatronLMPlugin: tp_degree={self.tp_degree} x pp_degree={self.pp_degree} x context_parallel_size="
                f"{self.context_parallel_size} = {inner} does not divide the {world_size} processes"
            )
        if self.use_custom_fsdp or self.use_distributed_optimizer:
            data = "dp_shard_size"
        else:
            data = "dp_replicate_size"
        return sizes | {data: world_size // inner}  # type: ignore[return-value]

    def without_counterpart(self) -> list[str]:
        """The fields that differ from their default, and that the native layout does not have."""
        defaults = {row.name: row.default for row in fields(self)} | self._defaults()
        return [
            name
            for name, default in defaults.items()
            if name not in _NATIVE and getattr(self, name) != default
        ]

    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Write the run's precision into Megatron-LM's arguments."""
        if mixed_precision in ("fp16", "bf16"):
            self.megatron_lm_default_args[mixed_precision] = True
        if mixed_precision == "bf16":
            self.DDP_impl = self.megatron_lm_default_args["DDP_impl"] = "local"

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Write the batch sizes: samples of a micro-batch, and of all micro-batches of all data-parallel ranks."""
        self.data_parallel_size = dp_degree
        self.micro_batch_size = micro_batch_size
        self.global_batch_size: int = dp_degree * micro_batch_size * self.num_micro_batches  # type: ignore[operator]
        self.megatron_lm_default_args.update(
            data_parallel_size=self.data_parallel_size,
            micro_batch_size=self.micro_batch_size,
            global_batch_size=self.global_batch_size,
        )

    def set_optimizer_type(self, optimizer: Any) -> None:
        """Write an optimizer's settings. Raises ValueError for one that is neither of the Adam kind nor SGD."""
        name = type(optimizer).__name__.lower()
        settings: dict[str, Any]
        if "adam" in name:
            beta1, beta2 = optimizer.defaults["betas"]
            settings = {"optimizer": "adam", "adam_beta1": beta1, "adam_beta2": beta2}
            settings["adam_eps"] = optimizer.defaults["eps"]
        elif "sgd" in name:
            settings = {"optimizer": "sgd", "sgd_momentum": optimizer.defaults["momentum"]}
        else:
            raise ConfigurationError(
                f"Optimizer {name} is not supported by Megatron-LM: use Adam, AdamW or SGD"
            )
        settings |= {
            "lr": optimizer.defaults["lr"],
            "weight_decay": optimizer.defaults["weight_decay"],
        }
        self.megatron_lm_default_args.update(settings)

    def set_scheduler_args(self, scheduler: Any) -> None:
        """Write a DummyScheduler's steps (of one process and micro-batch) as Megatron-LM's iterations."""
        per_iteration = self.num_micro_batches * self.megatron_lm_default_args["data_parallel_size"]
        args = self.megatron_lm_default_args
        if self.train_iters is None:
            self.train_iters = scheduler.total_num_steps // per_iteration
            if self.train_samples is not None:
                self.train_samples = None
                warn(
                    "`train_samples` gives way to `train_iters`, which the scheduler's steps decide."
                )
        if self.lr_warmup_iters is None:
            self.lr_warmup_iters = scheduler.warmup_num_steps // per_iteration
            self.lr_warmup_samples = 0
        args.update({name: getattr(self, name) for name in _SCHEDULE})
        args.update(
            train_iters=self.train_iters,
            lr_warmup_iters=self.lr_warmup_iters,
            lr_warmup_samples=self.lr_warmup_samples,
        )

    def set_network_size_args(self, model: Any, batch_data: dict[str, Any] | None = None) -> None:
        """Write a model's sizes, read from its configuration. Raises ValueError for a type that is not known."""
        kind = getattr(model.config, "model_type", None)
        if kind not in _MODEL_TYPES:
            raise ConfigurationError(
                f"MegatronLMPlugin knows the sizes of {list(_MODEL_TYPES)} models, not of {kind!r}"
            )
        sizes = {"model_type_name": _MODEL_TYPES[kind], "pretraining_flag": kind != "megatron-bert"}
        for name, words in _SIZES.items():
            sizes[name] = next(
                (getattr(model.config, word) for word in words if hasattr(model.config, word)), None
            )
        if kind in _TOKENIZERS:
            sizes |= {"tokenizer_type": _TOKENIZERS[kind], "return_logits": self.return_logits}
        longest = sizes["max_position_embeddings"]
        if kind == "t5":
            source, target = self.encoder_seq_length, self.decoder_seq_length
            if batch_data is not None:
                source = source or batch_data["input_ids"].shape[1]
                target = target or batch_data["labels"].shape[1]
            sizes |= {
                "encoder_seq_length": source or longest,
                "decoder_seq_length": target or longest,
            }
        else:
            if batch_data is not None:
                given = batch_data["input_ids"].shape[1]
            else:
                given = None
            sizes["seq_length"] = self.seq_length or given or longest
        self.megatron_lm_default_args.update(sizes)

    def set_tensorboard_logging_options(self) -> None:
        """Turn on all that Megatron-LM can log. Raises ImportError where Megatron-LM is not installed."""
        from argparse import ArgumentParser

        from megatron.training.arguments import add_megatron_arguments

        for name, value in vars(add_megatron_arguments(ArgumentParser()).parse_args([])).items():
            if name.startswith("log_"):
                self.megatron_lm_default_args[name] = True
            elif name.startswith(("tensorboard_", "timing_", "wandb_")):
                self.megatron_lm_default_args.setdefault(name, value)
