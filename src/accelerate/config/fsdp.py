# SPDX-License-Identifier: Apache-2.0
"""Options of fully sharded data parallelism: FSDP2 (`fully_shard`) and torch's older FSDP1."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core import env
from ..core.constants import FSDP2_STATE_DICT_TYPE, FSDP_AUTO_WRAP_POLICY, FSDP_STATE_DICT_TYPE
from ..core.errors import ConfigurationError, nearest

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

# What the words of FSDP1's sharding strategies mean to FSDP2, which knows one switch: reshard after the forward.
_RESHARD_WORDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}
EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"


@dataclass
class FullyShardedDataParallelPlugin:
    """How parameters, gradients and optimizer state are sharded over the data-parallel ranks.

    A field that is None takes its FSDP_* variable, else the default. Version 2 is torch's `fully_shard`, version 1 its
    `FullyShardedDataParallel`. Raises ConfigurationError (a ValueError) for a value that the version cannot use.

    Fields:
        reshard_after_forward: version 2: True frees the gathered parameters after the forward, False keeps them until
            the backward (faster, more memory), a number reshards to groups of that size.
        auto_wrap_policy: TRANSFORMER_BASED_WRAP (classes of `transformer_cls_names_to_wrap`, else the model's
            `_no_split_modules`), SIZE_BASED_WRAP (`min_num_params`), NO_WRAP, or a function like torch's policies.
        cpu_offload: keep shards in host memory between uses. mixed_precision_policy: torch's object, a dict of dtypes
            or one of fp16, bf16, fp32.
        ignored_modules: modules (or a regular expression over their names) that stay whole.
        cpu_ram_efficient_loading: only rank 0 holds the full weights on the way to the shards.
    """

    fsdp_version: int | None = None
    sharding_strategy: str | ShardingStrategy | None = None
    reshard_after_forward: str | ShardingStrategy | bool | int | None = None
    backward_prefetch: str | BackwardPrefetch | None = None
    mixed_precision_policy: dict[str, Any] | str | MixedPrecision | MixedPrecisionPolicy | None = None
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
        self._resolve_version()
        self._resolve_sharding()
        self._resolve_prefetch()
        self.set_state_dict_type()
        self._resolve_wrapping()
        self._resolve_flags()
        self.set_cpu_offload()
        self.validate_cpu_offload()
        if isinstance(self.mixed_precision_policy, dict):
            self._mixed_precision_from_dict(self.mixed_precision_policy)
        elif isinstance(self.mixed_precision_policy, str):
            self.set_mixed_precision(self.mixed_precision_policy, override=True)
        if self.mixed_precision_policy is not None:
            self.validate_mixed_precision_policy()

    def _resolve_version(self) -> None:
        found = self.fsdp_version if self.fsdp_version is not None else (env.get_int("FSDP_VERSION") or 1)
        try:
            self.fsdp_version = int(found)
        except (TypeError, ValueError):
            self.fsdp_version = 0
        if self.fsdp_version not in (1, 2):
            raise ConfigurationError(f"fsdp_version={found!r}: FSDP has the versions 1 and 2")

    def _resolve_sharding(self) -> None:
        if self.fsdp_version == 2:
            self._resolve_sharding_2()
            return
        from torch.distributed.fsdp import ShardingStrategy

        if self.sharding_strategy is None and self.reshard_after_forward is None:
            self.sharding_strategy = env.get("FSDP_SHARDING_STRATEGY", "FULL_SHARD")
        if isinstance(self.reshard_after_forward, (str, int)) and not isinstance(self.reshard_after_forward, bool):
            self.reshard_after_forward = _member(ShardingStrategy, self.reshard_after_forward, "reshard_after_forward")
        if self.reshard_after_forward is not None and not isinstance(self.reshard_after_forward, ShardingStrategy):
            raise ConfigurationError(
                f"reshard_after_forward={self.reshard_after_forward!r} is FSDP2's meaning; FSDP1 takes one of "
                f"{list(ShardingStrategy.__members__)} here. Set fsdp_version=2, or give a strategy."
            )
        if self.sharding_strategy is not None:
            self.sharding_strategy = _member(ShardingStrategy, self.sharding_strategy, "sharding_strategy")
        else:
            self.sharding_strategy = self.reshard_after_forward

    def _resolve_sharding_2(self) -> None:
        asked = self.reshard_after_forward
        origin = "reshard_after_forward"
        if asked is None and self.sharding_strategy is not None:
            asked, origin = self.sharding_strategy, "sharding_strategy"
        if asked is None:
            asked, origin = env.get("FSDP_RESHARD_AFTER_FORWARD", "true"), "FSDP_RESHARD_AFTER_FORWARD"
        word = getattr(asked, "name", asked)
        if isinstance(word, str):
            if word.upper() == "NO_SHARD":
                raise ConfigurationError(
                    f"{origin}={word}: FSDP2 always shards. For whole parameters on each rank (DDP) leave FSDP out."
                )
            if word.upper().startswith("HYBRID_SHARD"):
                raise ConfigurationError(
                    f"{origin}={word}: FSDP2 takes hybrid sharding from the layout. Give the Accelerator "
                    "parallelism_config=ParallelismConfig(dp_replicate_size=..., dp_shard_size=...)."
                )
            found = _RESHARD_WORDS.get(word.upper())
            asked = env.parse_bool(word, where=origin) if found is None else found
        if not isinstance(asked, bool) and not (isinstance(asked, int) and asked > 1):
            raise ConfigurationError(
                f"{origin}={asked!r}: FSDP2 takes True, False or the size of the groups to reshard to (2 or more)"
            )
        self.reshard_after_forward = asked
        self.sharding_strategy = None

    def _resolve_prefetch(self) -> None:
        asked = self.backward_prefetch if self.backward_prefetch is not None else env.get("FSDP_BACKWARD_PREFETCH")
        if isinstance(asked, str) and asked.upper() == "NO_PREFETCH":
            asked = None
        self.backward_prefetch = asked
        if asked is None:
            return
        from torch.distributed.fsdp import BackwardPrefetch

        self.backward_prefetch = _member(BackwardPrefetch, asked, "backward_prefetch")
        if self.fsdp_version == 2:
            warnings.warn("backward_prefetch is an option of FSDP1; FSDP2 always prefetches in the backward. Unset.")
            self.backward_prefetch = None

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Choose FULL_STATE_DICT, SHARDED_STATE_DICT or (version 1) LOCAL_STATE_DICT, and fitting configs."""
        from torch.distributed.fsdp import StateDictType

        if state_dict_type is not None:
            # A change of mind takes the configs of the new kind along.
            self.state_dict_type, self.state_dict_config, self.optim_state_dict_config = state_dict_type, None, None
        if self.state_dict_type is None:
            default = "FULL_STATE_DICT" if self.fsdp_version == 1 else "SHARDED_STATE_DICT"
            self.state_dict_type = env.get("FSDP_STATE_DICT_TYPE", default)
        kind = self.state_dict_type = _member(StateDictType, self.state_dict_type, "state_dict_type")
        if self.fsdp_version == 2 and kind.name not in FSDP2_STATE_DICT_TYPE:
            raise ConfigurationError(
                f"state_dict_type={kind.name}: FSDP2 has {' and '.join(FSDP2_STATE_DICT_TYPE)} "
                f"(of {FSDP_STATE_DICT_TYPE}); take one of these, or fsdp_version=1"
            )
        model_config, optim_config = _state_dict_configs(kind.name)
        self.state_dict_config = self.state_dict_config or model_config
        self.optim_state_dict_config = self.optim_state_dict_config or optim_config

    def _resolve_wrapping(self) -> None:
        policy = self.auto_wrap_policy
        if policy is None:
            policy = env.get("FSDP_AUTO_WRAP_POLICY", "NO_WRAP")
        if isinstance(policy, str):
            word = policy.upper()
            if word not in FSDP_AUTO_WRAP_POLICY:
                hint = _hint(word, FSDP_AUTO_WRAP_POLICY)
                raise ConfigurationError(f"auto_wrap_policy={policy!r} is not one of {FSDP_AUTO_WRAP_POLICY}{hint}")
            policy = _policy_function(word)
            if word == "TRANSFORMER_BASED_WRAP" and self.transformer_cls_names_to_wrap is None:
                self.transformer_cls_names_to_wrap = _names(env.get("FSDP_TRANSFORMER_CLS_TO_WRAP"))
            if word == "SIZE_BASED_WRAP" and self.min_num_params is None:
                self.min_num_params = env.get_int("FSDP_MIN_NUM_PARAMS") or 0
        self.auto_wrap_policy = policy
        if isinstance(self.transformer_cls_names_to_wrap, str):
            self.transformer_cls_names_to_wrap = _names(self.transformer_cls_names_to_wrap)
        size = self.min_num_params
        if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
            raise ConfigurationError(f"`min_num_params` must be an integer. Got {size} of type {type(size)}")

    def _resolve_flags(self) -> None:
        self.activation_checkpointing = _flag(self.activation_checkpointing, "FSDP_ACTIVATION_CHECKPOINTING")
        self.activation_checkpointing_offload = _flag(
            self.activation_checkpointing_offload, "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"
        )
        if self.activation_checkpointing_offload and not self.activation_checkpointing:
            raise ConfigurationError(
                "`activation_checkpointing_offload=True` requires `activation_checkpointing=True`."
            )
        if self.activation_checkpointing_offload and self.fsdp_version != 2:
            raise ConfigurationError("`activation_checkpointing_offload=True` requires `fsdp_version=2`.")
        if self.ignored_modules is None:
            self.ignored_modules = env.get("FSDP_IGNORED_MODULES")
        if self.cpu_ram_efficient_loading is None:
            self.cpu_ram_efficient_loading = env.get_flag(EFFICIENT_LOADING)
        else:
            # Libraries that build the model before `prepare` read this to load weights on rank 0 only.
            env.publish({EFFICIENT_LOADING: self.cpu_ram_efficient_loading})
        if self.fsdp_version == 2:
            self._refuse_flags_of_version_1()
            return
        self.use_orig_params = _flag(self.use_orig_params, "FSDP_USE_ORIG_PARAMS")
        self.sync_module_states = _flag(self.sync_module_states, "FSDP_SYNC_MODULE_STATES")
        self.forward_prefetch = _flag(self.forward_prefetch, "FSDP_FORWARD_PREFETCH")
        if self.cpu_ram_efficient_loading and not self.sync_module_states:
            warnings.warn(
                "cpu_ram_efficient_loading leaves the weights on rank 0, which needs sync_module_states: set to True."
            )
            self.sync_module_states = True
        if self.sync_module_states and self.param_init_fn is None:
            self.param_init_fn = _materialize

    def _refuse_flags_of_version_1(self) -> None:
        if self.forward_prefetch:
            raise ConfigurationError("forward_prefetch is an option of FSDP1: leave it None, or set fsdp_version=1")
        given = [name for name in ("use_orig_params", "sync_module_states") if getattr(self, name) is not None]
        if not self.limit_all_gathers:
            given.append("limit_all_gathers")
        if given:
            warnings.warn(
                f"{', '.join(given)}: FSDP1's option(s); FSDP2 always keeps the original parameters, makes the ranks' "
                "weights equal and limits its all-gathers. Unset."
            )
        self.use_orig_params = self.sync_module_states = self.forward_prefetch = None
        self.limit_all_gathers = True

    def set_auto_wrap_policy(self, model: torch.nn.Module) -> None:
        """Turn a policy that was named into a function for this model. Raises ValueError for a class it has not."""
        from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

        from ..core.modules import get_module_class_from_name

        if self.auto_wrap_policy is transformer_auto_wrap_policy:
            names = self.transformer_cls_names_to_wrap
            if names is None:
                names = list(getattr(model, "_no_split_modules", None) or [])
            classes = set()
            for name in names:
                found = get_module_class_from_name(model, name)
                if found is None:
                    raise ConfigurationError(f"Could not find the transformer layer class {name} in the model.")
                classes.add(found)
            if not classes:
                warnings.warn(
                    f"transformer_cls_names_to_wrap names no class, and {type(model).__name__} names none itself "
                    "(_no_split_modules): all of it is one unit, gathered whole. Name the class of its blocks."
                )
            self.auto_wrap_policy = functools.partial(self.auto_wrap_policy, transformer_layer_cls=classes)
        elif self.auto_wrap_policy is size_based_auto_wrap_policy:
            self.auto_wrap_policy = (
                functools.partial(self.auto_wrap_policy, min_num_params=self.min_num_params)
                if self.min_num_params
                else None
            )

    def set_mixed_precision(self, mixed_precision: str, buffer_autocast: bool = False, override: bool = False) -> None:
        """Compute and reduce in fp16, bf16 or fp32 (fp8 keeps bf16 around its own layers), unless a policy is set.

        `buffer_autocast` (version 1) leaves buffers in fp32 for autocast to cast. `override` replaces a policy.
        """
        import torch

        dtypes = {"fp8": torch.bfloat16, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        aliases = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
        word = aliases.get(mixed_precision, mixed_precision)
        if word not in dtypes:
            raise ConfigurationError(f"Invalid mixed precision: {mixed_precision}. Must be one of {list(dtypes)}")
        if self.mixed_precision_policy is not None and not override:
            return
        dtype = dtypes[word]
        if self.fsdp_version == 1:
            from torch.distributed.fsdp import MixedPrecision

            buffers = torch.float32 if buffer_autocast else dtype
            self.mixed_precision_policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=buffers)
        else:
            from torch.distributed.fsdp import MixedPrecisionPolicy

            self.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype
            )

    def _mixed_precision_from_dict(self, given: dict[str, Any]) -> None:
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        kind: Any = MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy
        keys = ["param_dtype", "reduce_dtype", "buffer_dtype" if self.fsdp_version == 1 else "output_dtype"]
        if unknown := set(given) - set(keys):
            raise ConfigurationError(
                f"Invalid mixed precision policy: {given}. {sorted(unknown)} are not among {keys}"
            )
        self.mixed_precision_policy = kind(**{key: _dtype(value, key) for key, value in given.items()})

    def validate_mixed_precision_policy(self) -> None:
        """Raises ValueError where the policy is not of this version's class."""
        from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

        kind = MixedPrecision if self.fsdp_version == 1 else MixedPrecisionPolicy
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

    def validate_cpu_offload(self) -> None:
        """Raises ValueError where the offload object is not of this version's class."""
        from torch.distributed.fsdp import CPUOffload, OffloadPolicy

        kind = CPUOffload if self.fsdp_version == 1 else OffloadPolicy
        if not isinstance(self.cpu_offload, kind):
            raise ConfigurationError(
                f"`cpu_offload` must be True, False or an instance of `torch.distributed.fsdp.{kind.__name__}` in "
                f"FSDP{self.fsdp_version}, got {self.cpu_offload}"
            )


