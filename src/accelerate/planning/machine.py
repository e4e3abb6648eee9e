# SPDX-License-Identifier: Apache-2.0
"""The machine of a plan: found and measured here, or described on the command line."""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.transport import all_gather_single
from ..core import system
from ..core.device_kinds import PUBLISHED, known_name
from ..core.errors import ConfigurationError
from ..launchers.ports import get_free_port

GIB = 1 << 30
GIGA = 1e9
# Of the published peaks, what matrix products and copies of a real model reach.
_REACHED = 0.5
# Half-width of the interval of memory on the CPU, whose error benchmarks/plan.py measures.
CPU_MEMORY_SPREAD = 0.03
# Without a name: the assumed device.
_ASSUMED = "a100"
_FORM = "8x80GB, 8xH100, or 2x8xH100 for two machines"


@dataclass(frozen=True)
class Machine:
    """What a plan runs on. Each rank has one device.

    Fields:
        ranks: of all machines.
        memory: bytes of one rank.
        device: type of the device.
        machines: over which the ranks are divided.
        flops: of matrix products of one rank a second, when all ranks compute.
        bandwidth: bytes a second of other operations.
        overhead: seconds of one operation.
        links: collective -> (seconds of a message, bytes a second of a rank), with all ranks of a run.
        overlap: the fraction of messages that overlaps with computation.
        spread: half-width of the interval of times, as a fraction.
        memory_spread: half-width of the interval of memory.
        memory_scale, time_scale: measured over estimated, of the runs that calibrated it.
        origin: where the figures are from.
    """

    ranks: int
    memory: int
    device: str
    machines: int = 1
    flops: float = 0.0
    bandwidth: float = 0.0
    overhead: float = 0.0
    links: dict[str, tuple[float, float]] = field(default_factory=dict)
    overlap: float = 0.0
    spread: float = 0.4
    memory_spread: float = 0.08
    memory_scale: float = 1.0
    time_scale: float = 1.0
    origin: str = ""


def describe(
    text: str, link: float | None = None, tflops: float | None = None, between: float | None = None
) -> Machine:
    """A machine from words such as `8x80GB`, `8xH100` or `2x8xH100`.

    Args:
        text: [machines x] ranks x memory or name of the device.
        link: GB/s of one device to the others, in one direction.
        tflops: TFLOP/s that matrix products reach.
        between: GB/s of one device to other machines; by default a tenth of `link`.

    Raises:
        ConfigurationError: the text is not understood.
    """
    parts = re.fullmatch(
        r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?(?=gi?b)gi?b|[a-z][a-z0-9]*)", text.strip().lower()
    )
    if not parts or int(parts[2]) < 1 or int(parts[1] or 1) < 1:
        raise ConfigurationError(f"--machine {text!r} cannot be parsed: use {_FORM}")
    machines = int(parts[1] or 1)
    count = int(parts[2])
    what = parts[3]
    size = re.fullmatch(r"([\d.]+)g(i?)b", what)
    if not size and what not in PUBLISHED:
        raise ConfigurationError(
            f"--machine {text!r}: the device {what!r} is unknown; known devices: "
            f"{', '.join(PUBLISHED)}. For other devices, use the memory (such as 80GB) with "
            "--tflops and --link"
        )
    assumed = ""
    unit = GIGA
    if size:
        published = PUBLISHED[_ASSUMED]
        memory = float(size[1])
        if size[2]:
            unit = GIB
        if not (tflops and link):
            assumed = f"; assumed speeds: those of {_ASSUMED}"
    else:
        published = PUBLISHED[what]
        memory = published.memory
    speed = (link or published.link * _REACHED) * GIGA
    if machines > 1:
        speed = speed / 10
        if between:
            speed = between * GIGA
    return Machine(
        ranks=machines * count,
        memory=int(memory * unit),
        device="cuda",
        machines=machines,
        flops=(tflops or published.tflops * _REACHED) * 1e12,
        bandwidth=published.bandwidth * GIGA * _REACHED,
        overhead=4e-6,
        links=dict.fromkeys(_COLLECTIVES, (20e-6, speed)),
        overlap=0.8,
        origin=f"described as {text}{assumed}",
    )


