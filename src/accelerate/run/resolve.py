# SPDX-License-Identifier: Apache-2.0
"""Arguments, environment and defaults become one Plan, one Precision and one Strategy: the only place that decides."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import torch

from ..config import checks
from ..config.checks import KwargsHandler
from ..config.precision import (
    AORecipeKwargs,
    AutocastKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    MasterWeightsKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from ..config.training import (
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    OptimizerOffloadKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from ..core import devices, env
from ..core.enums import DistributedType, DynamoBackend, FP8BackendType, PrecisionType
from ..core.errors import ConfigurationError, PrepareError
from ..core.imports import is_available, load_extension
from ..core.lazy import public_name
from ..core.modules import class_name
from ..core.topology import Topology
from ..logging import get_logger
from ..parallel.base import Strategy
from ..parallel.choice import check_deepspeed_layout, choose_strategy
from ..parallel.ddp.strategy import DataParallel
from ..parallel.registry import strategy_class, transform_class
from ..parallelism_config import ParallelismConfig
from ..precision.amp import MixedPrecision, ScaledPrecision, get_grad_scaler
from ..precision.base import Precision
from ..precision.fp8 import make_fp8
from ..precision.master import MasterPrecision
from ..precision.modules import PrecisionPolicy, check_policy
from ..runtime import group
from ..state import AcceleratorState, PartialState

if TYPE_CHECKING:
    from ..config.deepspeed import DeepSpeedPlugin
    from ..config.fsdp import FullyShardedDataParallelPlugin
    from ..config.megatron import MegatronLMPlugin
    from ..config.parallel import TorchTensorParallelPlugin


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
    master_weights: MasterWeightsKwargs | None = None
    optimizer_offload: OptimizerOffloadKwargs | None = None

    @property
    def fp8_recipe(self) -> Any:
        """The recipe of fp8 training, or None."""
        return self.fp8 or self.ao or self.te or self.msamp


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
    non_finite: str = "ignore"
    precision_policy: PrecisionPolicy | None = None
    kwargs_handlers: list[KwargsHandler] = field(default_factory=list)


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

    def values(self) -> dict[str, tuple[Any, str]]:
        """Name -> (value, where it came from) of what was decided."""
        decided = {
            "mixed_precision": self.mixed_precision,
            "gradient_accumulation_steps": self.accumulation.num_steps,
            "dynamo_backend": self.dynamo.backend.value,
            "exact": self.exact,
        }
        values: dict[str, Any] = {
            name: "given" for name, origin in self.origins.items() if origin != "default"
        }
        values |= decided
        return {name: (value, self.origins.get(name, "")) for name, value in values.items()}


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
    origins["dynamo_backend"] = _origin(request.dynamo_plugin, "ACCELERATE_DYNAMO_BACKEND", "no")
    dynamo = request.dynamo_plugin or TorchDynamoPlugin()
    plugins = _strategy_plugins(request, origins)
    exact = checks.truth_or("exact", request.exact, "ACCELERATE_EXACT")
    origins["exact"] = _origin(request.exact, "ACCELERATE_EXACT")
    origins["mixed_precision"] = _origin(
        request.mixed_precision, "ACCELERATE_MIXED_PRECISION", "no"
    )

    _start_process(request, handlers, plugins)
    requested = env.get("MIXED_PRECISION", "no")
    is_precision = requested != "no" and requested in PrecisionType.list()
    if is_precision and origins["mixed_precision"] == "default":
        get_logger(__name__).warning(
            f"the variable MIXED_PRECISION={requested} has no effect: set ACCELERATE_MIXED_PRECISION={requested}"
        )
    state, plugins = _shared_state(request, dynamo, plugins)
    name, arguments = _choose_strategy(request, state, plugins, handlers, origins)
    transforms = _transforms(request, origins)
    for kind in ("master_weights", "optimizer_offload"):
        if getattr(handlers, kind):
            origins[kind] = "argument"
    check_combination(name, state, handlers, transforms, origins, request)
    precision = _precision(state, handlers, origins, gathers=name == "fsdp2")
    if request.precision_policy:
        precision.modules = check_policy(request.precision_policy, state.mixed_precision)
    make = name
    if not callable(make):
        make = strategy_class(name)
    strategy: Strategy = make(state.device, precision, **arguments)
    strategy.transforms = (*transforms, *strategy.transforms)
    if dynamo.backend is not DynamoBackend.NO:
        from ..parallel.compile import Compile

        strategy.transforms = (*strategy.transforms, Compile(state.dynamo_plugin))
    mesh = getattr(strategy, "mesh", None)
    layout = state.parallelism_config
    if mesh is None and layout is not None and set(layout.mesh_shape) - set(layout.sizes):
        # Another package has added a dimension, and uses the mesh itself.
        mesh = layout.get_device_mesh(state.device.type)
    state.__dict__["device_mesh"] = mesh
    plan = Plan(
        state.mixed_precision, accumulation, dynamo, handlers, exact, strategy.name, origins
    )
    return Resolved(plan, state, precision, strategy)


def _start_process(request: Request, handlers: Handlers, plugins: dict[str, Any]) -> None:
    """Start the process group, unless it runs. An FSDP plugin with nothing to do on one process leaves `plugins`."""
    init = (handlers.init or InitProcessGroupKwargs()).to_kwargs()
    fsdp = plugins.get("fsdp_plugin")
    if fsdp is not None and fsdp.offloads_shards:
        init["_host_tensors"] = True
    process = PartialState(request.cpu, **init)
    if process.use_distributed and not group.is_running():
        raise ConfigurationError(
            "this process left the process group of its run (by end_training() or "
            "destroy_process_group()): create every Accelerator of a process before that, and "
            "call end_training() once, after the last one"
        )
    if fsdp is None or "parallelism_config" in plugins:
        return
    if fsdp.offloads_shards or fsdp.activation_checkpointing:
        return
    if not group.is_running() and Topology.from_environment().launcher == "none":
        get_logger(__name__).warning(
            "with one process there is nothing to shard, so the FSDP plugin has no effect. Under "
            "mixed precision, 16-bit weights stay in 16 bits, but several processes would train "
            "them in fp32. Start several processes with `accelerate launch`, or set "
            "cpu_offload=True or activation_checkpointing=True to save memory on this one"
        )
        del plugins["fsdp_plugin"]


def _shared_state(
    request: Request, dynamo: TorchDynamoPlugin, plugins: dict[str, Any]
) -> tuple[AcceleratorState, dict[str, Any]]:
    """The state that all Accelerators of the process share, and the plugins of this one."""
    megatron = plugins.pop("megatron_lm_plugin", None)
    if megatron is not None:
        plugins["parallelism_config"] = _native_layout(
            megatron, plugins, PartialState().num_processes
        )
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
        # Those of the process's first Accelerator, which the ones after it share.
        shared = {
            "deepspeed_plugin": state.deepspeed_plugins,
            "fsdp_plugin": getattr(state, "fsdp_plugin", None),
            "parallelism_config": state.parallelism_config,
        }
        plugins = {name: plugin for name, plugin in shared.items() if plugin is not None}
    if "fsdp_plugin" in plugins and hasattr(state, "fsdp_plugin"):
        # Of the Accelerator made last, whose strategy follows what is changed in it before `prepare`.
        state.__dict__["fsdp_plugin"] = plugins["fsdp_plugin"]
    is_fsdp = state.distributed_type is DistributedType.FSDP
    if is_fsdp and state.is_fsdp2 != (state.fsdp_plugin.fsdp_version == 2):
        get_logger(__name__).warning(
            f"AcceleratorState.is_fsdp2 was replaced and is {state.is_fsdp2}, which does not "
            f"change the layout: the fsdp_plugin's fsdp_version={state.fsdp_plugin.fsdp_version} "
            "decides. Set that instead"
        )
    return state, plugins


def adopt(
    resolved: Resolved,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
) -> Resolved:
    """What `resolve` gave, for a run with models that are sharded before `prepare`. Every rank calls it.

    Without a plugin or sizes the layout is that of the models. Otherwise they have to agree. `optimizers` are those
    that were prepared before.

    Raises:
        PrepareError: the models contradict what was requested, or cannot be taken as they are.
    """
    from torch.distributed.fsdp import FSDPModule

    from ..parallel.adopted.layout import find_layout
    from ..parallel.adopted.strategy import Adopted
    from ..parallel.fsdp import requirements
    from ..parallel.fsdp.strategy import FullyShardedDataParallel
    from ..parallel.sharded_optimizer import lay_out_step
    from ..parallel.tensor.strategy import TensorParallel

    state, former = resolved.state, resolved.strategy
    kinds = ", ".join(map(class_name, models))
    if isinstance(former, Adopted) or former.sequence is not None:
        # Ranks that share a sequence cannot be read from a mesh.
        return resolved
    if isinstance(former, FullyShardedDataParallel):
        for model in models:
            if not isinstance(model, FSDPModule):
                # Only a layer that it shares with another model is sharded.
                requirements.check(
                    model, former.name, former.plugin.ignored_modules, former.prepared
                )
    if isinstance(former, FullyShardedDataParallel | TensorParallel):
        layout, _ = find_layout(models)
        index, count = former.data_shard
        if len(layout.shards) != count or state.process_index not in layout.shards[index]:
            raise PrepareError(
                f"{kinds}: the ranks that read the same samples are {list(layout.shards)} "
                f"according to the meshes of the parameters, but this Accelerator ({former.name}) "
                f"has {count} data shards: shard the model on accelerator.torch_device_mesh, or "
                "remove the fsdp_plugin and the parallelism_config"
            )
        return resolved
    requested: dict[str, object] = {
        former.name: type(former) not in (Strategy, DataParallel)
        or state.parallelism_config is not None,
        "DistributedDataParallelKwargs": resolved.plan.handlers.ddp is not None,
        "mixed_precision='fp8'": state.mixed_precision == "fp8",
        "precision_policy": bool(resolved.precision.modules),
    }
    names = [name for name, is_requested in requested.items() if is_requested]
    if names:
        raise PrepareError(
            f"{kinds}: parameters are already DTensors, but this Accelerator requests "
            f"{' and '.join(names)}, which starts from the plain model. Remove that to train the "
            "model in its own layout, or pass the plain model to prepare, with an fsdp_plugin or "
            "a parallelism_config"
        )
    strategy = Adopted(state.device, resolved.precision, models)
    strategy.transforms = former.transforms
    strategy.prepared.add(former.prepared)
    for optimizer in optimizers:
        lay_out_step(optimizer)
    state.__dict__["device_mesh"] = strategy.mesh
    plan = dataclasses.replace(resolved.plan, strategy=strategy.name)
    return Resolved(plan, state, resolved.precision, strategy)


def sort_handlers(objects: list[KwargsHandler] | None) -> Handlers:
    """The handlers by kind. Raises ConfigurationError for a foreign object, or a kind that is given twice."""
    handlers = Handlers()
    for handler in objects or ():
        names = [name for kind, name in _HANDLER_FIELDS.items() if isinstance(handler, kind)]
        if not names:
            kinds = ", ".join(kind.__name__ for kind in _HANDLER_FIELDS)
            raise ConfigurationError(
                f"kwargs_handlers contains {handler!r}: it takes objects of {kinds}"
            )
        if getattr(handlers, names[0]) is not None:
            raise ConfigurationError(
                f"kwargs_handlers contains two {type(handler).__name__}: pass only one"
            )
        setattr(handlers, names[0], handler)
    return handlers


def _origin(argument: object, variable: str, default: str | None = None) -> str:
    """Where a value comes from: the argument unless it is None, else the variable if it is set, else the default.

    A launcher sets some variables to the `default`, which nobody has requested.
    """
    if argument is not None:
        return "argument"
    if env.get(variable) in (None, default):
        return "default"
    return f"variable {variable}"


def _accumulation(request: Request, origins: dict[str, str]) -> GradientAccumulationPlugin:
    """The API's precedence: the plugin or the argument, else the variable of the launcher."""
    name, variable = "gradient_accumulation_steps", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    plugin = request.gradient_accumulation_plugin
    steps = checks.integer(name, request.gradient_accumulation_steps)
    if steps != 1:
        if plugin is not None:
            raise ConfigurationError(
                f"{name}={steps} and gradient_accumulation_plugin were both passed: set num_steps "
                "in the plugin"
            )
        plugin = GradientAccumulationPlugin(num_steps=steps)
    origins[name] = _origin(plugin, variable)
    plugin = plugin or GradientAccumulationPlugin()
    if plugin.num_steps is None:
        plugin = dataclasses.replace(plugin, num_steps=env.get_int(variable) or 1)
    return plugin