def _member(kind: Any, value: Any, field: str) -> Any:
    """A member of a torch enum from itself, its name in any case, or its number (as text or not)."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.isdigit():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        if value in [member.value for member in kind]:
            return kind(value)
    elif isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    choices = list(kind.__members__)
    raise ConfigurationError(f"{field}={value!r} is not one of {choices}{_hint(str(value).upper(), choices)}")


def _hint(word: str, choices: list[str]) -> str:
    found = nearest(word, choices)
    return f". Did you mean {found}?" if found else ""


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _flag(value: Any, variable: str) -> bool:
    if value is None:
        return env.get_flag(variable)
    return env.parse_bool(value, where=variable) if isinstance(value, str) else bool(value)


def _dtype(value: Any, key: str) -> torch.dtype | None:
    import torch

    words = {
        "fp16": torch.float16,
        "float16": torch.float16,
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp32": torch.float32,
        "float32": torch.float32,
    }
    if isinstance(value, str):
        value = words.get(value.removeprefix("torch."), value)
    if value is not None and not isinstance(value, torch.dtype):
        raise ConfigurationError(f"mixed_precision_policy[{key!r}]={value!r} is not a dtype: use one of {list(words)}")
    return value


def _policy_function(word: str) -> Callable[..., Any] | None:
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    table: dict[str, Callable[..., Any]] = {
        "TRANSFORMER_BASED_WRAP": transformer_auto_wrap_policy,
        "SIZE_BASED_WRAP": size_based_auto_wrap_policy,
    }
    return table.get(word)


def _state_dict_configs(kind: str) -> tuple[Any, Any]:
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
        return ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)
    return None, None


def _materialize(module: torch.nn.Module) -> None:
    """Give a meta module empty storage on this rank's device; its values then come from rank 0."""
    import torch

    from ..core.devices import accelerator_type

    kind = accelerator_type()
    device = torch.device("cpu") if kind is None else torch.device(kind, torch.accelerator.current_device_index())
    module.to_empty(device=device, recurse=False)
