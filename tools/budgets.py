# SPDX-License-Identifier: Apache-2.0
"""Compare the size of the source, and its uses of private names of other libraries, with the limits in pyproject.toml.

python tools/budgets.py             # a table; fails where a figure is above its limit
python tools/budgets.py --private   # also where each private name is used

A code line is neither blank nor a comment or part of a docstring. A private use is an attribute `x._name` that nothing
in this source defines, or an import of such a name or from such a module. Limits may only go down.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "accelerate"
INTERNALS = "torch_internals"
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# Public in spite of the underscore: named tuples, the end of a process, and names that the Accelerate API, or a model
# class of transformers, fixes.
PUBLIC = {"_asdict", "_exit", "_fields", "_replace", "_make", "_hf_hook", "_old_forward", "_original_forward"}
PUBLIC |= {"_no_split_modules", "_tied_weights_keys"}


def code_lines(text: str) -> int:
    """The number of lines of a file that have code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def is_private(name: str) -> bool:
    """Whether a name is private by its spelling."""
    return name.startswith("_") and name.strip("_") != "" and not name.endswith("__") and name not in PUBLIC


def defined_names(tree: ast.AST) -> Iterator[str]:
    """The names that a file defines, also as attributes of self or cls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []


def private_uses(tree: ast.AST, defined: set[str]) -> Iterator[tuple[int, str]]:
    """The line and text of each use of a private name that this source does not define."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in defined:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            if any(map(is_private, names)):
                yield node.lineno, ast.unparse(node)


def package_of(path: Path, root: Path) -> str:
    """The package that a file counts for; `top` for the modules beside the packages."""
    parts = path.relative_to(root).parts
    return parts[0] if len(parts) > 1 else "top"


def measure() -> tuple[dict[str, int], list[str]]:
    """The figures by the names of their limits, and where private names are used."""
    texts = {path: path.read_text() for path in sorted(SOURCE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    defined = {name for tree in trees.values() for name in defined_names(tree)}
    figures: Counter[str] = Counter({"private": 0, f"private in {INTERNALS}": 0})
    places = []
    for path, tree in trees.items():
        package = package_of(path, SOURCE)
        figures[package] += code_lines(texts[path])
        uses = sorted(private_uses(tree, defined))
        figures[f"private in {INTERNALS}" if package == INTERNALS else "private"] += len(uses)
        places += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in uses]
    figures["all"] = sum(code_lines(text) for text in texts.values())
    figures["tests"] = sum(code_lines(path.read_text()) for path in (ROOT / "tests").rglob("*.py"))
    return dict(figures), places


def main(arguments: list[str]) -> int:
    """Print the figures beside their limits; 1 if one is too large or has no limit."""
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["accelerate"]["budgets"]
    figures, places = measure()
    if "--private" in arguments:
        print(*places, sep="\n")
    exceeded = [name for name, figure in figures.items() if figure > limits.get(name, -1)]
    for name, figure in sorted(figures.items(), key=lambda item: -item[1]):
        print(f"{name:28} {figure:6} of {limits.get(name, '(no limit)'):>6}{'  exceeded' if name in exceeded else ''}")
    if exceeded:
        print("above the limits of [tool.accelerate.budgets] in pyproject.toml:", ", ".join(exceeded), file=sys.stderr)
    return 1 if exceeded else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
