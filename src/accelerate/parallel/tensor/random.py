# SPDX-License-Identifier: Apache-2.0
"""Random numbers under tensor parallelism: between split layers each rank draws its own, elsewhere all draw the same.

A region goes from a layer with sharded outputs to the next one with sharded inputs. Where the sequence is sharded,
each block of the stream is a region. Its seed is drawn from the stream around it, which is restored afterwards: a
recomputation or a resumed run draws the same numbers. Source: Megatron-LM's generators of model-parallel regions.
"""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, _random
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.modules.dropout import _DropoutNd

from ...core import devices
from ...core.errors import PrepareError
from ...core.imports import is_torch_version
from . import styles as kinds
from .plan import Styles, name_pattern

logger: logging.Logger = logging.getLogger(__name__)

Modules = dict[str, nn.Module]

# The upper half of a region's seed. The CPU's generator uses the lower half only.
_MARK = 0x5EED7A9E
# The modules that draw numbers of their rank.
_separated: WeakSet[nn.Module] = WeakSet()


def draws(module: nn.Module) -> bool:
    """Whether a module itself, without its children, draws random numbers in training.

    It does by its type, or by a positive rate: an attribute with "drop" in its name. A module that draws by a rate of
    its configuration, or without a rate, is named in `random_modules`.
    """
    if isinstance(module, _DropoutNd):
        return module.p > 0
    rates = [value for name, value in vars(module).items() if "drop" in name]
    return isinstance(module, nn.RReLU) or any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


class RankStream:
    """One rank's own stream of random numbers, on the device that computes.

    Next to an accelerator, the CPU's generator stays equal on all ranks: it decides what is computed (which layers are
    skipped).
    """

    def __init__(self, rank: int, device_type: str) -> None:
        self._rank = rank
        self._source: ModuleType = devices.generator_module(device_type)
        # Of one device: torch.manual_seed seeds all of them.
        self._seed = (torch.default_generator if device_type == "cpu" else self._source).manual_seed
        self._drawn = torch.empty((), device=device_type)
        self._entered: tuple[int, torch.Tensor] | None = None
        reason = "random numbers between split layers: dropout under tp_size breaks graphs"
        self.enter: Callable[[], None] = torch.compiler.disable(self._enter, reason=reason)
        self.leave: Callable[[], None] = torch.compiler.disable(self._leave, reason=reason)

    def _enter(self) -> None:
        """Draw this rank's own numbers from here on; inside of a region nothing changes."""
        if self._source.initial_seed() >> 32 == _MARK:
            return
        # A draw, so that the next region has another seed. The generator's state is on the host: nothing waits.
        self._drawn.uniform_()
        state = self._source.get_rng_state()
        seed = _MARK << 32 | zlib.crc32(state.numpy(), self._rank)
        self._entered = seed, state
        self._seed(seed)

    def _leave(self) -> None:
        """Continue the stream that all ranks share, where it was."""
        # Whatever restored the generator's state (activation checkpointing, an exception) has left the region.
        seed = self._source.initial_seed()
        if seed >> 32 != _MARK:
            return
        if self._entered is None or self._entered[0] != seed:
            raise PrepareError(
                "activation checkpointing computes a rowwise layer again without the colwise layers before it: the "
                "random numbers after it cannot be restored. Checkpoint all of them, or what is between them"
            )
        self._source.set_rng_state(self._entered[1])


def separate_streams(
    model: nn.Module, styles: Styles, ranks: DeviceMesh, random_modules: Collection[str] | None = None
) -> None:
    """Have each rank draw its own numbers between split layers. A model that draws none is left as it is.

    `random_modules` names the modules that draw, with `*`; None finds them.
    """
    patterns = None if random_modules is None else [name_pattern(name) for name in random_modules]
    drawing = {
        name: module
        for name, module in model.named_modules()
        if (draws(module) if patterns is None else any(pattern.fullmatch(name) for pattern in patterns))
    }
    if not drawing:
        return
    found = sorted({re.sub(r"\b\d+\b", "*", name) for name in drawing})
    logger.debug("tp_size: each rank draws its own random numbers in %s, between split layers", ", ".join(found))
    add_regions(model, styles, RankStream(ranks.get_local_rank(), ranks.device_type), list(drawing.values()))
    _separated.update(drawing.values())
    if ranks.device_type != "cpu" and _random._rng_tracker is None:
        # At its first random operation DTensor would give all ranks of the run the state of one.
        _random._rng_tracker = _random.OffsetBasedRNGTracker(ranks, run_state_sync=False)


