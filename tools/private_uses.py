# SPDX-License-Identifier: Apache-2.0
"""Find where the source uses what other libraries do not publish: what a new release of them can break unseen.

A use is

- an attribute `x._name`, unless a name of this file is the same and x is probably an object of ours; attributes that
  torch's objects have count even if another file of the package defines the name;
- an import of a private name or from a private module;
- a private name as a string, in getattr, setattr, hasattr and delattr, and as a key of vars() and __dict__;
- a method or property of ours that overrides a private one of a foreign class;
- a name without underscore that torch does not document (UNDOCUMENTED).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

FOLDER = "torch_internals"
# Names with an underscore that their libraries publish, or that are this package's own.
PUBLISHED = {
    # Python
    "_abc_impl",
    "_asdict",
    "_exit",
    "_fields",
    "_is_protocol",
    "_make",
    "_replace",
    # this package
    "_distributed",
    "_hf_hook",
    "_master_step",
    "_mixed_precision",
    "_old_forward",
    "_original_forward",
    # model classes of transformers, for other libraries
    "_attn_implementation",
    "_hf_peft_config_loaded",
    "_init_weights",
    "_is_hf_initialized",
    "_keep_in_fp32_modules",
    "_no_split_modules",
    "_reset_parameters",
    "_supports_context_parallel",
    "_supports_sdpa",
    "_tie_weights",
    "_tied_weights_keys",
    "_tp_plan",
    # the documentation of SageMaker's ModelTrainer
    "_latest_training_job",
}
UNDOCUMENTED = {
    "default_pg_timeout",
    "fsdp_params",
    "post_backward",
    "prepare_for_backward",
    "reduce_grads",
    "require_backward_grad_sync",
    "reset_sharded_param",
    "schedule_ref",
    "sharded_param",
    "to_sharded",
    "to_unsharded",
    "unsharded_accumulated_grad",
    "unsharded_accumulated_grad_data",
    "unsharded_stages",
}
# Attributes of torch's objects; another file that defines the name does not make them ours.
OF_TORCH = {
    "_base",
    "_buffers",
    "_handle",
    "_is_root",
    "_local_tensor",
    "_mesh",
    "_modules",
    "_orig_mod",
    "_parameters",
    "_pg",
    "_spec",
    "_state",
    "_version",
    "_world",
}
ATTRIBUTE_FUNCTIONS = {"getattr", "setattr", "hasattr", "delattr"}
# Modules that need packages which are seldom installed, or that run when they are imported.
NOT_IMPORTED = ("test_utils.scripts", ".xla", "ray_worker")
METHODS = (types.FunctionType, property, staticmethod, classmethod)


def is_private(name: object) -> bool:
    """Whether a value is a private name of a library."""
    if not isinstance(name, str) or name in PUBLISHED:
        return False
    return name.startswith("_") and not name.endswith("__") and name.strip("_") != ""


class Names(ast.NodeVisitor):
    """The names that a file defines: functions, classes, variables, and attributes of self and cls."""

    def __init__(self, tree: ast.Module) -> None:
        self.defined: set[str] = set()
        self.visit(tree)

    def generic_visit(self, node: ast.AST) -> None:
        """Take down what a node defines."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            self.defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            is_ours = ast.unparse(node.value) in ("self", "cls")
            if is_ours:
                self.defined.add(node.attr)
        super().generic_visit(node)


