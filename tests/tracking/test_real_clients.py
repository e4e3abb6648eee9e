# SPDX-License-Identifier: Apache-2.0
"""What each tracker stores through the real package, offline, read back from the package's own files.

`make test-trackers` installs all packages; a package that is not installed is skipped elsewhere.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from accelerate.core.enums import LoggerType
from accelerate.core.imports import is_available

REAL = Path(__file__).parent / "real"
NAMES = [kind.value for kind in LoggerType if kind is not LoggerType.ALL]
LOSSES = [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3)), (3, 0.25)]


def stored(name, folder, ending, monkeypatch):
    """Run `log_run.py` in a process of its own; its exit code and what it stored."""
    if not is_available(name):
        assert not os.environ.get("TRACKERS_REQUIRED"), f"{name} is not installed"
        pytest.skip(f"{name} is not installed")
    for variable, value in {
        "HOME": folder / "home",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": folder / "trackio",
        "MPLBACKEND": "Agg",
        "DVC_NO_ANALYTICS": "1",
        "DO_NOT_TRACK": "1",
    }.items():
        monkeypatch.setenv(variable, str(value))
    (folder / "home").mkdir()
    command = [sys.executable, str(REAL / "log_run.py"), name, str(folder), ending]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert "logged" in done.stdout, done.stderr
    monkeypatch.syspath_prepend(str(REAL))
    import stores

    return done, stores.READERS[name](folder)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
def test_what_was_logged_is_in_the_store_of_the_package(name, tmp_path, monkeypatch):
    done, run = stored(name, tmp_path, "media", monkeypatch)
    assert done.returncode == 0, done.stderr
    counts = [(step, 10.0 * step) for step in range(4)]
    assert run.values == {
        "loss": LOSSES,
        "count": counts,
        "flag": [(s, 1.0) for s in range(4)],
        "tail": [(5, 7.0)],
    }
    config = {
        "lr": 0.5,
        "name": "digits",
        "model": {"width": 64, "betas": [0.9, 0.99]},
        "path": "a/b",
    }
    flat = {
        "lr": 0.5,
        "name": "digits",
        "model/width": 64,
        "model/betas": "[0.9, 0.99]",
        "path": "a/b",
    }
    expected = {
        "tensorboard": flat,
        "mlflow": {key: str(value) for key, value in config.items()},
        "comet_ml": {
            key.replace("/", "|"): value
            for key, value in {**flat, "model/betas": [0.9, 0.99]}.items()
        },
        "clearml": {
            "text": 'lr = 0.5\nname = "digits"\nmodel {\n  width = 64\n  betas = [0.9, 0.99]\n}\npath = "a/b"'
        },
    }.get(name, config)
    assert {key: run.config.get(key) for key in expected} == expected
    assert set(run.images) == (
        {(8, 6)} if name not in ("trackio", "comet_ml", "dvclive") else set()
    )
    assert run.tables == (
        [[["question", "answer"], ["6 x 7", 42]]] if name in ("wandb", "clearml") else []
    )


@pytest.mark.thorough
@pytest.mark.parametrize("ending", ["error", "exit", "interrupt", "error-background"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_ends_early_stores_its_last_values(name, ending, tmp_path, monkeypatch):
    done, run = stored(name, tmp_path, ending, monkeypatch)
    assert done.returncode != 0 and (ending != "exit" or done.returncode == 3), done
    assert ("the run's own error" in done.stderr) == ending.startswith("error"), done.stderr
    assert (run.values["loss"], run.values["tail"]) == (LOSSES, [(5, 7.0)])


@pytest.mark.timeout(300)
def test_custom_trackers_and_forked_ranks_are_closed_without_end_training(tmp_path):
    """At exit for a tracker of the user's own; also at the end of a forked rank, which runs no exit handlers."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from accelerate import Accelerator, debug_launcher\n"
        "from accelerate.tracking import GeneralTracker, TensorBoardTracker\n"
        "class Mine(GeneralTracker):\n"
        "    name, requires_logging_directory, tracker = 'mine', False, None\n"
        "    def finish(self): print('closed', flush=True)\n"
        "class Broken(Mine):\n"
        "    name = 'broken'\n"
        "    def finish(self): raise OSError('disk full')\n"
        "def train(ending):\n"
        "    accelerator = Accelerator(cpu=True, log_with=[Broken(), Mine()])\n"
        "    accelerator.init_trackers('run')\n"
        "    if ending == 'end': accelerator.end_training()\n"
        "    if ending == 'error': raise RuntimeError('own error')\n"
        "if sys.argv[1] == 'forked': debug_launcher(train, ('none',), num_processes=2)\n"
        "else: train(sys.argv[1])\n"
    )
    for ending, code in (("error", 1), ("end", 1), ("forked", 0)):
        # `debug_launcher` forks where torch is not imported.
        (done,) = run_ranks(script, 1, ending, check=False, fresh=ending == "forked")
        assert (done.returncode, done.stdout) == (code, "closed\n"), (ending, done)
        assert done.stderr.count("tracker broken failed") == 1, done.stderr
