# SPDX-License-Identifier: Apache-2.0
"""Options in Megatron-LM's words: the layout among them maps to this library's own parallelism.

No code of Megatron-LM runs. What replaces its other options:

- precision: `mixed_precision` of the Accelerator; recomputation: `activation_checkpointing`.
- learning rates and weight decay: the optimizer and the scheduler that `prepare` is given.
- batch sizes, sequence lengths and samples: the loader that `prepare` is given.
- gradient clipping: `accelerator.clip_grad_norm_`; the loss and its mean: the training loop.
- dropout, positions and attention: the model's own configuration.
- logging: `log_with` of the Accelerator; checkpoints: `save_state` and `load_state`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn

from ..core.errors import ConfigurationError
from . import checks

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


def _from_variable(default: Any) -> Any:
    """A field that is read from MEGATRON_LM_<NAME> where it is not given."""
    return field(default=None, metadata={"default": default})


@dataclass
class MegatronLMPlugin:
    """A run described in Megatron-LM's terms. A field that is None takes MEGATRON_LM_<FIELD>, else the default.

    `parallelism()` gives the layout in this library's words, which is what runs: tensor, pipeline and context
    parallelism of PyTorch's own pieces. A run names the other fields that differ from their defaults.
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
        for name, default in self._defaults().items():
            variable = f"MEGATRON_LM_{name.upper()}"
            setattr(self, name, checks.value_or(getattr(self, name), variable, default))

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        """The defaults of the fields with a variable."""
        return {
            row.name: row.metadata["default"] for row in fields(cls) if "default" in row.metadata
        }

    def parallelism(self, world_size: int) -> dict[str, int]:
        """The layout as `ParallelismConfig` sizes for `world_size` processes; the ranks left over are data parallel.

        `use_custom_fsdp` and `use_distributed_optimizer` shard over the data-parallel ranks. Raises
        ConfigurationError for expert parallelism, which has no counterpart, and for a layout that does not divide
        the processes.
        """
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if getattr(self, name) > 1:
                raise ConfigurationError(
                    f"MegatronLMPlugin.{name}={getattr(self, name)}: experts are not split; use 1"
                )
        sizes: dict[str, int] = {
            "tp_size": self.tp_degree,  # type: ignore[dict-item]
            "pp_size": self.pp_degree,  # type: ignore[dict-item]
            "cp_size": self.context_parallel_size,  # type: ignore[dict-item]
        }
        inner = math.prod(sizes.values())
        if inner < 1 or world_size % inner:
            raise ConfigurationError(
                f"MegatronLMPlugin: tp_degree={self.tp_degree} x pp_degree={self.pp_degree} x context_parallel_size="
                f"{self.context_parallel_size} = {inner} does not divide the {world_size} processes"
            )
        data = "dp_replicate_size"
        if self.use_custom_fsdp or self.use_distributed_optimizer:
            data = "dp_shard_size"
        return {**sizes, data: world_size // inner}

    def without_counterpart(self) -> list[str]:
        """The fields that differ from their default, and that the native layout does not have."""
        defaults = {row.name: row.default for row in fields(self)} | self._defaults()
        return [
            name
            for name, default in defaults.items()
            if name not in _NATIVE and getattr(self, name) != default
        ]

    # -- Megatron-LM's own arguments, which nothing here takes

    def set_mixed_precision(self, mixed_precision: str) -> NoReturn:
        """Refused: give `mixed_precision` to the Accelerator."""
        raise _no_arguments("mixed_precision of Accelerator")

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> NoReturn:
        """Refused: the loader has the batch size."""
        raise _no_arguments("the batch size of the loader that you pass to prepare")

    def set_optimizer_type(self, optimizer: Any) -> NoReturn:
        """Refused: the optimizer that is prepared has its settings."""
        raise _no_arguments("the optimizer that you pass to prepare")

    def set_scheduler_args(self, scheduler: Any) -> NoReturn:
        """Refused: the scheduler that is prepared has its settings."""
        raise _no_arguments("the scheduler that you pass to prepare")

    def set_network_size_args(
        self, model: Any, batch_data: dict[str, Any] | None = None
    ) -> NoReturn:
        """Refused: models keep their classes and sizes."""
        raise _no_arguments("the model that you pass to prepare")

    def set_tensorboard_logging_options(self) -> NoReturn:
        """Refused: trackers log what the loop gives them."""
        raise _no_arguments("log_with of Accelerator, and accelerator.log")


def _no_arguments(replacement: str) -> ConfigurationError:
    return ConfigurationError(
        f"Megatron-LM does not run here, and its arguments are not read: use {replacement}"
    )
