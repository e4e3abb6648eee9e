# SPDX-License-Identifier: Apache-2.0
"""What a type checker sees of the public names: declared types, none that it has to infer.

A cheap stand-in for `pyright --verifytypes accelerate --ignoreexternal`, which calls the same places ambiguous.
"""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "accelerate"


def _is_public(name):
    return not name.startswith("_")


def _is_evident(value):
    """Whether all type checkers infer the same type: a constant, or a parameter or another declared name."""
    return isinstance(
        value.operand if isinstance(value, ast.UnaryOp) else value, (ast.Constant, ast.Name)
    )


def _targets(statement):
    """(target, value) pairs of an assignment; values that come out of an unpacked tuple are None."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            for name in names:
                yield name, None if isinstance(target, ast.Tuple) else statement.value
    elif isinstance(statement, ast.AugAssign):
        yield statement.target, None


def _unannotated(function):
    arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    arguments += [
        argument for argument in (function.args.vararg, function.args.kwarg) if argument is not None
    ]
    wrong = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
    return [*wrong, *(["return"] if function.returns is None else [])]


def _undeclared(tree):
    """The public names of a module whose types are inferred."""
    for function in [
        node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_public(node.name)
    ]:
        yield from (f"{function.name}({name})" for name in _unannotated(function))
    for statement in tree.body:
        for target, value in _targets(statement):
            evident = _is_evident(value) or isinstance(value, ast.Attribute)
            if (
                isinstance(target, ast.Name)
                and target.id.islower()
                and _is_public(target.id)
                and not evident
            ):
                yield target.id
    for owner in [
        node for node in tree.body if isinstance(node, ast.ClassDef) and _is_public(node.name)
    ]:
        methods = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
        bases = {ast.unparse(base) for base in owner.bases}
        declared = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and (node is owner or node.name in bases):
                fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
                declared |= {field.target.id for field in fields}
        found = {}
        for method in methods:
            if _is_public(method.name):
                yield from (f"{owner.name}.{method.name}({name})" for name in _unannotated(method))
            for node in ast.walk(method):
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
                    declared.add(node.target.attr)
                for target, value in _targets(node):
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                        found.setdefault(target.attr, []).append(_is_evident(value))
        properties = {method.name for method in methods if method.decorator_list}
        # What is assigned twice may be inferred as the union of both.
        evident = {name for name, values in found.items() if values == [True]}
        for name in found.keys() - declared - properties - evident:
            if _is_public(name):
                yield f"{owner.name}.{name}"


@pytest.mark.parametrize(
    "folder", sorted(path.name for path in SOURCE.iterdir() if path.suffix in ("", ".py"))
)
def test_public_names_have_declared_types(folder):
    paths = (SOURCE / folder).rglob("*.py") if (SOURCE / folder).is_dir() else [SOURCE / folder]
    modules = {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in paths}
    assert [
        f"{module}: {name}" for module, tree in modules.items() for name in _undeclared(tree)
    ] == []
