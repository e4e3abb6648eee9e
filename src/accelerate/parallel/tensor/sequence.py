# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism beside tensor parallelism: between split layers each rank keeps its part of the tokens.

Norms and the residual stream are computed once instead of on every rank, and an all-reduce becomes a reduce-scatter
and an all-gather of the same bytes. Source: Korthikanti et al., Reducing Activation Recomputation (2022).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from ...core.errors import PrepareError
from . import styles as kinds
from .plan import Styles


def along_sequence(model: nn.Module, styles: Styles) -> Styles:
    """A plan of split layers, with what lies between them sharded along the sequence.

    The stream is split before the first block of each list of blocks, and whole again after the last one or the norm
    that follows. Raises PrepareError where the model has no such list, or a block has a part that is no norm.
    """
    modules = dict(model.named_modules())
    rows = [name for name, style in styles.items() if _is_row(modules[name], style)]
    lists = _block_lists(modules, rows)
    outside = [name for name in rows if not any(name.startswith(f"{blocks}.") for blocks in lists)]
    if outside or not lists:
        raise PrepareError(
            f"sequence_parallel=True: {', '.join(outside[:3]) or type(model).__name__} stands in no list of blocks "
            "(a ModuleList whose entries are all split), so where the sequence is to be split cannot be told. Give a "
            "plan with the words sequence_split, sequence_parallel, rowwise_sequence and sequence_gather."
        )
    found = dict(styles)
    for name in rows:
        if not isinstance(styles[name], kinds.Rows):
            raise PrepareError(f"sequence_parallel=True: say 'rowwise' at {name} instead of a ParallelStyle object")
        found[name] = kinds.Rows(along_sequence=True)
    for name in lists:
        width = _width(modules, styles, name)
        for norm in _norms(name, modules, styles, width):
            found[norm] = kinds.AlongSequence()
        keys = [f"{name}.{key}" for key, _ in modules[name].named_children()]
        found[keys[0]] = kinds.SequenceEntry()
        after = _norm_after(name, modules, styles, width)
        found[after or keys[-1]] = kinds.AlongSequence(gather=True) if after else _last(len(keys) == 1)
    return found


def _last(also_first: bool) -> ParallelStyle:
    return kinds.Both(kinds.SequenceEntry(), kinds.SequenceExit()) if also_first else kinds.SequenceExit()


def _is_row(module: nn.Module, style: object) -> bool:
    return isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear)


def _block_lists(modules: dict[str, nn.Module], rows: list[str]) -> list[str]:
    """The outermost lists of which every entry holds a layer that is split by rows."""
    found: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        entries = [f"{name}.{key}." for key, _ in module.named_children()]
        if entries and all(any(row.startswith(entry) for row in rows) for entry in entries):
            found.append(name)
    return found


def _width(modules: dict[str, nn.Module], styles: Styles, blocks: str) -> int:
    """The features of the residual stream: what the rows of the blocks give."""
    rows = [name for name, style in styles.items() if _is_row(modules[name], style) and name.startswith(f"{blocks}.")]
    return int(modules[rows[0]].out_features)  # type: ignore[arg-type]


def _norms(blocks: str, modules: dict[str, nn.Module], styles: Styles, width: int) -> list[str]:
    """The modules in a list of blocks that have parameters and are not split: norms of the stream, or an error."""
    found = []
    for name, module in modules.items():
        if not name.startswith(f"{blocks}.") or name in styles:
            continue
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if not _is_norm(module, width):
            raise PrepareError(
                f"sequence_parallel=True: {name} ({type(module).__name__}) is neither split nor a norm of the "
                f"{width} features of the stream, so how it works on a part of the sequence is not known"
            )
        found.append(name)
    return found


def _is_norm(module: nn.Module, width: int) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.ndim == 1 and parameter.numel() == width for parameter in own)


def _norm_after(blocks: str, modules: dict[str, nn.Module], styles: Styles, width: int) -> str | None:
    """The norm that stands after a list of blocks in the module that holds the list."""
    parent, _, key = blocks.rpartition(".")
    names = [child for child, _ in modules[parent].named_children()]
    for child in names[names.index(key) + 1 :]:
        name = f"{parent}.{child}" if parent else child
        if name not in styles and _is_norm(modules[name], width):
            return name
    return None