def _strategy_plugins(request: Request, origins: dict[str, str]) -> dict[str, Any]:
    """The plugin of each strategy that is requested, by argument or by the launcher's variables."""
    plugins: dict[str, Any] = {}
    for name, variable, kind in (
        ("deepspeed_plugin", "ACCELERATE_USE_DEEPSPEED", "DeepSpeedPlugin"),
        ("fsdp_plugin", "ACCELERATE_USE_FSDP", "FullyShardedDataParallelPlugin"),
        ("megatron_lm_plugin", "ACCELERATE_USE_MEGATRON_LM", "MegatronLMPlugin"),
        ("parallelism_config", "ACCELERATE_USE_PARALLELISM_CONFIG", "ParallelismConfig"),
    ):
        plugin = getattr(request, name)
        if plugin is not None or env.get_flag(variable):
            origins[name] = _origin(plugin, variable)
            make = public_name(__name__, kind)
            if plugin is None:
                plugin = make()
            _check_kind(name, plugin, make)
            plugins[name] = plugin
    if "fsdp_plugin" in plugins:
        # Each Accelerator fills in what its own precision decides.
        plugins["fsdp_plugin"] = copy.copy(plugins["fsdp_plugin"])
    if request.torch_tp_plugin is not None:
        plugins["parallelism_config"] = _with_tensor_plugin(
            request.torch_tp_plugin, plugins.get("parallelism_config")
        )
        origins["parallelism_config"] = "argument"
    engines = ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin")
    rivals = [f"{name} ({origins[name]})" for name in engines if name in plugins]
    if len(rivals) > 1:
        raise ConfigurationError(f"only one of {' and '.join(rivals)} can lay out the model")
    return plugins


