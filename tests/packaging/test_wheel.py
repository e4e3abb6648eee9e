# SPDX-License-Identifier: Apache-2.0
"""The wheel, built without the package index: its metadata, its files, and an import from it alone."""

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import packaging.metadata
import pytest

import accelerate

ROOT = Path(__file__).parents[2]
SOURCES = (
    "src",
    "pyproject.toml",
    "setup.py",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
    "SECURITY.md",
    "MANIFEST.in",
)
IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import accelerate
from accelerate.commands import main
assert accelerate.__file__.startswith(sys.argv[1]), accelerate.__file__
sys.argv = ["accelerate", "--version"]
main.main()
"""


def test_the_wheel_is_complete_and_imports(tmp_path):
    pytest.importorskip("setuptools", minversion="77")  # as [build-system] requires
    copy = tmp_path / "source"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__")
            )
        else:
            shutil.copy(ROOT / name, copy / name)
    build = "from setuptools import build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=copy, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = copy.glob("dist/*.whl")
    (sdist,) = copy.glob("dist/*.tar.gz")
    listed = subprocess.run(
        ["tar", "-tzf", sdist], capture_output=True, text=True, check=True
    ).stdout
    assert {"LICENSE", "SECURITY.md", "CHANGELOG.md"} <= {
        name.partition("/")[2] for name in listed.split()
    }
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        data = packaging.metadata.Metadata.from_email(
            content.read(f"{info}/METADATA"), validate=True
        )
        content.extractall(tmp_path / "installed")
    assert {
        f"{info}/licenses/LICENSE",
        "accelerate/py.typed",
        "accelerate/monitor/page/index.html",
    } <= names
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert (data.name, str(data.version)) == ("accelerate", accelerate.__version__)
    assert (
        data.license_expression == "Apache-2.0" and data.description_content_type == "text/markdown"
    )
    description = data.description
    readme = (ROOT / "README.md").read_text()
    assert (
        re.findall("^#+ .*", description, re.M) == re.findall("^#+ .*", readme, re.M)
        and "[Apache-2.0]" in readme
    )
    assert "License: Apache-2.0." in description and "<img" not in description
    assert "completion" in data.provides_extra and re.match(r"# accelerate\n", description)
    # A package index has no files for relative links and pictures.
    assert not re.search(r"\]\((?!https://)", description)
    arguments = ["-I", "-c", IMPORT, str(tmp_path / "installed")]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert done.stdout.startswith(
        f"accelerate {accelerate.__version__} (independent implementation"
    ), done.stderr
