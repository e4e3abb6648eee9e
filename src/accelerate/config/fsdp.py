# SPDX-License-Identifier: Apache-2.0
"""Options of fully sharded data parallelism: FSDP2 (`fully_shard`) and torch's older FSDP1."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import env
from ..core.constants import FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY, FSDP_STATE_DICT_TYPE
from ..core.errors import ConfigurationError, suggestion
from ..core.messages import warn
from ..core.objects import flat_list
from . import checks

if TYPE_CHECKING:
    import torch
    from torch.distributed.fsdp import (
        BackwardPrefetch,
        CPUOffload,
        MixedPrecision,
        MixedPrecisionPolicy,
        OffloadPolicy,
        ShardingStrategy,
        StateDictType,
    )

EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@dataclass
class FullyShardedDataParallelPlugin:
    """How parameters, gradients and optimizer state are sharded over the data-parallel ranks.

    A field that is None takes its FSDP_* variable or the default. Version 2 is torch's `fully_shard`, version 1 its
    `FullyShardedDataParallel`. Raises ConfigurationError (a ValueError) for a value that the version cannot use.

    Fields:
        reshard_after_forward: version 2: True frees the gathered parameters after the forward, False keeps them until
            the backward (faster, more memory), a number reshards to groups of that size.
        auto_wrap_policy: TRANSFORMER_BASED_WRAP (the classes in `transformer_cls_names_to_wrap`, or the
            model's `_no_split_modules`), SIZE_BASED_WRAP (`min_num_params`), NO_WRAP, or a function like torch's
            policies.
        cpu_offload: keep shards in host memory between uses. mixed_precision_policy: torch's object, a dict of dtypes
            or one of fp16, bf16, fp32. In version 2 its `output_dtype` is what the model returns; by default outputs
            stay in the dtype of the computation.
        ignored_modules: modules (or a regular expression over their names) that stay unsharded.
        cpu_ram_efficient_loading: only rank 0 holds the full weights while they are sharded.

    Example:
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
        accelerator = Accelerator(fsdp_plugin=plugin)
    """

    fsdp_version: int | None = None
    sharding_strategy: str | ShardingStrategy | None = None
    reshard_after_forward: str | ShardingStrategy | bool | int | None = None
    backward_prefetch: str | BackwardPrefetch | None = None
    mixed_precision_policy: dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None = (
        None
    )
    auto_wrap_policy: Callable[..., Any] | str | None = None
    cpu_offload: bool | CPUOffload | OffloadPolicy | None = None
    ignored_modules: Iterable[torch.nn.Module] | str | None = None
    state_dict_type: str | StateDictType | None = None
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = None
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    sync_module_states: bool | None = None
    forward_prefetch: bool | None = None
    activation_checkpointing: bool | None = None
    activation_checkpointing_offload: bool | None = None
    cpu_ram_efficient_loading: bool | None = None
    transformer_cls_names_to_wrap: list[str] | None = None
    min_num_params: int | None = None

    def __post_init__(self) -> None:
        # Whether the policy of precision is the run's, not the user's.
        self.policy_is_filled = False
        # Whether the user has chosen what happens after the forward; else it is the default.
        self.reshard_is_given: bool = (
            self.reshard_after_forward is not None or self.sharding_strategy is not None
        )
        version = checks.value_or(self.fsdp_version, "FSDP_VERSION", 1)
        self.fsdp_version = int(checks.word("fsdp_version", str(version), ("1", "2")))
        self._resolve_sharding()
        self._resolve_prefetch()
        self.set_state_dict_type()
        self._resolve_wrapping()
        self._resolve_flags()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        if isinstance(self.mixed_precision_policy, dict):
            policy = self.mixed_precision_policy.items()
            dtypes = {
                key: checks.dtype(f"mixed_precision_policy[{key!r}]", value)
                for key, value in policy
            }
            self.mixed_precision_policy = self._policy_class()(**dtypes)
        elif isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()

    def _resolve_sharding(self) -> None:
        if self.fsdp_version == 2:
            self._resolve_sharding_2()
            return
        from torch.distributed.fsdp import ShardingStrategy

        if self.sharding_strategy is None and self.reshard_after_forward is None:
            self.sharding_strategy = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
        requested = self.reshard_after_forward
        if isinstance(requested, (str, int)) and not isinstance(requested, bool):
            self.reshard_after_forward = _member(
                ShardingStrategy, requested, "reshard_after_forward"
            )
        if self.reshard_after_forward is not None and not isinstance(
            self.reshard_after_forward, ShardingStrategy
        ):
            raise ConfigurationError(
                f"reshard_after_forward={self.reshard_after_forward!r} is a value for FSDP2; "
                f"FSDP1 takes one of {list(ShardingStrategy.__members__)}. Set fsdp_version=2, or "
                "use a strategy."
            )
        if self.sharding_strategy is None:
            self.sharding_strategy = self.reshard_after_forward
            return
        self.sharding_strategy = _member(
            ShardingStrategy, self.sharding_strategy, "sharding_strategy"
        )

    def _resolve_sharding_2(self) -> None:
        names = [
            name
            for name in ("reshard_after_forward", "sharding_strategy")
            if getattr(self, name) is not None
        ]
        meant = [_reshards(getattr(self, name), name) for name in names]
        if len(names) == 2 and meant[0] != meant[1]:
            strategy = getattr(self.sharding_strategy, "name", self.sharding_strategy)
            raise ConfigurationError(
                f"reshard_after_forward={self.reshard_after_forward!r} and "
                f"sharding_strategy={strategy} contradict each other: set only the first"
            )
        if not names:
            origin = "FSDP_RESHARD_AFTER_FORWARD"
            meant = [_reshards(env.get(origin, "true"), origin)]
        self.reshard_after_forward = meant[0]
        self.sharding_strategy = None

    def _resolve_prefetch(self) -> None:
        requested = checks.value_or(self.backward_prefetch, "FSDP_BACKWARD_PREFETCH")
        if isinstance(requested, str) and requested.upper() == "NO_PREFETCH":
            requested = None
        self.backward_prefetch = requested
        if requested is None:
            return
        from torch.distributed.fsdp import BackwardPrefetch

        self.backward_prefetch = _member(BackwardPrefetch, requested, "backward_prefetch")
        if self.fsdp_version == 2:
            warn(
                "backward_prefetch is an option of FSDP1; FSDP2 always prefetches in the backward. It is ignored."
            )
            self.backward_prefetch = None

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Choose FULL_STATE_DICT, SHARDED_STATE_DICT or (version 1) LOCAL_STATE_DICT, and fitting configs."""
        from torch.distributed.fsdp import StateDictType

        if state_dict_type is not None:
            # A change of mind takes the configs of the new kind along.
            self.state_dict_type = state_dict_type
            self.state_dict_config = None
            self.optim_state_dict_config = None
        default = "FULL_STATE_DICT"
        if self.fsdp_version == 2:
            default = "SHARDED_STATE_DICT"
        requested = checks.value_or(self.state_dict_type, "FSDP_STATE_DICT_TYPE", default)
        kind = self.state_dict_type = _member(StateDictType, requested, "state_dict_type")
        if self.fsdp_version == 2 and kind.name not in FSDP2_STATE_DICT_TYPE:
            raise ConfigurationError(
                f"state_dict_type={kind.name}: of {FSDP_STATE_DICT_TYPE}, FSDP2 supports "
                f"{' and '.join(FSDP2_STATE_DICT_TYPE)}: use one of these, or fsdp_version=1"
            )
        names = ("state_dict_config", "optim_state_dict_config")
        for name, fitting in zip(names, _state_dict_configs(kind.name), strict=True):
            if getattr(self, name) is None:
                setattr(self, name, fitting)

    def _resolve_wrapping(self) -> None:
        from torch.distributed.fsdp.wrap import (
            size_based_auto_wrap_policy,
            transformer_auto_wrap_policy,
        )

        policy = checks.value_or(self.auto_wrap_policy, "FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
        if isinstance(policy, str):
            word = checks.word("auto_wrap_policy", policy, FSDP_AUTO_WRAP_POLICY)
            policy = None
            if word == "TRANSFORMER_BASED_WRAP":
                policy = transformer_auto_wrap_policy
                if self.transformer_cls_names_to_wrap is None:
                    self.transformer_cls_names_to_wrap = _names(
                        env.get("FSDP_TRANSFORMER_CLS_TO_WRAP")
                    )
            elif word == "SIZE_BASED_WRAP":
                policy = size_based_auto_wrap_policy
                if self.min_num_params is None:
                    self.min_num_params = env.get_int("FSDP_MIN_NUM_PARAMS") or 0
        self.auto_wrap_policy = policy
        if self.transformer_cls_names_to_wrap is not None:
            names = flat_list(self.transformer_cls_names_to_wrap)
            self.transformer_cls_names_to_wrap = flat_list([_names(name) for name in names])

    def _resolve_flags(self) -> None:
        self._take_flag("activation_checkpointing")
        self._take_flag("activation_checkpointing_offload")
        self.limit_all_gathers = checks.truth("limit_all_gathers", self.limit_all_gathers)
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigurationError(
                "`activation_checkpointing_offload=True` requires `activation_checkpointing=True`."
            )
        if self.activation_checkpointing_offload and self.fsdp_version != 2:
            raise ConfigurationError(
                "`activation_checkpointing_offload=True` requires `fsdp_version=2`."
            )
        self.ignored_modules = checks.value_or(self.ignored_modules, "FSDP_IGNORED_MODULES")
        if self.ignored_modules is not None and not isinstance(self.ignored_modules, str):
            # An iterator can be read once, and each model reads it.
            self.ignored_modules = flat_list(self.ignored_modules)
        is_given = self.cpu_ram_efficient_loading is not None
        self._take_flag("cpu_ram_efficient_loading")
        if is_given:
            # Libraries that build the model before `prepare` read this to load weights on rank 0 only.
            env.publish({EFFICIENT_LOADING: self.cpu_ram_efficient_loading})
        if self.fsdp_version == 2:
            self._refuse_flags_of_version_1()
            return
        for name in ("use_orig_params", "sync_module_states", "forward_prefetch"):
            self._take_flag(name)
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            warn(
                "cpu_ram_efficient_loading leaves the weights on rank 0, which needs sync_module_states: it is set to "
                "True."
            )
            self.sync_module_states = True
        if self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = give_storage

    def _take_flag(self, name: str) -> None:
        """A truth value as it is given, else its variable's."""
        setattr(self, name, checks.truth_or(name, getattr(self, name), f"FSDP_{name.upper()}"))

    def _refuse_flags_of_version_1(self) -> None:
        if self.forward_prefetch:
            raise ConfigurationError(
                "forward_prefetch is an option of FSDP1: leave it None, or set fsdp_version=1"
            )
        ignored = [
            name
            for name in ("use_orig_params", "sync_module_states")
            if getattr(self, name) is not None
        ]
        if not self.limit_all_gathers:
            ignored.append("limit_all_gathers")
        if ignored:
            warn(
                f"{', '.join(ignored)}: only for FSDP1, and ignored. FSDP2 always keeps the "
                "original parameters, synchronizes the ranks' weights and limits its all-gathers."
            )
        self.use_orig_params = self.sync_module_states = self.forward_prefetch = None
        self.limit_all_gathers = True

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Turn a policy that was named into a function for this model. Raises ValueError for a class it has not."""
        from torch.distributed.fsdp.wrap import (
            size_based_auto_wrap_policy,
            transformer_auto_wrap_policy,
        )

        from ..core.modules import get_module_class_from_name

        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            names = self.transformer_cls_names_to_wrap
            if names is None:
                names = flat_list(getattr(model, "_no_split_modules", None))
            classes = set()
            for name in names:
                module_class = get_module_class_from_name(model, name)
                if module_class is None:
                    raise ConfigurationError(
                        f"Could not find the transformer layer class {name} in the model."
                    )
                classes.add(module_class)
            if not classes:
                warn(
                    f"transformer_cls_names_to_wrap is empty, and {type(model).__name__} does not "
                    "name its blocks (_no_split_modules): the model is one unit, gathered at "
                    "once. Set transformer_cls_names_to_wrap to the class of its blocks."
                )
            self.auto_wrap_policy = functools.partial(
                self.auto_wrap_policy, transformer_layer_cls=classes
            )
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            if self.min_num_params:
                self.auto_wrap_policy = functools.partial(
                    self.auto_wrap_policy, min_num_params=self.min_num_params
                )
            else:
                self.auto_wrap_policy = None

    def set_mixed_precision(
        self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Compute and reduce in fp16, bf16 or fp32 (fp8 keeps bf16 around its own layers), unless a policy is set.

        `buffer_autocast` (version 1) leaves buffers in fp32 for autocast to cast. `override` replaces a policy.
        """
        import torch

        word = "bf16" if mixed_precision == "fp8" else mixed_precision
        dtype = checks.dtype("mixed_precision", word)
        if self.mixed_precision_policy is not None and not override:
            return
        if self.fsdp_version == 1:
            last = {"buffer_dtype": torch.float32 if buffer_autocast else dtype}
        else:
            last = {"output_dtype": dtype}
        self.mixed_precision_policy = self._policy_class()(
            param_dtype=dtype, reduce_dtype=dtype, **last
        )

    def _policy_class(self) -> Any:
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        if self.fsdp_version == 1:
            return MixedPrecision
        return MixedPrecisionPolicy

    def validate_mixed_precision_policy(self) -> None:
        """Raises ValueError where the policy is not of this version's class."""
        kind = self._policy_class()
        if not isinstance(self.mixed_precision_policy, kind):
            raise ConfigurationError(
                f"mixed_precision_policy must be an instance of `torch.distributed.fsdp.{kind.__name__}` with "
                f"fsdp_version={self.fsdp_version}; got {type(self.mixed_precision_policy).__name__}"
            )

    def set_cpu_offload(self) -> None:
        """Turn a truth value (or FSDP_OFFLOAD_PARAMS) into this version's offload object."""
        if self.cpu_offload is None:
            self.cpu_offload = env.get_flag("FSDP_OFFLOAD_PARAMS")
        if not isinstance(self.cpu_offload, bool):
            return
        from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, OffloadPolicy

        if self.fsdp_version == 1:
            self.cpu_offload = CPUOffload(offload_params=self.cpu_offload)
        elif self.cpu_offload:
            from ..core.devices import accelerator_type

            # Without an accelerator there is nothing to pin memory for, and torch refuses to.
            self.cpu_offload = CPUOffloadPolicy(pin_memory=accelerator_type() is not None)
        else:
            self.cpu_offload = OffloadPolicy()

    @property
    def offloads_shards(self) -> bool:
        """Whether shards, their gradients and the optimizer's state are in host memory."""
        policy = self.cpu_offload
        return (
            bool(getattr(policy, "offload_params", False))
            or type(policy).__name__ == "CPUOffloadPolicy"
        )

    def validate_cpu_offload(self) -> None:
        """Raises ValueError where the offload object is not of this version's class."""
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        kind = CPUOffload if self.fsdp_version == 1 else OffloadPolicy
        if not isinstance(self.cpu_offload, kind):
            raise ConfigurationError(
                f"`cpu_offload` must be True, False or an instance of `torch.distributed.fsdp.{kind.__name__}` in "
                f"FSDP{self.fsdp_version}, got {self.cpu_offload}"
            )


def give_storage(module: torch.nn.Module) -> None:
    """Give a meta module empty storage on this rank's device; its values then come from rank 0."""
    import torch

    from ..core.devices import accelerator_type

    kind = accelerator_type()
    if kind is None:
        device = torch.device("cpu")
    else:
        device = torch.device(kind, torch.accelerator.current_device_index())
    module.to_empty(device=device, recurse=False)


# -- what words, numbers and objects mean to torch

# What the words of FSDP1's sharding strategies mean to FSDP2, which knows one switch: reshard after the forward.
_RESHARD_WORDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


def _member(kind: Any, value: Any, field: str) -> Any:
    """A member of a torch enum from itself, its name in any case, or its number (as text or not)."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value in [choice.value for choice in kind]:
            return kind(value)
    elif isinstance(value, str):
        # torch's enum has _HYBRID_SHARD_ZERO2 for the API's HYBRID_SHARD_ZERO2.
        for name in (value.upper(), f"_{value.upper()}"):
            if name in kind.__members__:
                return kind[name]
    choices = [name.lstrip("_") for name in kind.__members__]
    raise ConfigurationError(
        f"{field}={value!r} is not one of {choices}{suggestion(str(value).upper(), choices)}"
    )


def _reshards(requested: Any, origin: str) -> bool | int:
    """What a value means to FSDP2: True, False, or the size of the groups to reshard to."""
    if origin == "sharding_strategy":
        from torch.distributed.fsdp import ShardingStrategy

        # Its numbers are FSDP1's, no sizes.
        requested = _member(ShardingStrategy, requested, origin)
    word = getattr(requested, "name", requested)
    if isinstance(word, str) and word.isdigit() and int(word) > 1:
        return int(word)
    if isinstance(word, str):
        if word.upper() == "NO_SHARD":
            raise ConfigurationError(
                f"{origin}={word}: FSDP2 always shards. For unsharded parameters on each rank "
                "(DDP), do not use FSDP."
            )
        if word.upper().startswith("HYBRID_SHARD"):
            raise ConfigurationError(
                f"{origin}={word}: for hybrid sharding with FSDP2, pass "
                "parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...) "
                "to Accelerator."
            )
        meaning = _RESHARD_WORDS.get(word.upper())
        if meaning is None:
            requested = env.parse_bool(word, where=origin)
        else:
            requested = meaning
    if not isinstance(requested, bool) and not (isinstance(requested, int) and requested > 1):
        raise ConfigurationError(
            f"{origin}={requested!r}: FSDP2 takes True, False or the size of the groups to reshard to (2 or more)"
        )
    return requested


def _names(text: str | None) -> list[str] | None:
    """Split a comma-separated list of names; None stays None."""
    if text is None:
        return None
    return [name.strip() for name in text.split(",") if name.strip()]


def _state_dict_configs(kind: str) -> tuple[Any, Any]:
    """Return torch's configurations of model and optimizer state for a kind of state dict; None for others."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
    )

    if kind == "FULL_STATE_DICT":
        return (
            FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
            FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        )
    if kind == "SHARDED_STATE_DICT":
        return ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(
            offload_to_cpu=True
        )
    return None, None