def _check_kind(name: str, requested: Any, kind: type) -> None:
    """Raise ConfigurationError for what is no plugin. Of DeepSpeed's several may be given, in a dict."""
    plugins = [requested]
    if requested and isinstance(requested, dict):
        plugins = list(requested.values())
    for plugin in plugins:
        if not isinstance(plugin, kind):
            raise ConfigurationError(
                f"{name}={requested!r}: it takes a {kind.__name__}, not {type(plugin).__name__}"
            )


def _with_tensor_plugin(
    plugin: TorchTensorParallelPlugin, layout: ParallelismConfig | None
) -> ParallelismConfig:
    """The layout of the API's older plugin: every process is a tensor-parallel rank."""
    if layout is None:
        layout = ParallelismConfig(tp_size=plugin.tp_size)
    has_mesh = plugin.torch_device_mesh is not None
    if layout.tp_size != plugin.tp_size or (has_mesh and layout.total_size != plugin.tp_size):
        raise ConfigurationError(
            f"torch_tp_plugin has tp_size={plugin.tp_size}{' and a mesh of tp alone' * has_mesh}, "
            f"and parallelism_config is {layout}: set the sizes there, and remove torch_tp_plugin"
        )
    if has_mesh:
        layout.device_mesh = plugin.torch_device_mesh
    return layout


