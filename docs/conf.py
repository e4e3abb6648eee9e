# SPDX-License-Identifier: Apache-2.0
"""Sphinx: the Markdown files of the repository as a site that needs no network. `make docs` builds it."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes

import accelerate

# The source folder is the repository, so that links between its documents lead to pages of the site.
ROOT = Path(__file__).parents[1]

project = "accelerate"
version = release = accelerate.__version__
root_doc = "docs/index"
include_patterns = ["docs/**.md", "*.md", "examples/README.md", "benchmarks/**.md"]
# Pages for those who change the package: CONTRIBUTING.md links them.
FOR_CONTRIBUTORS = [
    "docs/architecture.md",
    "docs/extending.md",
    "docs/reference/torch_internals.md",
]
exclude_patterns = [".*", "build", "runs", "outputs", "src", "tests", "**/__pycache__"]
exclude_patterns += FOR_CONTRIBUTORS

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_heading_anchors = 4

# Docstrings are Google style; single backticks are code.
default_role = "code"
# The dashes of parameter lists only: quotes in docstrings are Python.
smartquotes_action = "D"
napoleon_custom_sections = [("Fields", "params_style"), ("Sizes", "params_style")]
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"accelerate {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_logo = "static/logo.svg"
html_favicon = "static/favicon.svg"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0e7490", "color-brand-content": "#0e7490"},
    "dark_css_variables": {"color-brand-primary": "#4fc3dc", "color-brand-content": "#4fc3dc"},
}
html_copy_source = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"


def _show_examples_as_code(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn the indented lines below `Example:` of a docstring into a block of code."""
    for number, line in enumerate(lines):
        if line.strip() in ("Example:", "Examples:"):
            indent = line[: len(line) - len(line.lstrip())]
            lines[number : number + 1] = [
                f"{indent}.. rubric:: Example",
                "",
                f"{indent}.. code-block:: python",
                "",
            ]
            return


def _drop_links_out_of_the_site(app: Any, name: str, source: list[str]) -> None:
    """Leave the text of a link to a folder or to a page for contributors: the site has no page for it."""
    pages = [ROOT / page for page in FOR_CONTRIBUTORS]

    def text(match: re.Match[str]) -> str:
        target = (ROOT / name).parent / match[2]
        is_outside = target.is_dir() or target.resolve() in pages
        return match[1] if is_outside else match[0]

    source[0] = re.sub(r"\[([^\]]*)\]\(([\w./-]+)(?:#[\w-]+)?\)", text, source[0])


def _index_search_words(app: Any, name: str, source: list[str]) -> None:
    """Turn `<!-- search: OOM, out of memory -->` into entries of the index, which a search shows first."""

    def directive(match: re.Match[str]) -> str:
        return (
            "```{index} "
            + ", ".join(f"!{phrase.strip()}" for phrase in match[1].split(","))
            + "\n```"
        )

    source[0] = re.sub(r"^<!-- search: (.+) -->$", directive, source[0], flags=re.MULTILINE)


def _classify(app: Any, tree: Any) -> None:
    """Leave pages about the project out of the search, and some out of the table of contents."""
    name, metadata = app.env.docname, app.env.metadata[app.env.docname]
    if name in ("CHANGELOG", "CONTRIBUTING") or name.startswith("benchmarks/"):
        metadata["no-search"] = True
    # The security policy is linked from the page on security.
    if name == "SECURITY" or name.startswith("benchmarks/results/"):
        metadata["orphan"] = True


def _name_the_definition(app: Any, tree: Any) -> None:
    """Give inherited methods the class that defines them: its source is then linked."""
    for entry in tree.findall(addnodes.desc_signature):
        if not entry.get("module"):
            continue
        first, *names = entry["fullname"].split(".")
        definition: Any = getattr(import_module(entry["module"]), first, None)
        for name in names:
            definition = inspect.getattr_static(definition, name, None)
        definition = getattr(definition, "fget", definition)
        definition = inspect.unwrap(getattr(definition, "__func__", definition))
        qualified_name = getattr(definition, "__qualname__", "<")
        module = getattr(definition, "__module__", None) or ""
        if "<" not in qualified_name and module.startswith("accelerate."):
            entry["module"] = module
            entry["fullname"] = qualified_name


def _end_names_with_a_colon(app: Any, tree: Any, name: str) -> None:
    """Write `name: text` in lists of parameters. A dash between them may be the last sign of a line on a phone."""
    for text in list(tree.findall(nodes.Text)):
        description = re.sub(r"^\s+(--|–)\s+", ": ", text)
        if description != text:
            text.parent.replace(text, nodes.Text(description))


def _keep_short_names_together(app: Any, tree: Any, name: str) -> None:
    """Mark code whose words fit a phone, or a column of its tables: none breaks there, not even behind a dash."""
    in_tables = {
        id(code) for cell in tree.findall(nodes.entry) for code in cell.findall(nodes.literal)
    }
    for literal in tree.findall(nodes.literal):
        longest = max(map(len, literal.astext().split()), default=0)
        most = 24 if id(literal) in in_tables else 40
        if longest <= most:
            literal["classes"].append("short")


def _list_pages_once(
    app: Any, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """Add a script to the page of the search."""
    if page == "search":
        app.add_js_file("search.js")


def _write_start_page(app: Any, error: Exception | None) -> None:
    """Write the page at the root of the site, which leads to the index."""
    if error is None and app.builder.format == "html":
        page = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>accelerate</title>\n'
        (Path(app.outdir) / "index.html").write_text(page)


def _show_effective_defaults(
    app: Any,
    what: str,
    name: str,
    found: object,
    options: object,
    signature: str | None,
    returns: str | None,
) -> tuple[str | None, str | None]:
    """Show what an argument that was not given means, instead of the name of its marker."""
    return signature and signature.replace("_NOT_GIVEN", "False"), returns


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", _show_examples_as_code, priority=400)
    app.connect("autodoc-process-signature", _show_effective_defaults)
    app.connect("source-read", _drop_links_out_of_the_site)
    app.connect("source-read", _index_search_words)
    app.connect("doctree-read", _classify)
    # Before `viewcode` looks for the sources. The modules are then those that define the names.
    app.connect("viewcode-follow-imported", lambda app, module, name: module)
    app.connect("doctree-read", _name_the_definition, priority=400)
    app.connect("doctree-resolved", _end_names_with_a_colon)
    app.connect("doctree-resolved", _keep_short_names_together)
    app.connect("html-page-context", _list_pages_once)
    app.connect("build-finished", _write_start_page)
