# SPDX-License-Identifier: Apache-2.0
"""Compare how the source reads, and its uses of private names of other libraries, with the limits in pyproject.toml.

python tools/budgets.py             # a table; fails where a figure is above its limit
python tools/budgets.py --private   # also where each private name is used
python tools/budgets.py --worst     # also the densest functions
python tools/budgets.py --update    # write the present figures as limits

Measured for each package of src/accelerate:

- tokens: of code, without comments, docstrings, indentation and line breaks. The limit has 3% of slack.
- tokens a line, of lines that carry code.
- branches in 100 such lines. A branch is an if, a conditional expression, a loop, a loop of a comprehension, an
  except, an `and` or `or`, an assert or a case.
- private uses: see `private_uses.py`. Those in torch_internals, which are rows of its table, have their own limit.
"""

from __future__ import annotations

import ast
import gc
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import private_uses

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "accelerate"
CONFIGURATION = ROOT / "pyproject.toml"
TABLE = "tool.accelerate.budgets"
SLACK = 1.03
LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.comprehension,
    ast.ExceptHandler,
    ast.BoolOp,
    ast.Assert,
    ast.match_case,
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass
class Figures:
    """Sums over files of source."""

    lines: int = 0
    tokens: int = 0
    branches: int = 0

    def add(self, other: Figures) -> None:
        """Add the figures of a file."""
        self.lines += other.lines
        self.tokens += other.tokens
        self.branches += other.branches

    @property
    def density(self) -> float:
        """Tokens a line."""
        return self.tokens / max(1, self.lines)

    @property
    def branching(self) -> float:
        """Branches in 100 lines."""
        return 100 * self.branches / max(1, self.lines)


@dataclass
class SourceFile:
    """A parsed file, and the number of code tokens on each of its lines."""

    path: Path
    tree: ast.Module
    tokens: dict[int, int] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SourceFile:
        """Parse a file and count its tokens."""
        text = path.read_text()
        tree = ast.parse(text)
        file = cls(path, tree)
        ignored = set(docstring_lines(tree))
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            first = token.start[0]
            if token.type in LAYOUT_TOKENS or first in ignored:
                continue
            file.tokens[first] = file.tokens.get(first, 0) + 1
            # A string of several lines makes each of them a line of code.
            for line in range(first + 1, token.end[0] + 1):
                file.tokens.setdefault(line, 0)
        return file

    def figures(self) -> Figures:
        """The figures of the file."""
        branches = sum(isinstance(node, BRANCHES) for node in ast.walk(self.tree))
        return Figures(len(self.tokens), sum(self.tokens.values()), branches)

    def functions(self) -> Iterator[tuple[float, int, str]]:
        """Tokens a line, lines and place of each function."""
        for node in ast.walk(self.tree):
            if isinstance(node, FUNCTIONS):
                end = node.end_lineno or node.lineno
                tokens = [self.tokens[n] for n in range(node.lineno, end + 1) if n in self.tokens]
                place = f"{self.path.relative_to(ROOT)}:{node.lineno} {node.name}"
                yield sum(tokens) / len(tokens), len(tokens), place


def docstring_lines(tree: ast.Module) -> Iterator[int]:
    """The lines of all docstrings."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def package_of(path: Path) -> str:
    """The package that a file counts for; `top` for the modules beside the packages."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else "top"


def measure(files: Iterable[SourceFile]) -> dict[str, Figures]:
    """The figures of each package, and of `all`."""
    packages = {"all": Figures()}
    for file in files:
        figures = file.figures()
        packages["all"].add(figures)
        packages.setdefault(package_of(file.path), Figures()).add(figures)
    return packages


def exceeded(name: str, figures: Figures, limits: dict[str, list[float]]) -> list[str]:
    """What of a package is above its limit."""
    if name not in limits:
        return [f"{name} has no limit"]
    tokens, density, branching = limits[name]
    problems = []
    if figures.tokens > tokens * SLACK:
        problems.append(f"{name}: {figures.tokens} tokens, limit {tokens} and 3%")
    if round(figures.density, 1) > density:
        problems.append(f"{name}: {figures.density:.2f} tokens a line, limit {density}")
    if round(figures.branching, 1) > branching:
        problems.append(f"{name}: {figures.branching:.1f} branches in 100 lines, limit {branching}")
    return problems


def write_limits(packages: dict[str, Figures], uses: dict[str, int]) -> None:
    """Write the present figures as limits: the last table of pyproject.toml."""
    head = CONFIGURATION.read_text().partition(f"[{TABLE}]")[0]
    lines = [f"[{TABLE}]"]
    for name, figures in sorted(packages.items(), key=lambda item: -item[1].tokens):
        row = f"[{figures.tokens}, {figures.density:.1f}, {figures.branching:.1f}]"
        lines.append(f"{name} = {row}")
    lines += [f'"{name}" = {count}' for name, count in uses.items()]
    CONFIGURATION.write_text(head.rstrip() + "\n\n" + "\n".join(lines) + "\n")


def main(arguments: list[str]) -> int:
    """Print the figures and what is above its limit; 1 if anything is."""
    # Syntax trees have no garbage, and each collection would visit all of them.
    gc.disable()
    # The templates are projects of users.
    paths = [path for path in sorted(SOURCE.rglob("*.py")) if "templates" not in path.parts]
    files = [SourceFile.read(path) for path in paths]
    packages = measure(files)
    outside, inside = private_uses.find(SOURCE)
    uses = {"private uses": len(outside), "private uses in torch_internals": len(inside)}
    if "--update" in arguments:
        write_limits(packages, uses)
    limits = tomllib.loads(CONFIGURATION.read_text())["tool"]["accelerate"]["budgets"]
    problems = []
    print(f"{'package':16} {'lines':>6} {'tokens':>7} {'a line':>7} {'branches in 100':>16}")
    for name, figures in sorted(packages.items(), key=lambda item: -item[1].tokens):
        row = f"{name:16} {figures.lines:6} {figures.tokens:7}"
        print(f"{row} {figures.density:7.2f} {figures.branching:16.1f}")
        problems += exceeded(name, figures, limits)
    for name, count in uses.items():
        print(f"{name}: {count}")
        if count > limits.get(name, 0):
            problems.append(f"{name}: {count}, limit {limits.get(name, 0)}")
    if "--private" in arguments:
        print(*outside, *inside, sep="\n")
    if "--worst" in arguments:
        functions = [f for file in files for f in file.functions() if f[1] >= 12]
        for density, lines, place in sorted(functions, reverse=True)[:40]:
            print(f"{density:5.1f} tokens a line, {lines:3} lines  {place}")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