def _native_layout(
    plugin: MegatronLMPlugin, plugins: dict[str, Any], world: int
) -> ParallelismConfig:
    """What a run described in Megatron-LM's words is here, with a note of what has no counterpart."""
    from ..config.parallel import PipelineParallelConfig, TorchTensorParallelConfig

    if "parallelism_config" in plugins:
        raise ConfigurationError(
            "megatron_lm_plugin and parallelism_config both set the layout: pass only one"
        )
    sizes: dict[str, Any] = {**plugin.parallelism(world)}
    handlers: dict[str, Any] = {}
    if sizes["tp_size"] > 1:
        handlers["tp_handler"] = TorchTensorParallelConfig(
            sequence_parallel=bool(plugin.sequence_parallelism)
        )
    if sizes["pp_size"] > 1:
        handlers["pp_handler"] = PipelineParallelConfig(num_microbatches=plugin.num_micro_batches)
    layout = ", ".join(f"{name}={size}" for name, size in sizes.items())
    note = (
        f"megatron_lm_plugin: PyTorch runs its layout, ParallelismConfig({layout}). The loop is "
        "the same as in other layouts: model, optimizer and scheduler are yours, each batch of "
        "the loader is divided into micro-batches, and accelerator.clip_grad_norm_ clips "
        "gradients"
    )
    ignored = ", ".join(plugin.without_counterpart())
    if ignored:
        note += f". These fields have no counterpart and no effect: {ignored}"
    get_logger(__name__).warning(note)
    return ParallelismConfig(**sizes, **handlers)


