# SPDX-License-Identifier: Apache-2.0
"""The documents keep their word: whole programs in them run, links lead somewhere, names exist."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_pool import Ranks
from ranks import output_of

import accelerate

PROJECT = Path(__file__).parents[1]
DOCUMENTS = [
    path
    for path in sorted(PROJECT.rglob("*.md"))
    if not any(
        part.startswith(".") or part in ("build", "results")
        for part in path.relative_to(PROJECT).parts
    )
]


def blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


# A block that begins with an import of torch is a whole program; the others are parts of one. A comment before it sets
# the number of processes. A block of text after it is what the first process prints.
PROGRAM = re.compile(
    r"^(?:<!-- processes: (\d) -->\n+)?```python\n(import torch\n.*?)^```\n(?:\n```text\n(.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = [
    pytest.param(program, printed, int(processes or 1), id=f"{path.name}-{number}")
    for path in DOCUMENTS
    for number, (processes, program, printed) in enumerate(PROGRAM.findall(path.read_text()))
]


@pytest.mark.parametrize("program, printed, processes", PROGRAMS)
def test_programs_run(
    program: str,
    printed: str,
    processes: int,
    ranks: Callable[[int], Ranks],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "train.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    results = ranks(processes).run(output_of, tmp_path / "train.py")
    if printed:
        assert results[0] == printed


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(PROJECT)))
def test_links_lead_to_files(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text())
    lost = [
        target for target in targets if "://" not in target and not (path.parent / target).exists()
    ]
    assert lost == []


def headings(path: Path) -> set[str]:
    """The anchors of a document, as GitHub and the site make them from its headings."""
    text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_links_lead_to_headings() -> None:
    lost = []
    for path in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)#([\w-]+)\)", path.read_text()):
            other = path.parent / target if target else path
            if other.suffix == ".md" and anchor not in headings(other):
                lost.append(f"{path.name}: {target}#{anchor}")
    assert lost == []


def test_imported_names_exist() -> None:
    lost = []
    for path in DOCUMENTS:
        for block in blocks(path):
            for line in re.findall(
                r"^\s*(from accelerate\S* import [\w, ]+)$", block, re.MULTILINE
            ):
                statement = ast.parse(line.strip()).body[0]
                assert isinstance(statement, ast.ImportFrom) and statement.module
                home = importlib.import_module(statement.module)
                lost += [
                    f"{path.name}: {line}"
                    for alias in statement.names
                    if not hasattr(home, alias.name)
                ]
    assert lost == []


CHANGES = re.findall(
    r"^```diff\n(diff --git .*?|--- .*?)^```",
    (PROJECT / "docs" / "extending.md").read_text(),
    re.M | re.S,
)


@pytest.mark.parametrize("change", CHANGES, ids=range(len(CHANGES)))
def test_changes_shown_to_contributors_apply(change: str, tmp_path: Path) -> None:
    """The diffs fit the sources as they are now, so that a reader can try them."""
    (tmp_path / "change.diff").write_text(change)
    command = ["git", "apply", "--check", str(tmp_path / "change.diff")]
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_four_changes_are_shown() -> None:
    assert len(CHANGES) == 4


def test_generated_pages_match_the_registries() -> None:
    """The pages of the reference are those that the registries give."""
    reference = importlib.import_module("tools.reference")
    assert reference.main(["--check"]) == 0, "run: python tools/reference.py"


def test_the_comparison_shows_the_newest_figures() -> None:
    comparison = importlib.import_module("tools.comparison")
    assert comparison.main(["--check"]) == 0, "run: python tools/comparison.py"


def test_each_module_of_utils_has_a_subject() -> None:
    """The site documents every name of `accelerate.utils`; it groups them by the module that defines them."""
    reference = importlib.import_module("tools.reference")
    for home in importlib.import_module("accelerate.utils").EXPORTS:
        assert reference.subject_of(home) in reference.SUBJECTS


def test_each_public_method_of_the_accelerator_has_a_task() -> None:
    """The reference lists them by task. What is left is settings, and what the API has for few."""
    sections = importlib.import_module("tools.reference").accelerator_sections()
    members = [name for section in sections.values() for name in section]
    assert len(members) == len(set(members))
    own = {
        name
        for name, value in vars(accelerate.Accelerator).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }
    assert own & sections["Other members"].keys() == set()


def test_all_documents_are_in_the_index() -> None:
    index = (PROJECT / "docs/index.md").read_text()
    tree = set(
        re.findall(r"^(?:[\w ]+ <)?([\w./]+)>?$", index.split("```{toctree}", 1)[1], re.MULTILINE)
    )
    linked = set(re.findall(r"\]\(([\w./]+)\.md", index))
    pages = {
        str(path.relative_to(PROJECT / "docs").with_suffix(""))
        for path in (PROJECT / "docs").glob("*.md")
    }
    # Those for contributors are linked from CONTRIBUTING.md, and not part of the site.
    pages -= {"index", "architecture", "extending"}
    assert pages <= tree and pages <= linked
    assert {page for page in tree if "api" not in page} == linked


def test_the_readme_links_each_page() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)", (PROJECT / "README.md").read_text()))
    assert {f"docs/{path.name}" for path in (PROJECT / "docs").glob("*.md")} == linked


TROUBLESHOOTING = (PROJECT / "docs/troubleshooting.md").read_text()


@functools.cache
def sources() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text()) for path in (PROJECT / "src/accelerate").rglob("*.py")
    }


def test_each_error_class_has_an_entry() -> None:
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    errors = {name for name in dir(builtins) if isinstance(getattr(builtins, name), type)}
    errors = {name for name in errors if issubclass(getattr(builtins, name), BaseException)}
    own: set[str] = set()
    while found := {name for name, parents in bases.items() if parents & (errors | own)} - own:
        own |= found
    assert len(own) > 20
    assert {name for name in own if f"`{name}`" not in TROUBLESHOOTING} == set()


def test_quoted_messages_occur_in_the_source() -> None:
    """Each heading in code is a message; between its dots it has text that the package contains."""
    texts = "\n".join(
        "".join(
            str(part.value) if isinstance(part, ast.Constant) else "\0"
            for part in getattr(node, "values", [node])
        )
        for tree in sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )
    headings = re.findall(r"^### `(.*)`$", TROUBLESHOOTING, re.MULTILINE)
    assert len(headings) > 20
    pieces = {piece.strip() for heading in headings for piece in heading.split("...")} - {
        "",
        "CUDA out of memory",
    }
    assert {piece for piece in pieces if piece not in texts} == set()


def test_phrases_that_a_native_writer_avoids() -> None:
    """`tools/english.py` has the list: British spellings, "inside of", "versions of torch" and others."""
    english = importlib.import_module("tools.english")
    assert english.findings() == []


@pytest.mark.parametrize(
    "text, wrong",
    [
        ("the behaviour inside of a window", 2),
        ("versions of torch are one message", 2),
        ("the file is no ledger", 1),
        ("there is no file, which is no longer read; the mean of torch's values", 0),
    ],
)
def test_phrases_are_found(text: str, wrong: int) -> None:
    english = importlib.import_module("tools.english")
    found = [pattern for pattern, _ in english.PHRASES if re.search(pattern, text)]
    assert len(found) == wrong


def test_messages_and_help_texts_have_more_phrases() -> None:
    english = importlib.import_module("tools.english")
    text = "the file exists already and takes no lock: give another one, or leave it out"
    assert sum(bool(re.search(pattern, text)) for pattern, _ in english.IN_MESSAGES) == 4
    paths = {path.name for path, _, _, is_docstring in english.sources() if not is_docstring}
    assert {"options.py", "launch_help.py", "resolve.py"} <= paths
