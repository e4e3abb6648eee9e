# SPDX-License-Identifier: Apache-2.0
"""Arguments, environment and defaults become one Plan, one Precision and one Strategy: the only place that decides."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, cast, get_args, get_type_hints

import torch

from .config import checks
from .config.base import KwargsHandler
from .config.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from .config.precision import AutocastKwargs, GradScalerKwargs, MasterWeightsKwargs
from .config.training import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    OptimizerOffloadKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from .core import devices, env, extensions
from .core.device_kinds import DEVICES
from .core.enums import DistributedType, DynamoBackend, FP8BackendType, PrecisionType
from .core.errors import ConfigurationError, PrepareError
from .core.imports import is_available
from .core.lazy import public_name
from .logging import get_logger
from .parallel.base import Strategy
from .parallel.choice import check_deepspeed_layout, choose_strategy
from .parallel.ddp.strategy import DataParallel
from .parallel.registry import strategy_class, transform_class
from .parallelism_config import ParallelismConfig
from .precision.amp import MixedPrecision, ScaledPrecision, get_grad_scaler
from .precision.base import Precision
from .precision.fp8 import make_fp8
from .precision.master import MasterPrecision
from .runtime import group
from .runtime.topology import Topology
from .state import AcceleratorState, PartialState

if TYPE_CHECKING:
    from .config.deepspeed import DeepSpeedPlugin
    from .config.fsdp import FullyShardedDataParallelPlugin
    from .config.megatron import MegatronLMPlugin
    from .config.parallel import TorchTensorParallelPlugin


@dataclass
class Handlers:
    """The `kwargs_handlers` by kind; each kind may be given once."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    init: InitProcessGroupKwargs | None = None
    autocast: AutocastKwargs | None = None
    profile: ProfileKwargs | None = None
    fp8: FP8RecipeKwargs | None = None
    ao: AORecipeKwargs | None = None
    te: TERecipeKwargs | None = None
    msamp: MSAMPRecipeKwargs | None = None
    master: MasterWeightsKwargs | None = None
    offload: OptimizerOffloadKwargs | None = None


# Class -> field. The deprecated FP8RecipeKwargs is a TERecipeKwargs as well: it comes first.
_HANDLER_FIELDS: dict[type[KwargsHandler], str] = {
    get_args(hint)[0]: name for name, hint in get_type_hints(Handlers).items()
}


@dataclass(frozen=True)
class Request:
    """What the user has requested by argument. None means: not by argument."""

    mixed_precision: str | None = None
    cpu: bool = False
    gradient_accumulation_steps: int = 1
    gradient_accumulation_plugin: GradientAccumulationPlugin | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin] | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    torch_tp_plugin: TorchTensorParallelPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    exact: bool | None = None
    strategy: str | Callable[[torch.device, Precision], Strategy] | None = None
    transforms: Sequence[Any] | None = None
    kwargs_handlers: list[KwargsHandler] = field(default_factory=list)


class Plugins(TypedDict, total=False):
    """The plugins of the strategies that a run requests."""

    deepspeed_plugin: DeepSpeedPlugin | dict[str, DeepSpeedPlugin]
    fsdp_plugin: FullyShardedDataParallelPlugin
    megatron_lm_plugin: MegatronLMPlugin
    parallelism_config: ParallelismConfig


@dataclass(frozen=True)
class Plan:
    """What was decided, once; and for each value where it came from (argument, variable or default)."""

    mixed_precision: str
    accumulation: GradientAccumulationPlugin
    dynamo: TorchDynamoPlugin
    handlers: Handlers
    exact: bool
    strategy: str
    origins: dict[str, str]
    optimizer_offload: str | None = None  # what OptimizerOffloadKwargs does on this device

    def values(self) -> dict[str, tuple[Any, str]]:
        """Name -> (value, where it came from) of what was decided."""
        found = {
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.accumulation.num_steps,
            "dynamo_backend": self.dynamo.backend.value,
            "exact": self.exact,
        }
        if self.handlers.master is not None:
            found["master_weights"] = "fp32, of bf16 parameters"
        if self.optimizer_offload is not None:
            found["optimizer_offload"] = self.optimizer_offload
        others = {name: "given" for name, origin in self.origins.items() if name not in found and origin != "default"}
        return {name: (value, self.origins.get(name, "")) for name, value in {**found, **others}.items()}