class Uses(ast.NodeVisitor):
    """The uses in a file, by line.

    Args:
        tree: the file.
        everywhere: the names that all files of the package define.
    """

    def __init__(self, tree: ast.Module, everywhere: set[str]) -> None:
        self.defined = Names(tree).defined
        self.everywhere = everywhere
        self.constants: dict[str, object] = {}
        self.uses: list[tuple[int, str, str]] = []
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                for target in statement.targets:
                    self.constants[ast.unparse(target)] = statement.value.value
        self.visit(tree)

    def add(self, node: ast.expr | ast.stmt, kind: str, text: str) -> None:
        """Note a use."""
        self.uses.append((node.lineno, kind, text[:70]))

    def add_string(self, node: ast.expr, argument: ast.expr) -> None:
        """Note a use if an argument is a private name, written out or as a constant of the file."""
        if isinstance(argument, ast.Constant):
            name = argument.value
        else:
            name = self.constants.get(ast.unparse(argument))
        if is_private(name) and name not in self.everywhere:
            self.add(node, "string", str(name))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """An attribute of another object."""
        self.generic_visit(node)
        owner = ast.unparse(node.value)
        if owner in ("self", "cls") or owner.startswith("super()"):
            return
        if node.attr in UNDOCUMENTED:
            self.add(node, "undocumented", ast.unparse(node))
        elif is_private(node.attr) and node.attr not in self.defined:
            if node.attr not in self.everywhere:
                self.add(node, "attribute", ast.unparse(node))
            elif node.attr in OF_TORCH:
                self.add(node, "masked", ast.unparse(node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """An import from another library."""
        if node.level == 0 and node.module:
            names = [alias.name for alias in node.names]
            if any(is_private(name) for name in [*node.module.split("."), *names]):
                self.add(node, "import", f"from {node.module} import {', '.join(names)}")

    def visit_Import(self, node: ast.Import) -> None:
        """An import of another library's module."""
        for alias in node.names:
            if any(is_private(name) for name in alias.name.split(".")):
                self.add(node, "import", f"import {alias.name}")

    def visit_Call(self, node: ast.Call) -> None:
        """A function that takes the name of an attribute."""
        self.generic_visit(node)
        function = ast.unparse(node.func)
        owner, _, method = function.rpartition(".")
        if function in ATTRIBUTE_FUNCTIONS and len(node.args) > 1:
            self.add_string(node, node.args[1])
        elif method in ("get", "pop") and is_namespace(owner) and node.args:
            self.add_string(node, node.args[0])

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """A key of the dictionary of an object."""
        self.generic_visit(node)
        if is_namespace(ast.unparse(node.value)):
            self.add_string(node, node.slice)


def is_namespace(expression: str) -> bool:
    """Whether an expression is the dictionary of an object's attributes."""
    return expression.endswith("__dict__") or expression.startswith("vars(")


def overrides(package: str) -> Iterator[tuple[str, str, str]]:
    """The module, kind and text of each private method of a foreign class that a class of the package overrides."""
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, f"{package}."):
        if any(part in module.name for part in NOT_IMPORTED):
            continue
        try:
            loaded = importlib.import_module(module.name)
        except ImportError:
            # Its package is not installed.
            continue
        for cls in vars(loaded).values():
            if inspect.isclass(cls) and cls.__module__ == module.name:
                for base, name in foreign_overrides(cls, package):
                    yield module.name, "override", f"{cls.__name__}.{name} of {base.__module__}"


def foreign_overrides(cls: type, package: str) -> Iterator[tuple[type, str]]:
    """The foreign class and the name of each private method that `cls` overrides."""
    for name, value in vars(cls).items():
        if not isinstance(value, METHODS) or not is_private(name):
            continue
        for base in cls.__mro__[1:]:
            if name in vars(base):
                if base.__module__.partition(".")[0] not in (package, "enum", "argparse"):
                    yield base, name
                break


def find(source: Path) -> tuple[list[str], list[str]]:
    """The uses in a package outside and inside of its folder for them, as "file:line: kind: text".

    Args:
        source: the folder of the package, which can be imported.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}
    everywhere = {name for tree in trees.values() for name in Names(tree).defined}
    outside: list[str] = []
    inside: list[str] = []
    for path, tree in trees.items():
        file = path.relative_to(source)
        if file.parts[0] == FOLDER:
            uses = inside
        else:
            uses = outside
        uses += [
            f"{file}:{line}: {kind}: {text}" for line, kind, text in Uses(tree, everywhere).uses
        ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module, kind, text in sorted(set(overrides(source.name))):
            if module.split(".")[1] == FOLDER:
                uses = inside
            else:
                uses = outside
            uses.append(f"{module}: {kind}: {text}")
    return outside, inside
