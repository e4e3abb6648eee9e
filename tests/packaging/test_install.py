# SPDX-License-Identifier: Apache-2.0
"""The wheel beside its clients: whose files are there after each installation. Needs the package index.

`make test-install` runs it. Each environment is fresh, but links to the installed dependencies (torch, numpy, ...).
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import accelerate

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not os.environ.get("INSTALL_TESTS"), reason="needs the package index: make test-install"
    ),
]
ROOT = Path(__file__).parents[2]
SOURCES = [
    "src",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "SECURITY.md",
    "MANIFEST.in",
]
# What the environments install themselves.
OWN = ("accelerate", "__editable__", "transformers", "peft", "trl", "distutils-precedence")
OTHER = "accelerate==1.15.0"


def call(*command, check=True):
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(part) for part in command]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, cwd="/", timeout=600
    )
    assert done.returncode == 0 or not check, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """The folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("build")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(
                path, folder / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
            )
        else:
            shutil.copy(path, folder / name)
    build = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    subprocess.run(
        [sys.executable, "-c", build], cwd=folder, check=True, capture_output=True, timeout=300
    )
    return folder / "dist"


class Environment:
    """A fresh environment with links to the installed dependencies."""

    def __init__(self, folder):
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        self.command = folder / "bin" / "accelerate"
        self.packages = Path(
            call(
                self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
            ).stdout[:-1]
        )
        present = [
            Path(sysconfig.get_path("purelib")),
            Path(importlib.util.find_spec("torch").origin).parents[1],
        ]
        for path in [child for shared in present for child in shared.iterdir()]:
            if (
                not path.name.startswith(OWN)
                and path.suffix != ".pth"
                and not (self.packages / path.name).exists()
            ):
                (self.packages / path.name).symlink_to(path)

    def pip(self, *arguments, check=True):
        return call(
            sys.executable, "-m", "pip", "-q", "--python", self.python, *arguments, check=check
        )

    def report(self):
        return json.loads(call(self.command, "env", "--json").stdout)

    def has_ours(self):
        return (self.packages / "accelerate" / "core" / "version.py").exists()


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "env")


@pytest.fixture
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


def test_the_wheel_names_itself_and_the_metadata_is_valid(dist, wheel, environment):
    environment.pip("install", "--no-deps", wheel)
    version = call(environment.command, "--version").stdout
    assert (
        version
        == f"accelerate {accelerate.__version__} (independent implementation of the Accelerate API 1.15)\n"
    )
    report = environment.report()
    assert (report["problems"], report["folder"]) == ([], str(environment.packages / "accelerate"))
    call(
        environment.python,
        "-W",
        "error",
        "-c",
        "import accelerate; accelerate.Accelerator(cpu=True)",
    )
    (sdist,) = dist.glob("*.tar.gz")
    call(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as installed, tarfile.open(sdist) as sources:
        names = {
            name.split("/src/", 1)[1] for name in sources.getnames() if "/src/accelerate/" in name
        }
        modules = {name for name in installed.namelist() if name.startswith("accelerate/")}
        assert modules == {name for name in names if "." in name.rpartition("/")[2]}


def test_clients_keep_our_files(wheel, environment, tmp_path):
    environment.pip("install", "--no-deps", wheel)
    for requirement in (
        ["accelerate>=1.1.0"], ["accelerate<2"], ["accelerate~=1.1"], ["-U", "accelerate"],
        ["transformers[torch]"], ["peft"], ["trl"],
    ):  # fmt: skip
        environment.pip("install", *requirement)
        assert environment.has_ours(), requirement
        assert environment.report()["problems"] == [], requirement
    call(
        environment.python, "-c", "import transformers, peft, trl; from transformers import Trainer"
    )
    # A constraint makes pip refuse what would replace it.
    constraint = tmp_path / "constraint.txt"
    constraint.write_text(f"accelerate @ {wheel.as_uri()}\n")
    refused = environment.pip("install", "-c", constraint, OTHER, check=False)
    assert refused.returncode != 0 and environment.has_ours()
    environment.pip("install", OTHER)  # pip removes all our files first
    assert not environment.has_ours()


@pytest.mark.parametrize("ours_first", [True, False])
def test_mixed_files_are_reported(wheel, environment, ours_first):
    first, second = (wheel, OTHER) if ours_first else (OTHER, wheel)
    environment.pip("install", "--no-deps", first)
    environment.pip("install", "--no-deps", "--ignore-installed", second)
    warned = call(environment.python, "-c", "import accelerate", check=False)
    assert warned.stderr.count("two distributions named accelerate") == 1, warned.stderr
    if ours_first:
        return  # the other distribution's command
    (problem,) = environment.report()["problems"]
    assert "1.15.0 in" in problem