def found(ranks: int | None = None) -> Machine:
    """This machine: its accelerators, or its CPU with so many ranks; the CPU's speeds are measured."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        count = ranks or torch.cuda.device_count()
        name = known_name(properties.name)
        machine = describe(f"{count}x{name or f'{properties.total_memory / GIB:.3f}GiB'}")
        return replace(machine, memory=properties.total_memory, origin=f"found: {properties.name}")
    count = ranks or 1
    return replace(measure(count), memory=system.available_memory() // count)


# -- measurement on the CPU

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "broadcast",
    "point-to-point",
)
_SIZES = (4 << 10, 4 << 20)  # bytes of the messages that are measured
_REPEATS = 15


def measure(ranks: int) -> Machine:
    """A machine of so many processes on this CPU, which compute and communicate at the same time."""
    context: Any = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = get_free_port()
    threads = max(1, (os.cpu_count() or 1) // ranks)
    workers = [
        context.Process(target=_measure, args=(rank, ranks, port, threads, results))
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        raise ConfigurationError(
            f"the speed of this machine with {ranks} processes could not be measured"
        )
    seconds = results.get()
    links = {}
    for kind, (between, small, large) in seconds["links"].items():
        # Ranks that compute reach a message at different times, and its threads have to wake up.
        latency = max(small, between - seconds["product"], 1e-6)
        links[kind] = (latency, (_SIZES[1] - _SIZES[0]) / max(large - small, 1e-9))
    return Machine(
        ranks=ranks,
        memory=0,
        device="cpu",
        memory_spread=CPU_MEMORY_SPREAD,
        flops=2 * 512**3 / seconds["product"],
        bandwidth=3 * (8 << 20) / seconds["sum"],
        overhead=seconds["operation"],
        links=links,
        origin=f"measured: this CPU with {ranks} processes",
    )


def _best(run: Callable[[], Any], inner: int = 1) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(inner):
            run()
        times.append((time.perf_counter() - start) / inner)
    return sorted(times)[len(times) // 2]


def _measure(rank: int, ranks: int, port: int, threads: int, results: Any) -> None:
    torch.set_num_threads(threads)
    is_host = rank == 0
    libuv = system.uses_libuv()
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=is_host, use_libuv=libuv)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    a = torch.randn(512, 512)
    b = torch.randn(512, 512)
    flat = torch.zeros(2 << 20)
    small = torch.zeros(8)
    dist.barrier()
    seconds: dict[str, Any] = {
        "product": _best(lambda: a @ b, inner=5),
        "sum": _best(lambda: torch.add(flat, flat)),
        "operation": _best(lambda: small.add_(1), inner=500),
        "links": {},
    }
    kinds: tuple[str, ...] = ()
    if ranks > 1:
        kinds = _COLLECTIVES
    for kind in kinds:
        small_message = _collective(kind, _SIZES[0], ranks, rank)
        large_message = _collective(kind, _SIZES[1], ranks, rank)
        after_product = functools.partial(lambda message: (a @ b, message()), small_message)
        seconds["links"][kind] = [
            _best(after_product),
            _best(small_message),
            _best(large_message),
        ]
    dist.barrier()
    if rank == 0:
        results.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def _collective(kind: str, size: int, ranks: int, rank: int) -> Callable[[], Any]:
    """One message of so many bytes, counted as `Work.messages` counts it: its largest tensor."""
    count = size // 4 // ranks * ranks
    full = torch.zeros(count)
    piece = torch.zeros(count // ranks)
    other = torch.zeros(count)
    match kind:
        case "all-reduce":
            return lambda: dist.all_reduce(full)
        case "all-gather":
            return lambda: all_gather_single(full, piece)
        case "reduce-scatter":
            # Before torch 2.13 it has only the older name.
            reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
            return lambda: reduce_scatter(piece, full)
        case "all-to-all":
            return lambda: dist.all_to_all_single(other, full)
        case "broadcast":
            return lambda: dist.broadcast(full, 0)
    if rank % 2 == 0:
        return lambda: dist.send(full, (rank + 1) % ranks)
    return lambda: dist.recv(full, (rank - 1) % ranks)