@dataclass(frozen=True)
class Resolved:
    """The result of `resolve`."""

    plan: Plan
    state: AcceleratorState
    precision: Precision
    strategy: Strategy


def resolve(request: Request) -> Resolved:
    """Decide everything that a run's arguments, variables and defaults leave to decide.

    Raises ConfigurationError, naming the argument or variable, for anything that cannot be done here.
    """
    handlers = sort_handlers(request.kwargs_handlers)
    origins: dict[str, str] = {}
    accumulation = _accumulation(request, origins)
    dynamo = _dynamo(request, origins)
    plugins = _strategy_plugins(request, origins)
    exact = checks.truth_or("exact", request.exact, "ACCELERATE_EXACT")
    origins["exact"] = _origin(request.exact, "ACCELERATE_EXACT")
    origins["mixed_precision"] = _origin(request.mixed_precision, "ACCELERATE_MIXED_PRECISION")

    init = {} if handlers.init is None else handlers.init.to_kwargs()
    fsdp = plugins.get("fsdp_plugin")
    if fsdp is not None and fsdp.offloads_shards:
        init["_host_tensors"] = True
    if PartialState(request.cpu, **init).use_distributed and not group.is_running():
        raise ConfigurationError(
            "this process has left the group of its run, by end_training() or destroy_process_group(): make every "
            "Accelerator of a process before that, and call end_training() once, after the last one"
        )
    if fsdp is not None and _has_nothing_to_shard(fsdp, plugins):
        get_logger(__name__).warning(
            "one process has nothing to shard: the FSDP plugin has no effect. Start several processes with "
            "`accelerate launch`, or set cpu_offload=True or activation_checkpointing=True to save memory on this one"
        )
        del plugins["fsdp_plugin"]
    megatron = plugins.pop("megatron_lm_plugin", None)
    if megatron is not None:
        plugins["parallelism_config"] = _native_layout(megatron, plugins, PartialState().num_processes)
    state = AcceleratorState(
        mixed_precision=request.mixed_precision,
        cpu=request.cpu,
        dynamo_plugin=dynamo,
        torch_tp_plugin=request.torch_tp_plugin,
        _from_accelerator=True,
        **plugins,
    )
    if megatron is not None:
        state.__dict__["megatron_lm_plugin"] = megatron
    if not plugins and request.strategy is None and env.get("ACCELERATE_STRATEGY") is None:
        plugins = _known_plugins(state)
    if "fsdp_plugin" in plugins and hasattr(state, "fsdp_plugin"):
        # Of the Accelerator made last, whose strategy follows what is changed in it before `prepare`.
        state.__dict__["fsdp_plugin"] = plugins["fsdp_plugin"]
    name, arguments = _own_strategy(request, plugins, origins) or _choose(state, plugins)
    if handlers.master is not None:
        origins["master_weights"] = "argument"
        check_master(name, state.mixed_precision, origins)
    offload = None
    if handlers.offload is not None:
        origins["optimizer_offload"] = "argument"
        offload = check_optimizer_offload(name, state.device.type, handlers)
    precision = _precision(state, handlers, origins, gathers=name == "fsdp2")
    strategy = _strategy(name, state, precision, handlers, arguments)
    strategy.transforms = (*_own_transforms(request, origins), *strategy.transforms)
    check_transforms(strategy.transforms, name, dynamo)
    state.__dict__["device_mesh"] = getattr(strategy, "mesh", None)
    plan = Plan(state.mixed_precision, accumulation, dynamo, handlers, exact, strategy.name, origins, offload)
    return Resolved(plan, state, precision, strategy)