def _precision(
    state: AcceleratorState, handlers: Handlers, origins: dict[str, str], gathers: bool
) -> Precision:
    """What models compute in. `gathers`: the strategy gathers parameters, which fp8 can change the messages of."""
    name, device = state.mixed_precision, state.device.type
    if state.distributed_type is DistributedType.DEEPSPEED:
        if (
            name != "no"
            and state.__dict__["_mixed_precision"] == "no"
            and origins["mixed_precision"] == "argument"
        ):
            get_logger(__name__).warning(
                "mixed_precision='no' (argument), but the DeepSpeed config has "
                f"{name}.enabled=True, which takes precedence: the engine computes in {name}. "
                f"Pass mixed_precision={name!r}, or set {name}.enabled to False there"
            )
        # An engine computes in the precision of its configuration.
        return Precision()
    if name == "no":
        return Precision()
    if name == "bf16":
        kind: type[MixedPrecision | MasterPrecision] = MixedPrecision
        if handlers.master_weights is not None:
            kind = MasterPrecision
        return kind("bf16", torch.bfloat16, device, handlers.autocast)
    if name == "fp16":
        scaler = None
        if state.distributed_type is DistributedType.FSDP and not state.is_fsdp2:
            # FSDP1 shows a rank its slice of a gradient: the ranks must agree on whether all is finite.
            options = handlers.scaler or GradScalerKwargs()
            scaler = get_grad_scaler(DistributedType.FSDP, **options.to_kwargs())
        return ScaledPrecision(device, handlers.autocast, handlers.scaler, scaler)
    if name not in PrecisionType.list():
        added: Precision = load_extension("precision", name)(state.device)
        return added
    return make_fp8(device, handlers.autocast, *_fp8_backend(handlers), gathers)


def check_combination(
    strategy: Any,
    state: AcceleratorState,
    handlers: Handlers,
    transforms: Sequence[Any],
    origins: dict[str, str],
    request: Request = Request(),
) -> None:
    """Raise ConfigurationError for options that do not go together."""
    precision, device = state.mixed_precision, state.device.type
    of_precision = f"mixed_precision={precision!r} ({origins['mixed_precision']})"
    recipe = handlers.fp8_recipe
    master = handlers.master_weights
    offload = handlers.optimizer_offload
    masters = "kwargs_handlers contains MasterWeightsKwargs"
    offloads = "kwargs_handlers contains OptimizerOffloadKwargs"
    splits = state.parallelism_config is not None and state.parallelism_config.tp_enabled
    refused: list[tuple[object, str]] = [
        (
            strategy == "deepspeed" and state.__dict__["_mixed_precision"] == "fp8",
            "mixed_precision='fp8' does not work with DeepSpeed: shard with an fsdp_plugin of "
            "version 2",
        ),
        (
            recipe and precision != "fp8",
            f"kwargs_handlers contains {type(recipe).__name__}, which needs mixed_precision='fp8' "
            f"instead of {of_precision}",
        ),
        (
            precision == "bf16" and not devices.supports_bf16(device),
            f"{of_precision}: this {device} device does not support bfloat16; use fp16 or no",
        ),
        (
            master and ("strategy" in origins or strategy in ("deepspeed", "fsdp1", "xla")),
            f"{masters}, but strategy {strategy!r} manages its parameters or master weights "
            "itself: remove one of them, or shard with fsdp_version=2",
        ),
        (
            master and precision != "bf16",
            f"{masters}, which needs mixed_precision='bf16'. With {of_precision} there are no bf16 parameters",
        ),
        (
            offload and strategy not in ("single", "ddp"),
            f"{offloads}, which is for one process and DDP; this run uses {strategy}. FSDP and "
            "DeepSpeed have their own options: cpu_offload of the fsdp_plugin, "
            "offload_optimizer_device of the deepspeed_plugin",
        ),
        (offload and master, f"{offloads} and MasterWeightsKwargs: pass only one"),
        (
            strategy == "deepspeed" and request.non_finite != "ignore",
            f"non_finite={request.non_finite!r}: DeepSpeed's engine steps inside the backward "
            "pass. Remove non_finite: fp16 skips such steps itself, and so does bf16 with "
            "check_grad_overflow=true in its section of the config",
        ),
        (
            request.precision_policy
            and (strategy not in ("single", "ddp", "fsdp2") or splits or master),
            "precision_policy works on one process, with DDP and with FSDP2, but not with "
            f"tp_size or MasterWeightsKwargs; this run uses {strategy}: remove one of them",
        ),
    ]
    backend = state.dynamo_plugin.backend
    requested = {}
    if strategy == "pipeline":
        requested["pipeline"] = "pp_size"
    if backend is not DynamoBackend.NO:
        requested["compile"] = f"dynamo_backend={backend.value!r}"
    for transform in transforms:
        for kind in getattr(transform, "excludes", ()):
            option = requested.get(kind)
            message = f"{type(transform).__name__} does not work with {option}: remove one of them"
            refused.append((option, message))
    for applies, message in refused:
        if applies:
            raise ConfigurationError(message)


