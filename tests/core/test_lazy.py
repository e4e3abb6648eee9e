# SPDX-License-Identifier: Apache-2.0
"""Lazy exports: a name comes from its home at the first use, and from nowhere else."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType

import pytest

from accelerate.core import lazy, trees


@pytest.fixture
def wing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("accelerate_wing")
    monkeypatch.setitem(sys.modules, "accelerate_wing", module)
    exports = {"core.trees": ["send_to_device"], "core.gone": ["lost"], "core.errors": ["absent"]}
    module.__getattr__, module.__dir__, module.__all__ = lazy.attach(
        "accelerate_wing", exports, ["child"]
    )
    return module


def test_a_name_is_fetched_once_and_then_is_a_plain_attribute(wing: ModuleType) -> None:
    assert "send_to_device" not in vars(wing)
    assert wing.send_to_device is trees.send_to_device
    assert vars(wing)["send_to_device"] is trees.send_to_device


def test_all_and_dir_list_the_names_before_they_are_used(wing: ModuleType) -> None:
    assert wing.__all__ == ["absent", "child", "lost", "send_to_device"]
    assert {"absent", "child", "lost", "send_to_device"} <= set(dir(wing))


def test_unknown_names_and_broken_homes_fail_as_python_fails(wing: ModuleType) -> None:
    with pytest.raises(
        AttributeError, match=r"module 'accelerate_wing' has no attribute 'nothing'"
    ):
        _ = wing.nothing
    with pytest.raises(ModuleNotFoundError, match=r"accelerate\.core\.gone"):
        _ = wing.lost
    with pytest.raises(AttributeError, match="absent"):
        _ = wing.absent


def test_the_function_tqdm_is_not_hidden_by_its_module() -> None:
    import accelerate.utils
    import accelerate.utils.tqdm as module
    from accelerate.telemetry.display import tqdm

    assert accelerate.utils.tqdm is tqdm
    assert sys.modules["accelerate.utils.tqdm"].tqdm is tqdm
    assert (
        module is tqdm
    )  # `import a.b as c` takes the attribute, as it does for every package of this shape


@pytest.mark.parametrize("collecting", [True, False])
def test_garbage_collection_is_as_it_was_after_an_import(
    wing: ModuleType, collecting: bool
) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if collecting else gc.disable)()
        assert wing.send_to_device is trees.send_to_device and gc.isenabled() is collecting
        with pytest.raises(ModuleNotFoundError):
            _ = wing.lost
        assert gc.isenabled() is collecting
    finally:
        (gc.enable if before else gc.disable)()


def test_names_that_several_threads_use_first():
    code = """
import threading
import accelerate, accelerate.utils
names = ["Accelerator", "PartialState", "prepare_pippy", "dispatch_model", "notebook_launcher", "LocalSGD"]
names += ["skip_first_batches", "FullyShardedDataParallelPlugin", "DeepSpeedPlugin", "load_checkpoint_in_model"]
begin, failed = threading.Barrier(2 * len(names)), []
def use(package, name):
    begin.wait()
    try:
        getattr(package, name)
    except BaseException as error:
        failed.append(error)
threads = [threading.Thread(target=use, args=(accelerate, name)) for name in names]
others = accelerate.utils.__all__[::25][:10]
threads += [threading.Thread(target=use, args=(accelerate.utils, name)) for name in others]
threads += [threading.Thread(target=use, args=(accelerate, name)) for name in names[: 2 * len(names) - len(threads)]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_a_launch_does_not_import_the_modules_of_utils():
    """`from package import submodule` first looks for an attribute, which may be any public name."""
    code = """
import sys, accelerate.commands.launch
sys.exit(any(name.startswith("accelerate.utils") for name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