def adopt(
    resolved: Resolved, models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> Resolved:
    """What `resolve` gave, for a run with models that are sharded before `prepare`. Every rank calls it.

    Without a plugin or sizes the layout is that of the models. Otherwise they have to agree. `optimizers` are those
    that were prepared before.

    Raises:
        PrepareError: the models contradict what was requested, or cannot be taken as they are.
    """
    from .parallel.adopted.sharing import find_layout
    from .parallel.adopted.strategy import Adopted
    from .parallel.fsdp.fsdp2 import FullyShardedDataParallel
    from .parallel.sharded import lay_out_step
    from .parallel.tensor.strategy import TensorParallel

    state, former = resolved.state, resolved.strategy
    kinds = ", ".join(type(model).__name__ for model in models)
    if isinstance(former, Adopted) or former.sequence is not None:
        # Ranks that share a sequence cannot be read from a mesh.
        return resolved
    if isinstance(former, FullyShardedDataParallel | TensorParallel):
        layout, _ = find_layout(models)
        index, count = former.data_shard
        if len(layout.shards) != count or state.process_index not in layout.shards[index]:
            raise PrepareError(
                f"{kinds}: the ranks that read the same samples are {list(layout.shards)} by the meshes of the "
                f"parameters, and this Accelerator ({former.name}) has {count} data shards: shard the model on "
                "accelerator.torch_device_mesh, or leave the fsdp_plugin and the parallelism_config out"
            )
        return resolved
    requested = type(former) not in (Strategy, DataParallel) or state.parallelism_config is not None
    options = "DistributedDataParallelKwargs" if resolved.plan.handlers.ddp is not None else ""
    if requested or options:
        raise PrepareError(
            f"{kinds}: parameters are DTensors already, and this Accelerator requests {options or former.name}, which "
            "starts from the plain model. Leave the plugin or the option out: the model then trains in its own layout"
        )
    if state.mixed_precision == "fp8":
        raise PrepareError(
            f"mixed_precision='fp8' replaces layers, and the parameters of {kinds} are sharded already: give prepare "
            "the plain model, with an fsdp_plugin of version 2 or tp_size"
        )
    strategy = Adopted(state.device, resolved.precision, models)
    first = next(iter(former.prepared), None)
    if first is not None and strategy.data_shard != former.data_shard:
        raise PrepareError(
            f"{kinds} splits layers over ranks, which read the same samples, and {first.inner.__class__} "
            "was prepared to read others on each rank: give both to one call of prepare"
        )
    strategy.transforms = former.transforms
    strategy.prepared.add(former.prepared)
    for optimizer in optimizers:
        lay_out_step(optimizer)
    state.__dict__["device_mesh"] = strategy.mesh
    plan = dataclasses.replace(resolved.plan, strategy=strategy.name)
    return Resolved(plan, state, resolved.precision, strategy)


def sort_handlers(given: list[KwargsHandler] | None) -> Handlers:
    """The handlers by kind. Raises for a foreign object, or a kind that is given twice."""
    handlers = Handlers()
    if given is not None and not isinstance(given, list | tuple):
        raise ConfigurationError(f"kwargs_handlers takes a list of handlers, not {type(given).__name__}")
    for handler in given or ():
        name = next((name for kind, name in _HANDLER_FIELDS.items() if isinstance(handler, kind)), None)
        if name is None:
            kinds = ", ".join(kind.__name__ for kind in _HANDLER_FIELDS)
            raise ConfigurationError(f"kwargs_handlers holds {handler!r}: it takes objects of {kinds}")
        if getattr(handlers, name) is not None:
            raise ConfigurationError(f"kwargs_handlers holds two {type(handler).__name__}: give one")
        setattr(handlers, name, handler)
    return handlers


def _origin(argument: object, variable: str) -> str:
    """Where a value comes from: the argument unless it is None, else the variable if it is set, else the default."""
    if argument is not None:
        return "argument"
    return "default" if env.get(variable) is None else f"variable {variable}"


def _accumulation(request: Request, origins: dict[str, str]) -> GradientAccumulationPlugin:
    """The API's precedence: plugin, else the variable of the launcher, else the argument."""
    name, variable = "gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    plugin, steps = request.gradient_accumulation_plugin, request.gradient_accumulation_steps
    if plugin is not None:
        _of_kind("gradient_accumulation_plugin", plugin, GradientAccumulationPlugin)
        if steps != 1:
            raise ConfigurationError(
                f"gradient_accumulation_steps={steps} and gradient_accumulation_plugin are given both: "
                "set num_steps in the plugin"
            )
        origins[name] = "argument"
        if plugin.num_steps is not None:
            return plugin
        return dataclasses.replace(plugin, num_steps=env.get_int(variable) or 1)
    checks.integer("gradient_accumulation_steps", steps)
    requested = env.get_int(variable)
    if steps != 1 or requested is None:
        origins[name] = "argument" if steps != 1 else "default"
        return GradientAccumulationPlugin(num_steps=steps)
    origins[name] = f"variable {variable}"
    return GradientAccumulationPlugin(num_steps=requested)


def _dynamo(request: Request, origins: dict[str, str]) -> TorchDynamoPlugin:
    origins["dynamo_backend"] = _origin(request.dynamo_plugin, "ACCELERATE_DYNAMO_BACKEND")
    if request.dynamo_plugin is None:
        return TorchDynamoPlugin()
    plugin: TorchDynamoPlugin = _of_kind("dynamo_plugin", request.dynamo_plugin, TorchDynamoPlugin)
    return plugin


def _strategy_plugins(request: Request, origins: dict[str, str]) -> Plugins:
    """The plugin of each strategy that is requested, by argument or by the launcher's variables."""
    found: dict[str, Any] = {}
    for name, variable, kind in (
        ("deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED", "DeepSpeedPlugin"),
        ("fsdp_plugin", "ACCELERATE_USE_FSDP", "FullyShardedDataParallelPlugin"),
        ("megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM", "MegatronLMPlugin"),
        ("parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", "ParallelismConfig"),
    ):
        given = getattr(request, name)
        if given is None and env.get_flag(variable):
            given = public_name(__name__, kind)()
            origins[name] = f"variable {variable}"
        elif given is not None:
            origins[name] = "argument"
        if given is not None:
            found[name] = _of_kind(name, given, public_name(__name__, kind))
    if "fsdp_plugin" in found:
        # Each Accelerator fills in what its own precision decides.
        found["fsdp_plugin"] = copy.copy(found["fsdp_plugin"])
    if request.torch_tp_plugin is not None:
        found["parallelism_config"] = _with_tensor_plugin(request.torch_tp_plugin, found.get("parallelism_config"))
        origins["parallelism_config"] = "argument"
    rivals = [name for name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin") if name in found]
    if len(rivals) > 1:
        raise ConfigurationError(
            "only one of " + " and ".join(f"{name} ({origins[name]})" for name in rivals) + " can lay out the model"
        )
    return cast(Plugins, found)


def _has_nothing_to_shard(fsdp: FullyShardedDataParallelPlugin, plugins: Plugins) -> bool:
    """Whether a single process, that no launcher has started, has an FSDP plugin that saves no memory on it."""
    if PartialState().use_distributed or group.is_running() or Topology.from_environment().launcher != "none":
        return False
    return not (fsdp.offloads_shards or fsdp.activation_checkpointing or "parallelism_config" in plugins)


def _known_plugins(state: AcceleratorState) -> Plugins:
    """The plugins of a process's first Accelerator, which those after it share where they are given none."""
    known = {
        "deepspeed_plugin": state.deepspeed_plugins,
        "fsdp_plugin": getattr(state, "fsdp_plugin", None),
        "parallelism_config": state.parallelism_config,
    }
    return cast(Plugins, {name: plugin for name, plugin in known.items() if plugin is not None})


def _of_kind(name: str, given: Any, kind: type) -> Any:
    """A plugin, if it is one. Of DeepSpeed's several may be given, in a dict."""
    several = name == "deepspeed_plugin" and isinstance(given, dict)
    if several and not given:
        raise ConfigurationError(f"{name}={given!r} has no plugin")
    for plugin in given.values() if several else (given,):
        if not isinstance(plugin, kind):
            raise ConfigurationError(f"{name}={given!r}: it takes a {kind.__name__}, not {type(plugin).__name__}")
    return given


def _with_tensor_plugin(plugin: TorchTensorParallelPlugin, layout: ParallelismConfig | None) -> ParallelismConfig:
    """The layout of the API's older plugin: every process is a tensor-parallel rank."""
    layout = ParallelismConfig(tp_size=plugin.tp_size) if layout is None else layout
    if plugin.torch_device_mesh is not None:
        if layout.total_size != plugin.tp_size:
            raise ConfigurationError(
                f"torch_tp_plugin has a torch_device_mesh of tp alone, and parallelism_config is {layout}: give the "
                "sizes there, without a mesh"
            )
        layout.device_mesh = plugin.torch_device_mesh
    if layout.tp_size != plugin.tp_size:
        raise ConfigurationError(
            f"torch_tp_plugin has tp_size={plugin.tp_size} and parallelism_config tp_size={layout.tp_size}: give one"
        )
    return layout


def _native_layout(plugin: MegatronLMPlugin, plugins: Plugins, world: int) -> ParallelismConfig:
    """What a run described in Megatron-LM's words is here, with a note of what has no counterpart."""
    from .config.parallel import PipelineParallelConfig, TorchTensorParallelConfig

    if "parallelism_config" in plugins:
        raise ConfigurationError("megatron_lm_plugin and parallelism_config both give the layout: give one")
    sizes: dict[str, Any] = {**plugin.parallelism(world)}
    handlers: dict[str, Any] = {}
    if sizes["tp_size"] > 1:
        handlers["tp_handler"] = TorchTensorParallelConfig(sequence_parallel=bool(plugin.sequence_parallelism))
    if sizes["pp_size"] > 1:
        handlers["pp_handler"] = PipelineParallelConfig(num_microbatches=plugin.num_micro_batches)
    layout = ", ".join(f"{name}={size}" for name, size in sizes.items())
    left = plugin.without_counterpart()
    get_logger(__name__).warning(
        f"megatron_lm_plugin: PyTorch's own pieces run its layout, ParallelismConfig({layout}). The loop is as with "
        "any other: model, optimizer and scheduler are yours, a loader's batch is divided into the micro-batches, and "
        "gradients are clipped by accelerator.clip_grad_norm_"
        + (f". These fields have no counterpart and do nothing: {', '.join(left)}" if left else "")
    )
    return ParallelismConfig(**sizes, **handlers)


def _precision(
    state: AcceleratorState, handlers: Handlers, origins: dict[str, str], gathers: bool = False
) -> Precision:
    """What models compute in. `gathers`: the strategy gathers parameters, which fp8 can change the messages of."""
    name, device = state.mixed_precision, state.device.type
    if state.distributed_type is DistributedType.DEEPSPEED:
        _check_engine_precision(state, origins["mixed_precision"])
    recipes = [one for one in (handlers.fp8, handlers.ao, handlers.te, handlers.msamp) if one is not None]
    if recipes and name != "fp8":
        raise ConfigurationError(
            f"kwargs_handlers holds {type(recipes[0]).__name__}, which needs mixed_precision='fp8'; it is {name!r} "
            f"({origins['mixed_precision']})"
        )
    if name == "no" or state.distributed_type is DistributedType.DEEPSPEED:
        # An engine computes in the precision of its configuration, which `state` has set.
        return Precision()
    if name == "bf16":
        if not devices.supports_bf16(device):
            raise ConfigurationError(
                f"mixed_precision='bf16' ({origins['mixed_precision']}): this {device} device does not compute in "
                "bfloat16; use fp16 or no"
            )
        _check_autocast(name, torch.bfloat16, device, origins["mixed_precision"])
        kind = MixedPrecision if handlers.master is None else MasterPrecision
        return kind("bf16", torch.bfloat16, device, handlers.autocast)
    if name == "fp16":
        _check_autocast(name, torch.float16, device, origins["mixed_precision"])
        scaler = None
        if state.distributed_type is DistributedType.FSDP and not state.is_fsdp2:
            # FSDP1 shows a rank its slice of a gradient: the ranks must agree on whether all is finite.
            kwargs = {} if handlers.scaler is None else handlers.scaler.to_kwargs()
            scaler = get_grad_scaler(DistributedType.FSDP, **kwargs)
        return ScaledPrecision(device, handlers.autocast, handlers.scaler, scaler)
    if name not in PrecisionType.list():
        added: Precision = extensions.load("precision", name)(state.device)
        return added
    backend, recipe = _fp8_backend(handlers)
    return make_fp8(device, handlers.autocast, backend, recipe, gathers)


def _check_autocast(name: str, dtype: torch.dtype, device: str, origin: str) -> None:
    """ConfigurationError where the device's backend has no autocast: torch would raise in the first forward."""
    try:
        torch.autocast(device, dtype=dtype)
    except (AssertionError, RuntimeError) as error:
        raise ConfigurationError(
            f"mixed_precision={name!r} ({origin}): torch has no autocast to {dtype} for {device} devices "
            f"({str(error).splitlines()[0]}). Use mixed_precision='no', and load the model in the dtype to "
            "compute in"
        ) from error


def _check_engine_precision(state: AcceleratorState, origin: str) -> None:
    requested, runs = state.__dict__["_mixed_precision"], state.mixed_precision
    if requested == "fp8":
        raise ConfigurationError(
            "mixed_precision='fp8' does not compose with DeepSpeed here: shard with an fsdp_plugin of version 2"
        )
    if requested == "no" and runs != "no" and origin == "argument":
        get_logger(__name__).warning(
            f"mixed_precision='no' ({origin}), and the DeepSpeed config has {runs}.enabled=True, which decides: the "
            f"engine computes in {runs}. Give mixed_precision={runs!r}, or set {runs}.enabled to False there"
        )


# Why a strategy does not take our master weights.
_NO_MASTER_WEIGHTS = {
    "deepspeed": "DeepSpeed keeps fp32 master weights of bf16 parameters itself: leave it out",
    "fsdp1": "FSDP1 keeps its own flat fp32 shards. Use fsdp_version=2, or leave it out",
    "xla": "torch_xla steps on graphs that are traced from the parameters. Leave it out",
}


def check_master(strategy: Any, mixed_precision: str, origins: dict[str, str]) -> None:
    """Raise ConfigurationError where MasterWeightsKwargs cannot be had."""
    if strategy in _NO_MASTER_WEIGHTS:
        raise ConfigurationError(f"kwargs_handlers holds MasterWeightsKwargs: {_NO_MASTER_WEIGHTS[strategy]}")
    if "strategy" in origins:
        raise ConfigurationError(
            f"kwargs_handlers holds MasterWeightsKwargs, and strategy ({origins['strategy']}) lays models out by "
            "itself: it is unknown when its parameters may be cast. Leave one out"
        )
    reasons = {
        "no": "without mixed precision the parameters are the master weights",
        "fp16": "it keeps fp32 parameters, which are the master weights",
        "fp8": "fp8 layers cast their own fp32 weights",
    }
    if mixed_precision != PrecisionType.BF16.value:
        reason = reasons.get(mixed_precision, "this precision lowers what it lowers by itself")
        raise ConfigurationError(
            f"kwargs_handlers holds MasterWeightsKwargs, which needs mixed_precision='bf16'; it is "
            f"{mixed_precision!r} ({origins['mixed_precision']}): {reason}"
        )


def check_optimizer_offload(strategy: Any, device: str, handlers: Handlers) -> str:
    """What OptimizerOffloadKwargs does in this run. Raises ConfigurationError where it cannot be had."""
    others = {
        "deepspeed": "set offload_optimizer_device='cpu' in the deepspeed_plugin",
        "fsdp1": "set cpu_offload=True in the fsdp_plugin",
        "fsdp2": "set cpu_offload=True in the fsdp_plugin",
    }
    if strategy in others:
        raise ConfigurationError(f"kwargs_handlers holds OptimizerOffloadKwargs: for {strategy}, {others[strategy]}")
    if strategy not in ("single", "ddp"):
        raise ConfigurationError(
            f"kwargs_handlers holds OptimizerOffloadKwargs, which is for one process and DDP; this run is {strategy}"
        )
    if handlers.master is not None:
        raise ConfigurationError("kwargs_handlers holds OptimizerOffloadKwargs and MasterWeightsKwargs: give one")
    if device == "cpu":
        return "nothing to do: on the CPU states are in host memory"
    if device not in DEVICES or not DEVICES[device].pin_memory:
        raise ConfigurationError(
            f"kwargs_handlers holds OptimizerOffloadKwargs, and {device} devices have no pinned host memory"
        )
    return "states are in host memory between steps"


def check_transforms(transforms: Sequence[Any], strategy: Any, dynamo: TorchDynamoPlugin) -> None:
    """Raise ConfigurationError for a transform that excludes the layout or the compilation of this run."""
    for one in transforms:
        excluded = getattr(one, "excludes", ())
        if "pipeline" in excluded and strategy == "pipeline":
            raise ConfigurationError(f"{type(one).__name__} does not work with pp_size: leave one out")
        if "compile" in excluded and dynamo.backend is not DynamoBackend.NO:
            raise ConfigurationError(
                f"{type(one).__name__} does not work with dynamo_backend={dynamo.backend.value!r}: leave one out"
            )


def _fp8_backend(handlers: Handlers) -> tuple[FP8BackendType, Any]:
    """(library, recipe) of fp8: of the recipe that is given, else ACCELERATE_FP8_BACKEND, else what is installed."""
    given = {
        FP8BackendType.AO: handlers.ao,
        FP8BackendType.TE: handlers.te,
        FP8BackendType.MSAMP: handlers.msamp,
    }
    if handlers.fp8 is not None:
        backend = FP8BackendType(str(handlers.fp8.backend))
        if given[backend] is not None:
            raise ConfigurationError(f"kwargs_handlers holds two recipes for {backend.value}: give one")
        given[backend] = handlers.fp8
    requested = [backend for backend, recipe in given.items() if recipe is not None]
    if len(requested) > 1:
        raise ConfigurationError(
            f"kwargs_handlers holds recipes for {' and '.join(one.value for one in requested)}: give one"
        )
    if requested:
        return requested[0], given[requested[0]]
    word = env.get("ACCELERATE_FP8_BACKEND")
    if word is not None:
        if word.upper() not in ("AO", "TE", "MSAMP"):
            raise ConfigurationError(f"ACCELERATE_FP8_BACKEND={word!r}: use AO, TE or MSAMP")
        return FP8BackendType(word.upper()), None
    for package, backend in (("transformer_engine", FP8BackendType.TE), ("torchao", FP8BackendType.AO)):
        if is_available(package):
            return backend, None
    raise ConfigurationError("mixed_precision='fp8' needs a library: pip install torchao (or accelerate[fp8])")


def _choose(state: AcceleratorState, plugins: Plugins) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of the strategy that runs the requested layout."""
    world, parallelism = state.num_processes, plugins.get("parallelism_config")
    if "deepspeed_plugin" in plugins:
        if parallelism is not None:
            check_deepspeed_layout(world, parallelism)
        return "deepspeed", {}
    if state.device.type == "xla" and not plugins:
        return "xla", {}
    return choose_strategy(world, parallelism, plugins.get("fsdp_plugin"))


def _own_strategy(request: Request, plugins: Plugins, origins: dict[str, str]) -> tuple[Any, dict[str, Any]] | None:
    """The strategy of the user's or of another package's, which needs no plugin of ours."""
    requested = request.strategy or env.get("ACCELERATE_STRATEGY")
    if requested is None:
        return None
    origins["strategy"] = _origin(request.strategy, "ACCELERATE_STRATEGY")
    if plugins:
        raise ConfigurationError(
            f"strategy={requested!r} ({origins['strategy']}) and {next(iter(plugins))} exclude each other: give one"
        )
    return requested, {}


def _own_transforms(request: Request, origins: dict[str, str]) -> tuple[Any, ...]:
    requested: Sequence[Any] = request.transforms if request.transforms is not None else ()
    if request.transforms is None and (text := env.get("ACCELERATE_TRANSFORMS")):
        requested = [name.strip() for name in text.split(",") if name.strip()]
    if isinstance(requested, str):
        raise ConfigurationError(f"transforms={requested!r} is one word: give a list of transforms")
    origins["transforms"] = _origin(request.transforms, "ACCELERATE_TRANSFORMS")
    found = [transform_class(one)() if isinstance(one, str) else one for one in requested]
    for one in found:
        if not callable(getattr(one, "apply", None)):
            raise ConfigurationError(f"transforms holds {one!r}: a transform has a method apply(model)")
    return tuple(found)


def _strategy(
    name: Any, state: AcceleratorState, precision: Precision, handlers: Handlers, arguments: dict[str, Any]
) -> Strategy:
    if name in ("ddp", "xla"):
        arguments = {"options": handlers.ddp}
    make = name if callable(name) else strategy_class(name)
    strategy: Strategy = make(state.device, precision, **arguments)
    if not isinstance(strategy, Strategy):
        raise ConfigurationError(f"strategy={name!r} makes a {type(strategy).__name__}, no parallel.base.Strategy")
    if state.dynamo_plugin.backend is not DynamoBackend.NO:
        from .parallel.compile import Compile

        strategy.transforms = (*strategy.transforms, Compile(state.dynamo_plugin))
    return strategy
