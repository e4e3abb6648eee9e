# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a run are laid out: sizes of the mesh's dimensions, their names and their validation."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .config.parallel import (
    DeepSpeedSequenceParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from .core import env
from .core.errors import ConfigurationError
from .core.messages import warn
from .core.options import options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Outermost first: ranks of the innermost dimensions sit next to each other, where communication is densest.
MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
_SIZES = ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp")
_HANDLERS: dict[str, type] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
    "pp": PipelineParallelConfig,
}


def _enabled(name: str) -> Any:
    def is_enabled(self: ParallelismConfig) -> bool:
        return self.sizes[name] > 1

    return property(is_enabled, doc=f"Whether `{name}_size` is greater than 1.")


@dataclass(repr=False)
class ParallelismConfig:
    """Sizes of the dimensions of parallelism; their product is the number of processes.

    A size that is None takes PARALLELISM_CONFIG_<NAME>_SIZE, or 1. Ranks that differ in dp_replicate or dp_shard read
    different samples; ranks that differ only in tp, cp, sp or pp read the same samples.

    Fields:
        dp_replicate_size: number of replicas of the model. dp_shard_size: number of ranks over which a replica is
            sharded.
        tp_size: number of ranks over which a matrix is split. cp_size, sp_size: number of ranks over which a sequence
            is split (ring, all-to-all).
        pp_size: number of ranks over which the layers are split.
        tp_handler, cp_handler, sp_handler, pp_handler: options, with defaults where the dimension is in use.

    Raises ConfigurationError (a ValueError) for sizes that cannot be combined.

    Example:
        config = ParallelismConfig(dp_shard_size=4, tp_size=2)  # 8 processes
        accelerator = Accelerator(parallelism_config=config)
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: PipelineParallelConfig | None = None

    def __post_init__(self) -> None:
        self._device_mesh: DeviceMesh | None = None
        # Dimension -> the variable that its size was read from.
        self._variables: dict[str, str] = {}
        for name in _SIZES:
            self._read_size(name)
        for name in ("cp", "sp"):
            self._read_backend(name)
        # Packages add dimensions of their own, whose ranks read the same samples.
        self._sizes: dict[str, int] = {name: getattr(self, f"{name}_size") for name in MESH_ORDER}
        for name, kind in _HANDLERS.items():
            if not self._take_handler(name, kind):
                warn(
                    f"{name}_handler has no effect with {name}_size=1: set {name}_size above 1, "
                    "or remove it"
                )
        if self.cp_enabled and self.sp_enabled:
            raise ConfigurationError(
                "Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive. Got "
                f"cp_size={self.cp_size} and sp_size={self.sp_size}. Please set either cp_size=1 or sp_size=1."
            )

    def _take_handler(self, name: str, kind: type) -> bool:
        """Check a dimension's handler, or create it if the size needs one. False: one is given without effect."""
        attribute = f"{name}_handler"
        handler = getattr(self, attribute)
        if handler is None:
            if self.sizes[name] > 1:
                setattr(self, attribute, kind())
            return True
        if not isinstance(handler, kind):
            raise ConfigurationError(f"{attribute} takes a {kind.__name__}, not {type(handler)}")
        return self.sizes[name] > 1

    def _read_size(self, name: str) -> None:
        attribute = f"{name}_size"
        size = getattr(self, attribute)
        origin = attribute
        if size is None:
            origin = f"PARALLELISM_CONFIG_{name.upper()}_SIZE"
            size = env.get_int(origin)
            if size is None:
                size = 1
            else:
                self._variables[name] = origin
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigurationError(
                f"{origin} must be an integer of at least 1, but got {origin}={size!r}"
            )
        setattr(self, attribute, size)

    def _read_backend(self, name: str) -> None:
        attribute = f"{name}_backend"
        row = options()[f"parallelism_config_{attribute}"]
        backend = getattr(self, attribute)
        if backend is None:
            backend = env.get(row.variable, row.default)
        if backend not in row.choices:
            raise ConfigurationError(
                f"{attribute} must be one of {list(row.choices)}, but got {backend}"
            )
        setattr(self, attribute, backend)

    def __repr__(self) -> str:
        fields = [f"{name}_size={size}" for name, size in self.sizes.items()]
        fields.append(f"total_size={self.total_size}")
        fields += [f"{name}_handler={getattr(self, f'{name}_handler')}" for name in _HANDLERS]
        return f"ParallelismConfig({', '.join(fields)})"

    def to_json(self) -> dict[str, Any]:
        """The configuration as plain values, for a log or a file."""
        return json.loads(json.dumps(asdict(self), default=str))  # type: ignore[no-any-return]

    @property
    def sizes(self) -> dict[str, int]:
        """Dimension -> size, of all dimensions, outermost first."""
        return {name: getattr(self, f"{name}_size") for name in MESH_ORDER}

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Dimension -> size of the mesh, outermost first. Those that `_get_mesh` leaves out are innermost."""
        names, sizes = self._get_mesh() or ((), ())
        shape = dict(zip(names, sizes, strict=True))
        for name, size in self._sizes.items():
            if name not in MESH_ORDER and name not in shape and size > 1:
                shape[name] = size
        return shape

    def _set_size(self, parallelism: str, size: int) -> None:
        """Set the size of a dimension, also of one that another package adds."""
        self._sizes[parallelism] = size
        setattr(self, f"{parallelism}_size", size)

    @property
    def total_size(self) -> int:
        """The product of all sizes: the number of processes."""
        return math.prod(self.sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks that read different samples."""
        return self.sizes["dp_replicate"] * self.sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """The number of ranks that read the same samples."""
        return self.total_size // self.data_parallel_size

    dp_replicate_enabled: ClassVar[Any] = _enabled("dp_replicate")
    dp_shard_enabled: ClassVar[Any] = _enabled("dp_shard")
    tp_enabled: ClassVar[Any] = _enabled("tp")
    cp_enabled: ClassVar[Any] = _enabled("cp")
    sp_enabled: ClassVar[Any] = _enabled("sp")
    pp_enabled: ClassVar[Any] = _enabled("pp")

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the dimensions of more than one rank: data-parallel ones, then the others."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_dim_names(self) -> list[str]:
        """Names of the data-parallel dimensions of more than one rank."""
        return self._active("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """Names of all other dimensions of more than one rank."""
        return self._active("tp", "cp", "sp", "pp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Dimensions over which FSDP shards: context-parallel ranks hold shards of the same copy."""
        return self._active("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Dimensions over which a loss is averaged."""
        return self._active("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """Names of the (flattened) mesh dimensions that FSDP is given: copies, then shards."""
        return self._active("dp_replicate") + ["dp_shard_cp"]

    def _active(self, *names: str) -> list[str]:
        sizes = self.sizes
        return [name for name in names if sizes[name] > 1]

    def validate(self, world_size: int) -> None:
        """Check that the product of the sizes is the number of processes.

        Args:
            world_size: the number of processes.

        Raises:
            ConfigurationError: it is not.
        """
        # Whether a package counts its own dimensions in `total_size` is up to it.
        if world_size not in (self.total_size, math.prod(self.mesh_shape.values())):
            origins = {name: f" ({variable})" for name, variable in self._variables.items()}
            factors = [
                f"{name}_size={size}{origins.get(name, '')}"
                for name, size in self.sizes.items()
                if size > 1
            ]
            product = " x ".join(factors) or "1"
            raise ConfigurationError(
                f"ParallelismConfig requests {product} = {self.total_size} processes, but {world_size} were started. "
                f"Start {self.total_size}, or change one of the sizes."
            )

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        """The names of the mesh's dimensions and their sizes, outermost first. Some packages replace it."""
        names = [name for name in MESH_ORDER if self.sizes[name] > 1]
        if self.dp_replicate_enabled and not self.dp_shard_cp_dim_names and self.non_dp_dim_names:
            # Copies of a tensor-parallel or pipelined model are FSDP's with shards of one rank.
            names.insert(names.index("dp_replicate") + 1, "dp_shard")
        if not names:
            return ()
        return tuple(names), tuple(self.sizes[name] for name in names)

    def _validate_accelerator(self, accelerator: Any) -> None:
        """Check the sizes against the processes of a run. Some packages replace it."""
        self.validate(accelerator.num_processes)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """The mesh of this layout over all ranks (None where no dimension is in use).

        Its dimensions are the active ones in the order of MESH_ORDER. Flattened ones are added where their dimensions
        exist: `dp` (its ranks see different samples), `dp_shard_cp` (FSDP shards over it), `dp_cp` (losses are
        averaged over it). Ranks that share a sequence, by cp or by sp, are among the last two.
        """
        shape = self.mesh_shape
        if not shape:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        from .torch_internals import device_mesh

        mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        for flat, inner in (
            ("dp", ("dp_replicate", "dp_shard")),
            ("dp_shard_cp", ("dp_shard", "cp", "sp")),
            ("dp_cp", ("dp_replicate", "dp_shard", "cp", "sp")),
        ):
            present = [name for name in inner if name in shape]
            if present:
                device_mesh.flatten(mesh[present], flat)  # type: ignore[index]
        return mesh

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The mesh, once it is built."""
        return self._device_mesh

    @device_mesh.setter
    def device_mesh(self, mesh: DeviceMesh | None) -> None:
        self._device_mesh = mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh of this layout. The first call builds it.

        Args:
            device_type: such as "cuda" or "cpu". Required at the first call.

        Returns:
            The mesh; None if no size is above 1.

        Raises:
            ConfigurationError: the first call has no `device_type`.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ConfigurationError(
                    "You need to pass a device_type e.g cuda to build the device mesh"
                )
            self.device_mesh = self.build_device_mesh(device_type)
        return self.device_mesh
