# SPDX-License-Identifier: Apache-2.0
"""`npu` devices of torch that compute on the CPU, in a process with SIMULATED_DEVICE=FOLDER of the compiled extension.

A backend outside of torch, as those of other vendors: `Module.to` replaces parameters when it moves them there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.cpp_extension import load

HERE = Path(__file__).parent
KIND = "npu"
TOTAL = 1 << 30
# All that the module of a backend needs, which SIMULATED_MODULE=small leaves in it.
NEEDED = {
    "is_available",
    "_is_in_bad_fork",
    "device_count",
    "current_device",
    "set_device",
    "manual_seed_all",
}


def build(folder: Path) -> Any:
    """Compile the extension into `folder` (about a minute), or load what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    # ninja is next to the interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return load("simulated_device", [str(HERE / "simulated_device.cpp")], build_directory=str(folder),
                extra_cflags=["-O1", "-w"])  # fmt: skip


def install(extension: Any) -> None:
    """Register the device, the module `torch.npu`, and the backend `hccl`."""

    def index(device: Any = None) -> int:
        found = device if isinstance(device, int) or device is None else torch.device(device).index
        return extension.current() if found is None else found

    @contextlib.contextmanager
    def on(device: Any) -> Any:
        former = extension.current()
        extension.set_device(index(device))
        try:
            yield
        finally:
            extension.set_device(former)

    def seed_all(seed: int) -> None:
        for each in range(extension.count()):
            extension.generator(each).manual_seed(seed)

    def set_states(states: Any) -> None:
        for each, state in enumerate(states):
            extension.generator(each).set_state(state)

    module = types.ModuleType(f"torch.{KIND}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_bf16_supported": lambda: True,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "device_count": extension.count,
        "current_device": extension.current,
        "set_device": lambda device: extension.set_device(index(device)),
        "device": on,
        "manual_seed": lambda seed: extension.generator(extension.current()).manual_seed(seed),
        "manual_seed_all": seed_all,
        "initial_seed": lambda: extension.generator(extension.current()).initial_seed(),
        "get_rng_state": lambda device=KIND: extension.generator(index(device)).get_state(),
        "set_rng_state": lambda state, device=KIND: extension.generator(index(device)).set_state(
            state
        ),
        "get_rng_state_all": lambda: [
            extension.generator(each).get_state() for each in range(extension.count())
        ],
        "set_rng_state_all": set_states,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_allocated": lambda device=None: extension.allocated(index(device)),
        "max_memory_allocated": lambda device=None: extension.peak(index(device)),
        "reset_peak_memory_stats": lambda device=None: extension.reset_peak(index(device)),
        "mem_get_info": lambda device=None: (TOTAL - extension.allocated(index(device)), TOTAL),
        "get_device_name": lambda device=None: "simulated",
        "current_stream": lambda device=None: torch.Stream(device=KIND),
        "default_stream": lambda device=None: torch.Stream(device=KIND),
        "Stream": torch.Stream,
        "Event": torch.Event,
        "stream": lambda stream: contextlib.nullcontext(),
    }
    if os.environ.get("SIMULATED_MODULE") == "small":
        functions = {name: function for name, function in functions.items() if name in NEEDED}
    vars(module).update(functions)
    extension.install()
    torch.utils.rename_privateuse1_backend(KIND)
    torch._register_device_module(KIND, module)
    torch.utils.generate_methods_for_privateuse1_backend()

    def backend(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return extension.backend(
            dist.ProcessGroupGloo(dist.PrefixStore("device", store), rank, size, timeout)
        )

    dist.Backend.register_backend("hccl", backend, devices=[KIND])


if folder := os.environ.get("SIMULATED_DEVICE"):
    install(build(Path(folder)))
