# SPDX-License-Identifier: Apache-2.0
"""Random numbers of split layers: between them each rank draws its own, everywhere else all ranks draw alike.

A region goes from a layer whose outputs are parts to the next one that reads parts; where the sequence is split, each
block of the stream is one. Its seed is drawn from the stream around it, which stands still meanwhile: what computes
again, or resumes, draws the same. Source: Megatron-LM's generators of model-parallel regions.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, _random
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from ...core import devices
from ...core.errors import PrepareError
from . import styles as kinds
from .dropout import draws

Modules = dict[str, nn.Module]
Styles = dict[str, ParallelStyle]

# The upper half of a region's seed. The CPU's generator takes the lower half alone.
_MARK = 0x5EED7A9E


class RankStream:
    """One rank's own stream of random numbers, on the device that computes.

    What the host draws beside an accelerator decides what is computed (which layers are left out): it stays alike.
    """

    def __init__(self, rank: int, device_type: str) -> None:
        self._rank = rank
        self._source: Any = torch if device_type == "cpu" else devices.module_of(device_type)
        # For one device: torch.manual_seed seeds them all.
        self._start = (torch.default_generator if device_type == "cpu" else self._source).manual_seed
        self._drawn = torch.empty((), device=device_type)
        self._kept: tuple[int, torch.Tensor] | None = None
        why = "random numbers between split layers: dropout under tp_size breaks graphs"
        self.enter = torch.compiler.disable(self._enter, reason=why)
        self.leave = torch.compiler.disable(self._leave, reason=why)

    def _enter(self) -> None:
        """From here on this rank draws its own numbers; within a region nothing changes."""
        if self._source.initial_seed() >> 32 == _MARK:
            return
        # The next region's seed is another one. Nothing waits for the device: its generator's state is the host's.
        self._drawn.uniform_()
        state = self._source.get_rng_state()
        seed = _MARK << 32 | zlib.crc32(state.numpy(), self._rank)
        self._kept = seed, state
        self._start(seed)

    def _leave(self) -> None:
        """Go on with the stream that all ranks share, where it was."""
        # Asked of the generator: whoever restored its state (activation checkpointing, an exception) has left already.
        seed = self._source.initial_seed()
        if seed >> 32 != _MARK:
            return
        if self._kept is None or self._kept[0] != seed:
            raise PrepareError(
                "activation checkpointing computes a layer split by rows again, without those split by columns before "
                "it: the random numbers behind it cannot be had again. Checkpoint all of them, or what is between them"
            )
        self._source.set_rng_state(self._kept[1])


def draw_apart(model: nn.Module, styles: Styles, ranks: DeviceMesh) -> None:
    """Have each rank draw its own numbers where it holds parts. A model that draws none is left as it is."""
    if any(draws(module) for module in model.modules()):
        add_regions(model, styles, RankStream(ranks.get_local_rank(), ranks.device_type))
        if ranks.device_type != "cpu" and _random._rng_tracker is None:
            # At its first random operation DTensor would give all ranks of the run the state of one.
            _random._rng_tracker = _random.OffsetBasedRNGTracker(ranks, run_state_sync=False)


@dataclass
class RandomRegion:
    """The modules behind whose forward numbers are drawn apart, and those before whose forward no longer.

    With the forward of `owner` it ends in any case: after an exception, and where a recomputation stops early.
    """

    owner: nn.Module
    opened: list[nn.Module] = field(default_factory=list)
    closed: list[nn.Module] = field(default_factory=list)


def add_regions(model: nn.Module, styles: Styles, stream: RankStream) -> None:
    """Put a stream's regions around what lies between the layers of a plan and draws numbers in training."""
    modules = dict(model.named_modules())
    blocks = list(dict.fromkeys(_blocks_along_sequence(modules, styles)))
    regions = [RandomRegion(block) for block in blocks]
    inside = {id(module) for block in blocks for module in block.modules()}
    regions += [region for region in _between_layers(modules, styles) if id(region.owner) not in inside]
    for region in regions:
        _add(region, stream)


def _add(region: RandomRegion, stream: RankStream) -> None:
    drawing = [module for module in region.owner.modules() if draws(module)]
    if not drawing:
        return

    def enter(*_: Any) -> None:
        for module in drawing:
            if module.training:
                stream.enter()
                return

    def leave(*_: Any) -> None:
        for module in drawing:
            if module.training:
                stream.leave()
                return

    if not region.opened:
        region.owner.register_forward_pre_hook(enter)
    for module in region.opened:
        module.register_forward_hook(enter)
    for module in region.closed:
        module.register_forward_pre_hook(leave)
    region.owner.register_forward_hook(leave, always_call=True)


def _between_layers(modules: Modules, styles: Styles) -> list[RandomRegion]:
    """The regions between layers split by columns and layers split by rows, of one part of the model each.

    Columns that no row follows (an output layer whose logits stay split) have none.
    """
    rows = [name for name, style in styles.items() if _reads_parts(style) and isinstance(modules[name], nn.Linear)]
    found: dict[str, RandomRegion] = {}
    for name, style in styles.items():
        if not _gives_parts(style):
            continue
        owner = next((up for up in _outwards(name) if any(_pair(up, name, row, modules) for row in rows)), None)
        if owner is not None:
            closed = [modules[row] for row in rows if _is_inside(row, owner)]
            found.setdefault(owner, RandomRegion(modules[owner], [], closed)).opened.append(modules[name])
    return list(found.values())


def _gives_parts(style: ParallelStyle) -> bool:
    return isinstance(style, ColwiseParallel) and style.use_local_output and isinstance(style.output_layouts[0], Shard)


def _reads_parts(style: ParallelStyle) -> bool:
    return isinstance(style, RowwiseParallel) and isinstance(style.input_layouts[0], Shard)


def _outwards(name: str) -> Iterator[str]:
    """The modules around a module, the model's own name ("") last."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _pair(owner: str, column: str, row: str, modules: Modules) -> bool:
    """Whether a module holds both layers, and no list of blocks in it holds the row alone."""
    if isinstance(modules[owner], nn.ModuleList) or not _is_inside(row, owner):
        return False
    between = [up for up in _outwards(row) if len(up) > len(owner)]
    return all(_is_inside(column, up) for up in between if isinstance(modules[up], nn.ModuleList))


def _blocks_along_sequence(modules: Modules, styles: Styles) -> Iterator[nn.Module]:
    """The modules that the stream goes through while it is split along the sequence."""
    for name, style in styles.items():
        if not any(isinstance(part, kinds.SequenceEntry) for part in _parts(style)):
            continue
        parent = name.rpartition(".")[0]
        siblings = [f"{parent}.{key}" if parent else key for key, _ in modules[parent].named_children()]
        for sibling in siblings[siblings.index(name) :]:
            module = modules[sibling]
            # A list is no callable: its entries are what runs.
            yield from module if isinstance(module, nn.ModuleList) else (module,)
            if any(_ends_stream(part) for part in _parts(styles.get(sibling))):
                break


def _parts(style: ParallelStyle | None) -> Sequence[ParallelStyle | None]:
    return style.styles if isinstance(style, kinds.Both) else (style,)


def _ends_stream(style: ParallelStyle | None) -> bool:
    return isinstance(style, kinds.SequenceExit) or (isinstance(style, kinds.AlongSequence) and style.gather)
