# SPDX-License-Identifier: Apache-2.0
"""Models that are sharded when they are given to `prepare`: by `fully_shard`, `parallelize_module` or transformers.

Their meshes and placements stay as they are. What torch does not do by itself is done around them: the shards of the
data, gradients that no backward reduces, clipping, full and sharded state, and steps that need entire tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ...core.errors import PrepareError
from ...core.modules import class_name, direct_parameters
from ...parallelism_config import ParallelismConfig
from ...precision.base import Precision
from ...torch_internals import dtensor
from ...torch_internals.fsdp2 import shard_groups
from .. import materialize
from ..base import Bundle
from ..fsdp.strategy import Fsdp2Model
from ..gradients import GradientReducer
from ..prepared import PreparedModel
from ..sharded import ShardedStrategy
from ..tensor import plan as tensor_plan
from . import requirements
from .layout import Averages, find_layout, reducers_of
from .sharing import Description, Ranks, tensor_parallel_mesh


class AdoptedModel(Fsdp2Model):
    """A model that was sharded before `prepare`.

    Attributes:
        replicated: the ids of the parameters that are not shards and that it had when it was prepared.
    """

    replicated: frozenset[int] = frozenset()

    def new_parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters that the model did not have when it was prepared."""
        return {
            name: p for name, p in super().new_parameters().items() if id(p) not in self.replicated
        }


class Adopted(ShardedStrategy):
    """The strategy of models that are sharded when they arrive.

    Args:
        device: that of the run.
        precision: that of the run.
        models: the first models of the run that are sharded. Every rank makes this object.
        gather: returns what each rank knows of its models, from what this one does.
    """

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        models: Sequence[nn.Module],
        gather: Callable[[Description], list[Description]] = materialize.from_all,
    ) -> None:
        self._gather = gather
        layout, self._averages = find_layout(models, gather=gather)
        self.shards: tuple[Ranks, ...] = layout.shards
        sizes = ParallelismConfig(
            dp_replicate_size=1, dp_shard_size=len(self.shards), tp_size=len(self.shards[0]),
            cp_size=1, sp_size=1, pp_size=1,
        )  # fmt: skip
        sizes.device_mesh = _mesh(self.shards, device)
        super().__init__(device, precision, sizes)
        self.gradient_group: dist.ProcessGroup | None = self.data_group
        self.name: str = _name_of(self._averages)

    @property
    def data_shard(self) -> tuple[int, int]:
        """The ranks of a tensor-parallel dimension share one."""
        rank = dist.get_rank()
        index = next(index for index, ranks in enumerate(self.shards) if rank in ranks)
        return index, len(self.shards)

    def prepare(self, bundle: Bundle) -> list[PreparedModel]:
        """Take sharded models as they are. Plain tensors are replicated: they become equal on all ranks."""
        if bundle.models:
            # They have to read the data as the models before them.
            same_batch = self.shards[self.data_shard[0]]
            layout, self._averages = find_layout(bundle.models, same_batch, self._gather)
            if layout.shards != self.shards:
                raise PrepareError(
                    f"with {class_name(bundle.models[0])} the ranks that read the same samples "
                    f"are {list(layout.shards)}, but without it they are {list(self.shards)}. "
                    "Pass all models to one call of prepare, before the loaders"
                )
        for model in bundle.models:
            requirements.check_device(model, self.device)
            tensors = [tensor for _, tensor in materialize.named_tensors(model)]
            materialize.make_equal(tensors, self.device, None)
        bundle.place = [False] * len(bundle.models)
        return super().prepare(bundle)

    def prepare_model(self, model: nn.Module, evaluation: bool = False) -> AdoptedModel:
        """Everything that is done to one model, in its order; its shards stay as they are."""
        if not self._casts_already(model):
            model = self.precision.wrap_forward(model)
        model = self.apply_transforms(model, before_layout=True)
        reducers: list[GradientReducer] = []
        replicated: frozenset[int] = frozenset()
        if not evaluation:
            self.cast_parameters(model)
            _sum_once(model)
            # What the model's own backward leaves unreduced.
            reducers = reducers_of(model, self._averages, self.data_group)
            # Where all ranks read the same samples, no reducer has them.
            plain = (p for p in model.parameters() if not isinstance(p, DTensor))
            replicated = frozenset(map(id, plain))
        self.precision.after_layout(model)
        # Compilation is the last of these.
        model = self.apply_transforms(model, before_layout=False)
        prepared = self.as_prepared(model)
        prepared.reducers = reducers
        prepared.replicated = replicated
        return prepared

    def _casts_already(self, model: nn.Module) -> bool:
        """Whether a policy of the model's FSDP2 units casts, so that autocast has nothing to do."""
        return bool(computes_in(model)) and hasattr(self.precision, "dtype")

    def as_prepared(self, module: nn.Module) -> AdoptedModel:
        """A prepared model that saves shards where FSDP2 shards it."""
        is_fsdp = any(True for _ in shard_groups(module))
        # torch.distributed.checkpoint takes a rank's shard for one block.
        saves_shards = is_fsdp and not any(
            dtensor.is_packed(parameter) for parameter in module.parameters()
        )
        return AdoptedModel(module, self.precision, self.device, saves_shards=saves_shards)


def _sum_once(model: nn.Module) -> None:
    """Let transformers sum each gradient of a replicated parameter that is partial once, also when they accumulate.

    Its layers with the style `replicated_with_grad_allreduce` sum the accumulated gradient after every backward
    (transformers 5.23), which has the sums of earlier ones. Those are divided before, so that the sum restores them.
    """
    mesh = tensor_parallel_mesh(model)
    styles: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    summed = {
        pattern: word
        for pattern, word in styles.items()
        if word == "replicated_with_grad_allreduce"
    }
    if mesh is None or not summed:
        return
    size = mesh.size()

    def divide(parameter: nn.Parameter) -> Callable[[torch.Tensor], None]:
        def before(_: torch.Tensor) -> None:
            if parameter.grad is not None:
                parameter.grad.div_(size)

        return before

    for name in tensor_plan.match_plan(model, summed, strict=False):
        for parameter in direct_parameters(model.get_submodule(name)).values():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_hook(divide(parameter))


def computes_in(model: nn.Module) -> set[torch.dtype]:
    """The dtypes to which policies of FSDP2 units cast parameters for the computation."""
    dtypes: set[torch.dtype] = set()
    for _, group, _ in shard_groups(model):
        dtype = group.mp_policy.param_dtype
        if dtype not in (None, torch.float32, torch.float64):
            dtypes.add(dtype)
    return dtypes


def _mesh(shards: tuple[Ranks, ...], device: torch.device) -> DeviceMesh | None:
    """The mesh of the run: `dp` over the shards of the data, `tp` over the ranks that read one."""
    sizes = {"dp": len(shards), "tp": len(shards[0])}
    names = tuple(name for name, size in sizes.items() if size > 1)
    if not names:
        return None
    ranks = torch.tensor(shards, dtype=torch.int).reshape([sizes[name] for name in names])
    return DeviceMesh(device.type, ranks, mesh_dim_names=names)


def _name_of(sharings: Averages) -> str:
    """The name of the strategy, with the sizes of the meshes."""
    found = set()
    for sharing in sharings:
        pieces = {"fsdp": sharing.averaged, "split": sharing.split}
        sizes = {
            word: "x".join(str(len(ranks)) for ranks in groups)
            for word, groups in pieces.items()
            if groups
        }
        found.add(" ".join(f"{word} {size}" for word, size in sizes.items()))
    return f"sharded before prepare ({', '.join(sorted(found - {''})) or 'one rank'})"