def check_compiles(model: nn.Module) -> None:
    """Refuse to compile a model with ranks that draw their own numbers, where torch compiles it to other gradients.

    Raises PrepareError with torch 2.11.
    """
    if is_torch_version("<", "2.12") and any(module in _separated for module in model.modules()):
        raise PrepareError(
            f"torch.compile of torch {torch.__version__} computes wrong gradients for a tensor-parallel model with "
            "dropout in its split layers: use torch 2.12 or later, or train without dynamo_backend or without dropout"
        )


@dataclass
class RandomRegion:
    """Begins after the forward of the modules in `opened`, ends before that of those in `closed`.

    It ends with the forward of `owner` in any case: after an exception, and where a recomputation stops early.
    """

    owner: nn.Module
    opened: list[nn.Module] = field(default_factory=list)
    closed: list[nn.Module] = field(default_factory=list)


def add_regions(
    model: nn.Module, styles: Styles, stream: RankStream, drawing: Sequence[nn.Module] | None = None
) -> None:
    """Add hooks that enter and leave a stream around modules that draw between split layers; None: those found."""
    chosen = {id(module) for module in (filter(draws, model.modules()) if drawing is None else drawing)}
    modules = dict(model.named_modules())
    blocks = list(dict.fromkeys(_blocks_along_sequence(modules, styles)))
    regions = [RandomRegion(block) for block in blocks]
    inside = {id(module) for block in blocks for module in block.modules()}
    regions += [region for region in _between_layers(modules, styles) if id(region.owner) not in inside]
    for region in regions:
        _add(region, stream, [module for module in region.owner.modules() if id(module) in chosen])


def _add(region: RandomRegion, stream: RankStream, drawing: Sequence[nn.Module]) -> None:
    if not drawing:
        return

    def in_training(call: Callable[[], None]) -> Callable[..., None]:
        def hook(*_: object) -> None:
            for module in drawing:
                if module.training:
                    call()
                    return

        return hook

    enter, leave = in_training(stream.enter), in_training(stream.leave)
    if not region.opened:
        region.owner.register_forward_pre_hook(enter)
    for module in region.opened:
        module.register_forward_hook(enter)
    for module in region.closed:
        module.register_forward_pre_hook(leave)
    region.owner.register_forward_hook(leave, always_call=True)


def _between_layers(modules: Modules, styles: Styles) -> list[RandomRegion]:
    """The regions from colwise to rowwise layers of one module each.

    Colwise layers without a rowwise layer after them (an output layer with sharded logits) have none.
    """
    rows = [
        name
        for name, style in styles.items()
        if isinstance(style, RowwiseParallel)
        and isinstance(style.input_layouts[0], Shard)
        and isinstance(modules[name], nn.Linear)
    ]
    found: dict[str, RandomRegion] = {}
    for name, style in styles.items():
        if not isinstance(style, ColwiseParallel) or not style.use_local_output:
            continue
        if not isinstance(style.output_layouts[0], Shard):
            continue
        owner = next((up for up in _ancestors(name) if any(_are_pair(up, name, row, modules) for row in rows)), None)
        if owner is not None:
            closed = [modules[row] for row in rows if _is_inside(row, owner)]
            found.setdefault(owner, RandomRegion(modules[owner], [], closed)).opened.append(modules[name])
    return list(found.values())


def _ancestors(name: str) -> Iterator[str]:
    """The names of the modules around a module, from the inside out; that of the model is ""."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


def _are_pair(owner: str, column: str, row: str, modules: Modules) -> bool:
    """Whether a module contains both layers, and no list of blocks in it contains only the row."""
    if isinstance(modules[owner], nn.ModuleList) or not _is_inside(row, owner):
        return False
    between = [up for up in _ancestors(row) if len(up) > len(owner)]
    return all(_is_inside(column, up) for up in between if isinstance(modules[up], nn.ModuleList))


def _blocks_along_sequence(modules: Modules, styles: Styles) -> Iterator[nn.Module]:
    """The modules that the stream passes while it is sharded along the sequence."""
    for name, style in styles.items():
        if not any(isinstance(part, kinds.SequenceEntry) for part in _chained(style)):
            continue
        parent = name.rpartition(".")[0]
        siblings = [f"{parent}.{key}" if parent else key for key, _ in modules[parent].named_children()]
        for sibling in siblings[siblings.index(name) :]:
            module = modules[sibling]
            # A list is not called; its entries are.
            yield from module if isinstance(module, nn.ModuleList) else (module,)
            ends = _chained(styles.get(sibling))
            if any(
                isinstance(p, kinds.SequenceExit) or (isinstance(p, kinds.SequenceNorm) and p.gather) for p in ends
            ):
                break


def _chained(style: ParallelStyle | None) -> Sequence[ParallelStyle | None]:
    return style.styles if isinstance(style, kinds.Chained) else (style,)
