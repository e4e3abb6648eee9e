# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism in addition to tensor parallelism: between split layers, tokens are sharded over the ranks.

Norms and the residual stream are computed once instead of on every rank. Each all-reduce becomes a reduce-scatter and
an all-gather of the same bytes. Source: Korthikanti et al., Reducing Activation Recomputation (2022).
"""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from ...core.errors import PrepareError
from . import styles as kinds
from .plan import Styles


def along_sequence(model: nn.Module, styles: Styles) -> Styles:
    """A plan of split layers, with the residual stream between them sharded along the sequence.

    The stream is sharded before the first block of each list of blocks, and gathered after the last one or the norm
    that follows.

    Raises:
        PrepareError: where the model has no such list, or a block has an unsplit module that is not a norm.
    """
    modules = dict(model.named_modules())
    rows = [name for name, style in styles.items() if _is_row(modules[name], style)]
    lists = _block_lists(modules, rows)
    outside = [name for name in rows if not any(name.startswith(f"{blocks}.") for blocks in lists)]
    if outside or not lists:
        raise PrepareError(
            f"sequence_parallel=True: {', '.join(outside[:3]) or type(model).__name__} is in no list of blocks (a "
            "ModuleList whose entries are all split), so where to shard the sequence is not known. Give a "
            "plan with the words sequence_split, sequence_parallel, rowwise_sequence and sequence_gather."
        )
    found = dict(styles)
    for name in rows:
        style = styles[name]
        if not isinstance(style, kinds.Rowwise):
            raise PrepareError(f"sequence_parallel=True: give 'rowwise' at {name} instead of a ParallelStyle object")
        found[name] = kinds.Rowwise(style.full_input, along_sequence=True)
    for name in lists:
        width = _width(modules, styles, name)
        for norm in _norms(name, modules, styles, width):
            found[norm] = kinds.SequenceNorm()
        keys = [f"{name}.{key}" for key, _ in modules[name].named_children()]
        found[keys[0]] = kinds.SequenceEntry()
        after = _norm_after(name, modules, styles, width)
        found[after or keys[-1]] = kinds.SequenceNorm(gather=True) if after else _last(len(keys) == 1)
    return found


def _last(also_first: bool) -> ParallelStyle:
    return kinds.Chained(kinds.SequenceEntry(), kinds.SequenceExit()) if also_first else kinds.SequenceExit()


def _is_row(module: nn.Module, style: object) -> bool:
    return isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear)


def _block_lists(modules: dict[str, nn.Module], rows: list[str]) -> list[str]:
    """The outermost lists in which every entry contains a rowwise layer."""
    found: list[str] = []
    for name, module in modules.items():
        if not isinstance(module, nn.ModuleList) or any(name.startswith(f"{outer}.") for outer in found):
            continue
        entries = [f"{name}.{key}." for key, _ in module.named_children()]
        if entries and all(any(row.startswith(entry) for row in rows) for entry in entries):
            found.append(name)
    return found


def _width(modules: dict[str, nn.Module], styles: Styles, blocks: str) -> int:
    """The features of the residual stream: the outputs of the blocks' rowwise layers."""
    rows = [name for name, style in styles.items() if _is_row(modules[name], style) and name.startswith(f"{blocks}.")]
    return int(modules[rows[0]].out_features)  # type: ignore[arg-type]


def _norms(blocks: str, modules: dict[str, nn.Module], styles: Styles, width: int) -> list[str]:
    """The modules in a list of blocks that have parameters and are not split, which must be norms of the stream."""
    found = []
    for name, module in modules.items():
        if not name.startswith(f"{blocks}.") or name in styles:
            continue
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if not _is_norm(module, width):
            raise PrepareError(
                f"sequence_parallel=True: {name} ({type(module).__name__}) is neither split nor a norm of the "
                f"{width} features of the stream, so how it works on a shard of the sequence is not known"
            )
        found.append(name)
    return found


def _is_norm(module: nn.Module, width: int) -> bool:
    own = list(module.parameters(recurse=False))
    return bool(own) and all(parameter.ndim == 1 and parameter.numel() == width for parameter in own)


def _norm_after(blocks: str, modules: dict[str, nn.Module], styles: Styles, width: int) -> str | None:
    """The norm after a list of blocks, in the module that contains the list."""
    parent, _, key = blocks.rpartition(".")
    names = [child for child, _ in modules[parent].named_children()]
    for child in names[names.index(key) + 1 :]:
        name = f"{parent}.{child}" if parent else child
        if name not in styles and _is_norm(modules[name], width):
            return name
    return None
