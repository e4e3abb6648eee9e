# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: linear layers split over ranks by a plan, the model's own, a user's or an inferred one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ..core.errors import ConfigurationError, PrepareError
from ..parallelism_config import ParallelismConfig
from ..precision.base import Precision
from ..runtime import mesh
from . import materialize
from .remap import ParameterPlaces
from .sharded import ShardedStrategy

Plan = Mapping[str, "str | ParallelStyle"]

# The words of a plan. Columns split the outputs, rows the inputs; a pair of them meets in one all-reduce.
STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
}

# Names that the linear layers of attention and MLP blocks usually have: (columns, row) of one parent.
_PAIRS: tuple[tuple[frozenset[str], str], ...] = (
    (frozenset({"q_proj", "k_proj", "v_proj"}), "o_proj"),
    (frozenset({"q_proj", "k_proj", "v_proj"}), "out_proj"),
    (frozenset({"wq", "wk", "wv"}), "wo"),
    (frozenset({"gate_proj", "up_proj"}), "down_proj"),
    (frozenset({"up_proj"}), "down_proj"),
    (frozenset({"w1", "w3"}), "w2"),
    (frozenset({"fc1"}), "fc2"),
    (frozenset({"up"}), "down"),
)
# Counts of heads that an attention module keeps; a rank computes its share of them.
_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "n_kv_heads")


class TensorParallel(ShardedStrategy):
    """Every rank computes its part of each split layer, on the same data. Beside FSDP, FSDP's strategy drives."""

    name = "tensor parallel"

    def __init__(
        self, device: torch.device, precision: Precision, parallelism: ParallelismConfig, plan: Plan | None = None
    ) -> None:
        super().__init__(device, precision, parallelism)
        if self.mesh is None or list(self.mesh.mesh_dim_names or ()) != ["tp"]:
            raise ConfigurationError(
                f"{mesh.describe(parallelism)}: tensor parallelism alone uses every rank for tp; with dp sizes FSDP2 "
                "drives, which needs an fsdp_plugin"
            )
        self.plan = plan

    def wrap_model(self, model: nn.Module) -> nn.Module:
        materialize.make_equal((tensor for _, tensor in materialize.named_tensors(model)), self.device, None)
        split_model(model, self.mesh["tp"], self.plan)  # type: ignore[index]
        return model


def split_model(model: nn.Module, ranks: DeviceMesh, plan: Plan | None = None) -> dict[str, str]:
    """Split the layers of a model in place over `ranks`, whose weights must be equal; name -> what became of it.

    `plan` maps names, in which `*` stands for one part, to words of STYLES or torch's ParallelStyle objects. Without
    one the model's own (`_tp_plan`) is taken, else one is inferred. A model that was loaded split is left as it is.
    Raises PrepareError, before anything is split, for a plan or a size that does not fit the model.
    """
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return {}
    plan = plan or getattr(model, "_tp_plan", None) or infer_plan(model)
    styles = match_plan(model, plan)
    modules = dict(model.named_modules())
    for name, style in styles.items():
        _check_division(name, modules[name], style, ranks.size())
    parents = {name.rpartition(".")[0] for name, style in styles.items() if isinstance(style, ColwiseParallel)}
    heads = [(modules[parent], _shares_of_heads(parent, modules[parent], ranks.size())) for parent in sorted(parents)]
    places = ParameterPlaces(model)
    for name, style in styles.items():
        # Every rank cuts its part out of the weights it has: they are equal, nothing has to be sent.
        style.src_data_rank = None
        parallelize_module(modules[name], ranks, style, src_data_rank=None)
    for module, shares in heads:
        for key, share in shares.items():
            setattr(module, key, share)
    _retie(places)
    return {name: type(style).__name__ for name, style in styles.items()}


def _retie(places: ParameterPlaces) -> None:
    """Have modules that shared a parameter share what stands in its place."""
    for owners in places.shared():
        present = [module._parameters[name] for module, name in owners]
        first = present[0]
        if any(_layout(parameter) != _layout(first) for parameter in present):
            names = ", ".join(sorted({f"{type(module).__name__}.{name}" for module, name in owners}))
            raise PrepareError(
                f"the tensor-parallel plan splits a tied parameter ({names}) in two ways. Split both ends alike "
                "(embedding_rowwise and colwise_gather_output), or neither."
            )
        for module, name in owners:
            module._parameters[name] = first


def _layout(parameter: Any) -> Any:
    return parameter.placements if isinstance(parameter, DTensor) else None


def match_plan(model: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    """Module name -> style, in the order of the model. The first pattern that fits a name counts.

    Raises PrepareError for a pattern that fits no module, or an unknown word.
    """
    patterns = {pattern: re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")) for pattern in plan}
    unused = set(plan)
    found: dict[str, ParallelStyle] = {}
    for name, _ in model.named_modules():
        for pattern, expression in patterns.items():
            if expression.fullmatch(name):
                unused.discard(pattern)
                found.setdefault(name, _style(pattern, plan[pattern]))
    if unused:
        raise PrepareError(
            f"the tensor-parallel plan names modules that {type(model).__name__} does not have: "
            f"{', '.join(sorted(unused))}"
        )
    return found


def _style(pattern: str, asked: str | ParallelStyle) -> ParallelStyle:
    if isinstance(asked, ParallelStyle):
        return asked
    if asked not in STYLES:
        raise PrepareError(f"the tensor-parallel plan asks for {asked!r} at {pattern}; known are {list(STYLES)}")
    return STYLES[asked]()


def infer_plan(model: nn.Module) -> dict[str, str]:
    """A plan for attention and MLP blocks whose linear layers have usual names.

    Raises PrepareError where no block is recognised, or one has parts whose place in the split is not known.
    """
    plan: dict[str, str] = {}
    for name, parent in model.named_modules():
        children = dict(parent.named_children())
        linear = {key for key, child in children.items() if isinstance(child, nn.Linear)}
        for columns, row in _PAIRS:
            if not columns <= linear or row not in linear:
                continue
            strange = [
                key
                for key, child in children.items()
                if key not in columns | {row} and any(True for _ in child.parameters())
            ]
            if strange:
                raise PrepareError(
                    f"no tensor-parallel plan can be inferred for {name}: how {', '.join(strange)} takes part in the "
                    "split is not known. Give a plan."
                )
            prefix = f"{name}." if name else ""
            plan.update({f"{prefix}{key}": "colwise" for key in sorted(columns)})
            plan[f"{prefix}{row}"] = "rowwise"
            break
    if not plan:
        raise PrepareError(
            f"no tensor-parallel plan can be inferred for {type(model).__name__}: no module of it has linear layers "
            "named like an attention or MLP block (q_proj, k_proj, v_proj, o_proj; up_proj, down_proj). Give a plan."
        )
    return plan


def _check_division(name: str, module: nn.Module, style: ParallelStyle, size: int) -> None:
    width = {ColwiseParallel: "out_features", RowwiseParallel: "in_features"}.get(type(style))
    found = getattr(module, width, None) if width else None
    if found is not None and found % size:
        raise PrepareError(f"tp_size={size} does not divide {width}={found} of {name}")


def _shares_of_heads(name: str, module: nn.Module, size: int) -> dict[str, int]:
    """Attribute -> this rank's number of heads, for an attention module that counts them."""
    shares = {}
    for key in _HEADS:
        count = getattr(module, key, None)
        if not isinstance(count, int) or isinstance(count, bool):
            continue
        if count % size:
            raise PrepareError(f"tp_size={size} does not divide {key}={count} of {name}: a head is never split")
        shares[key] = count // size
    return shares