def _fp8_backend(handlers: Handlers) -> tuple[FP8BackendType, Any]:
    """(library, recipe) of fp8: of the recipe that is given, else ACCELERATE_FP8_BACKEND, else what is installed."""
    recipes = [
        (FP8BackendType.AO, handlers.ao),
        (FP8BackendType.TE, handlers.te),
        (FP8BackendType.MSAMP, handlers.msamp),
    ]
    if handlers.fp8 is not None:
        recipes.append((FP8BackendType(str(handlers.fp8.backend)), handlers.fp8))
    requested = [(backend, recipe) for backend, recipe in recipes if recipe is not None]
    if len(requested) > 1:
        words = " and ".join(backend.value for backend, _ in requested)
        raise ConfigurationError(f"kwargs_handlers contains recipes for {words}: pass only one")
    if requested:
        return requested[0]
    word = env.get("ACCELERATE_FP8_BACKEND")
    if word is not None:
        if word.upper() not in ("AO", "TE", "MSAMP"):
            raise ConfigurationError(f"ACCELERATE_FP8_BACKEND={word!r}: use AO, TE or MSAMP")
        return FP8BackendType(word.upper()), None
    for package, backend in (
        ("transformer_engine", FP8BackendType.TE),
        ("torchao", FP8BackendType.AO),
    ):
        if is_available(package):
            return backend, None
    raise ConfigurationError(
        "mixed_precision='fp8' needs a library: pip install torchao (or accelerate[fp8])"
    )


def _choose_strategy(
    request: Request,
    state: AcceleratorState,
    plugins: dict[str, Any],
    handlers: Handlers,
    origins: dict[str, str],
) -> tuple[Any, dict[str, Any]]:
    """(name or callable, arguments) of the strategy that runs the requested layout."""
    world, parallelism = state.num_processes, plugins.get("parallelism_config")
    arguments: dict[str, Any] = {}
    requested = request.strategy or env.get("ACCELERATE_STRATEGY")
    if requested is not None:
        origins["strategy"] = _origin(request.strategy, "ACCELERATE_STRATEGY")
        if plugins:
            raise ConfigurationError(
                f"strategy={requested!r} ({origins['strategy']}) and {next(iter(plugins))} were "
                "both passed: pass only one"
            )
        name = requested
    elif "deepspeed_plugin" in plugins:
        if parallelism is not None:
            check_deepspeed_layout(world, parallelism)
        name = "deepspeed"
    elif state.device.type == "xla" and not plugins:
        name = "xla"
    else:
        name, arguments = choose_strategy(world, parallelism, plugins.get("fsdp_plugin"))
    return name, {"options": handlers.ddp} if name in ("ddp", "xla") else arguments


def _transforms(request: Request, origins: dict[str, str]) -> tuple[Any, ...]:
    requested = request.transforms
    if requested is None:
        text = env.get("ACCELERATE_TRANSFORMS") or ""
        requested = [name.strip() for name in text.split(",") if name.strip()]
    origins["transforms"] = _origin(request.transforms, "ACCELERATE_TRANSFORMS")
    return tuple(transform_class(item)() if isinstance(item, str) else item for item in requested)
