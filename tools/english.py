# SPDX-License-Identifier: Apache-2.0
"""Find phrases that a native writer of American English would not use, in pages, public docstrings and messages.

python tools/english.py              # list them, and fail if there are any
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOR_CONTRIBUTORS = ("architecture", "extending", "torch_internals")
# A pattern, and what to write instead.
PHRASES = (
    (
        r"(colour|behaviour|neighbour|favour|honour|licenc|grey\b|centre\b|catalogue|misspelt|learnt\b|labelled"
        r"|labelling|modelling|(quantis|optimis|normalis|initialis|serialis|synchronis|recognis|organis|specialis"
        r"|summaris|generalis|utilis|minimis|maximis|parametris)(e|ed|es|ing|ation)\b)",
        "the American spelling",
    ),
    (
        r"\bof (torch|transformers|peft|diffusers|DeepSpeed)\b(?!['.\w]|,? (and|or)\b|, \w| \d| models?\b)",
        "the name first: torch versions",
    ),
    (r"(?<!there )\b(is|are|was|were) no\b(?! (longer|more))", "is not a, has no"),
    (r"\b(is|are) one (message|sentence|line)\b", "end with one message, share one line"),
    (r"\bnothing is (looked at|said|shown)\b", "the check is off"),
    (r"\b(come|comes|came) to (a|the|its|their) collective", "reaches"),
    (r"\binside of\b", "inside"),
    (r"\bby turns\b", "in turn"),
    (r"\bone's own\b", "your own"),
    (r"\bwere (1|one) (started|given)\b", "was"),
    (r"\bsigns? of life\b", "heartbeat"),
    (r"\d %(?!\w)", "3%, without a space"),
)

# In pages only.
IN_PAGES = (
    (r", also (?!called|known)", "even, including, too"),
    (r"\b(go|goes|went) on\b", "continue"),
    (r"\bequally (many|much)\b", "the same number of"),
    (r"\bof its own form\b|\bform of its own\b", "its own format"),
    (r"\ba certain one\b", "a specific one"),
    (r"\ball else\b", "everything else"),
    (r"\bin the place of\b", "instead of, or replace"),
    (r"\| what for\b", "purpose"),
    (r"\boutside of\b", "outside"),
    (r"\banother \w+ than\b", "a different one from, other than"),
    (r"\bto the (last )?bit\b", "bit for bit"),
)
# In messages and help texts only.
IN_MESSAGES = (
    (r"(?<=[:;,.(] )give (a|an|one|another|--)|\bor give\b", "pass, use, add"),
    (r"\b(is|are|was|were) (both )?given\b", "was passed"),
    (r"\b(leave|leaves) (it|them|one|that|this|either) out\b", "remove, omit"),
    (r"\bexists already\b|\b(is|are|has|have|was|were) (\w+ )?already\b(?! \w)", "already exists"),
    (r"\bany ?more\b", "no longer"),
    (r"\banew\b", "again, from scratch"),
    (r"\b(is|are) not known\b", "is unknown"),
    (r"\bwhere (there|it|they|one|none|that) (is|are|was)\b(?! available)", "if"),
    (r"\b(another|other) \w+ than\b", "a different ... than"),
    (r"\boutside of\b", "outside"),
    (r"\b(did|does|do|has|have) not come?\b(?! from)", "does not reach, has not arrived"),
    (
        r"\b(takes?|returns?|gives?|names?|holds?|needs?|keeps?|sends?|trains?|belongs? to) (no|nothing)\b",
        "does not take",
    ),
    (r"\b(make|makes|made) an? (Accelerator|optimizer|model)\b", "create"),
    (r", else \b|; else\b", "otherwise"),
    (r"\bafterwards\b", "afterward"),
)


def _without(pattern: str, text: str) -> str:
    """The text with blanks in place of what matches, so that lines keep their numbers."""
    return re.sub(
        pattern,
        lambda match: re.sub(r"[^\n]", " ", match[0]),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def pages() -> Iterator[tuple[Path, int, str]]:
    """The lines of the pages that users read, without code."""
    files = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    for path in sorted(files):
        if "api" in path.parts or path.stem in FOR_CONTRIBUTORS:
            continue
        text = path.read_text()
        for code in (r"^```.*?^```", r"^    [^\n]*$", r"`[^`]*`", r"\]\([^)]*\)"):
            text = _without(code, text)
        for number, line in enumerate(text.splitlines(), 1):
            yield path, number, line


def _is_internal(node: ast.AST) -> bool:
    """Whether the docstring of a node is for those who change the package."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name.startswith("_")
    return isinstance(node, ast.Module)


def _texts(tree: ast.Module) -> Iterator[tuple[ast.Constant, bool]]:
    """The docstrings of the public classes and functions, and all other texts; whether each is a docstring."""
    internal, docstrings = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            statements = node.body if _is_internal(node) else node.body[1:]
            internal |= {id(item.value) for item in statements if isinstance(item, ast.Expr)}
        if isinstance(node, ast.Expr):
            docstrings.add(id(node.value))
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in internal
        ):
            yield node, id(node) in docstrings


def sources() -> Iterator[tuple[Path, int, str, bool]]:
    """The lines of public docstrings, messages and help texts; whether each is of a docstring."""
    for path in sorted((ROOT / "src" / "accelerate").rglob("*.py")):
        tree = ast.parse(path.read_text())
        for text, is_docstring in _texts(tree):
            for offset, line in enumerate(_without(r"`[^`]*`", text.value).splitlines()):
                yield path, text.lineno + offset, line, is_docstring


def findings() -> list[str]:
    """A line for each phrase: where it is, the phrase, and what to write instead."""
    lines = set()

    def search(path: Path, number: int, line: str, phrases: Iterable[tuple[str, str]]) -> None:
        for pattern, instead in phrases:
            for match in re.finditer(pattern, line, re.IGNORECASE):
                lines.add(f"{path.relative_to(ROOT)}:{number}: {match[0]!r} (write: {instead})")

    for path, number, line in pages():
        search(path, number, line, (*PHRASES, *IN_PAGES))
    for path, number, line, is_docstring in sources():
        search(path, number, line, PHRASES if is_docstring else (*PHRASES, *IN_MESSAGES))
    return sorted(lines)


if __name__ == "__main__":
    found = findings()
    print(*found, sep="\n")
    sys.exit(bool(found))
