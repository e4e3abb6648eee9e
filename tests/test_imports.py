# SPDX-License-Identifier: Apache-2.0
"""How the package imports: without torch until a name needs it, in no circle, downward only."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import accelerate

PACKAGE = Path(accelerate.__file__).parent
PROJECT = Path(__file__).parents[1]
# The templates are projects of users.
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "templates" not in path.parts]

# These start on the command line, or before torch is wanted. None of them may cost the import of torch.
WITHOUT_TORCH = [
    "accelerate",
    "accelerate.utils",
    "accelerate.commands.main",
    "accelerate.commands.launch",
    "accelerate.commands.monitor",
    "accelerate.commands.report",
    "accelerate.core.availability",
    "accelerate.core.buckets",
    "accelerate.core.constants",
    "accelerate.core.enums",
    "accelerate.core.env",
    "accelerate.core.errors",
    "accelerate.core.files",
    "accelerate.core.imports",
    "accelerate.core.options",
    "accelerate.config.precision",
    "accelerate.config.training",
    "accelerate.monitor.report",
    "accelerate.monitor.server",
    "accelerate.monitor.terminal",
    "accelerate.core.topology",
]


# Parts of torch that cost more than this package, and serve some runs only: those runs import them.
HEAVY = [
    "obstore",
    "sympy",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.elastic",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers",
]

# Packages that a module of ours may need as a whole, so that it cannot be imported without them.
OPTIONAL = ["deepspeed", "torch_xla"]


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(source: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_starts_without_torch() -> None:
    source = f"""
import importlib, sys
for name in {WITHOUT_TORCH!r}:
    importlib.import_module(name)
    if "torch" in sys.modules:
        print(name)
        break
"""
    assert run_python(source) == ""


def test_the_facade_imports_no_heavy_part_of_torch() -> None:
    source = f"""
import sys, torch
loaded = set(sys.modules)
from accelerate import Accelerator
print(*(set(sys.modules) - loaded) & set({HEAVY!r}))
"""
    assert run_python(source).split() == []


def imports_at_the_start(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when a module is imported."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If):
            if ast.unparse(statement.test) != "TYPE_CHECKING":
                yield from imports_at_the_start(statement.body)
            yield from imports_at_the_start(statement.orelse)
        elif isinstance(statement, ast.Try):
            handled = [handler.body for handler in statement.handlers]
            for block in (statement.body, *handled, statement.orelse, statement.finalbody):
                yield from imports_at_the_start(block)
        elif isinstance(statement, ast.With | ast.ClassDef | ast.For | ast.While):
            yield from imports_at_the_start(statement.body)


def imported_names(path: Path) -> set[str]:
    """The modules that a module imports at its start, with the packages around each; and names that are no modules."""
    module = module_name(path)
    package = module if path.stem == "__init__" else module.rpartition(".")[0]
    names = {module}
    for statement in imports_at_the_start(ast.parse(path.read_text()).body):
        if isinstance(statement, ast.Import):
            names.update(alias.name for alias in statement.names)
        else:
            origin = "." * statement.level + (statement.module or "")
            origin = importlib.util.resolve_name(origin, package)
            names.update(f"{origin}.{alias.name}" for alias in statement.names)
    return {name[: dot.start()] for name in names for dot in re.finditer(r"\.|$", name)} - {module}


def test_circles_of_imports_are_entered_by_their_package() -> None:
    """A circle fails only in the module that is imported first. Python imports a package before its modules."""
    needs = {module_name(path): imported_names(path) for path in FILES}
    assert "accelerate.core" in needs["accelerate.state"]
    reached: dict[str, set[str]] = {}
    for name in needs:
        reached[name], waiting = set(), [name]
        while waiting:
            new = needs[waiting.pop()] & needs.keys() - reached[name]
            reached[name] |= new
            waiting.extend(new)
    for name in needs:
        circle = {other for other in reached[name] if name in reached[other]}
        first = min(circle, key=len, default="")
        assert all(other == first or other.startswith(f"{first}.") for other in circle), circle


def test_each_module_can_be_imported() -> None:
    names = [
        module_name(path)
        for path in FILES
        if not {"__main__", "scripts"} & {path.stem, *path.parts}
    ]
    source = f"""
import importlib
for name in {names!r}:
    try:
        importlib.import_module(name)
    except BaseException as error:
        if not isinstance(error, ModuleNotFoundError) or error.name.split(".")[0] not in {OPTIONAL!r}:
            print(f"{{name}}: {{type(error).__name__}}: {{error}}")
"""
    assert run_python(source) == ""


def test_packages_import_lower_layers_only() -> None:
    # In a process of its own: the linter configures logging, and takes away the loggers that are there.
    source = f"""
from importlinter.cli import lint_imports
raise SystemExit(lint_imports(config_filename={str(PROJECT / "pyproject.toml")!r}, no_cache=True, no_logo=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr


ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "putenv", "unsetenv"}


def environment_reads(tree: ast.AST) -> Iterator[int]:
    """The lines at which a module reads the environment itself."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            words = {node.attr}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            words = {alias.name for alias in node.names}
        else:
            continue
        if words & ENVIRONMENT_NAMES:
            yield node.lineno


def test_one_module_reads_the_environment() -> None:
    reader = PACKAGE / "core" / "env.py"
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in FILES
        if path != reader
        for line in environment_reads(ast.parse(path.read_text()))
    ]
    assert found == []


def test_each_file_says_what_it_is_for() -> None:
    silent = []
    for path in FILES:
        text = path.read_text()
        if not text.startswith("# SPDX-License-Identifier: Apache-2.0\n") or not ast.get_docstring(
            ast.parse(text)
        ):
            silent.append(str(path.relative_to(PACKAGE)))
    assert silent == []


def test_a_torch_without_its_distributed_package(tmp_path) -> None:
    """Such builds exist for macOS and small machines: a loop trains on one process, and saves."""
    source = f"""
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        compiled = sys.modules.get("torch._C")
        for attribute in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_distributed_c10d"):
            if name == "torch.distributed" and hasattr(compiled, attribute):
                delattr(compiled, attribute)
        if name.startswith("torch._C._distributed"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Without())
import torch
from accelerate import Accelerator

assert not torch.distributed.is_available()
accelerator = Accelerator(cpu=True)
data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.zeros(8, 1))
model = torch.nn.Linear(2, 1)
plain = torch.nn.Linear(2, 1)
plain.load_state_dict(model.state_dict())
for run in (None, accelerator):
    trained = plain if run is None else model
    objects = trained, torch.optim.SGD(trained.parameters(), 0.1), torch.utils.data.DataLoader(data, 2)
    trained, optimizer, loader = objects if run is None else run.prepare(*objects)
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(trained(x), y)
        loss.backward() if run is None else run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
assert torch.equal(plain.weight, model.weight)
accelerator.save_state({str(tmp_path / "saved")!r})
accelerator.load_state({str(tmp_path / "saved")!r})
assert accelerator.gather_for_metrics(loss).item() == loss.item()
accelerator.end_training()
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-2000:]
