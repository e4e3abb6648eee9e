# SPDX-License-Identifier: Apache-2.0
"""Write pictures of the README, the built site, the monitor and a report, at two widths, in light and dark.

python tools/screenshots.py build/screenshots                   the monitor shows a run with invented values
python tools/screenshots.py build/screenshots --run runs/demo   the monitor shows a recorded run
python tools/screenshots.py build/screenshots --all             all pages of the site

`make docs` runs it after it has built the site.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT / "tests" / "helpers"))

from browser import Browser, find  # noqa: E402
from planted_runs import planted_run  # noqa: E402

from accelerate.commands import report  # noqa: E402
from accelerate.monitor.run import open_runs  # noqa: E402
from accelerate.monitor.server import Server  # noqa: E402

DESKTOP, PHONE = (1280, 1600), (390, 1200)
PAGES = (
    "docs/index.html",
    "docs/quickstart.html",
    "docs/checkpoints.html",
    "docs/hang.html",
    "docs/reference/api/accelerator.html",
)
# The column of a README on a page of a repository, and how it looks there.
README_PAGE = """<!doctype html>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>README</title><base href="{base}/">
<style>
:root {{ --text: light-dark(#1f2328, #f0f6fc); --page: light-dark(#fff, #0d1117); --line: light-dark(#d1d9e0, #3d444d);
  --code: light-dark(#f6f8fa, #151b23); --link: light-dark(#0969da, #4493f8); }}
body {{ margin: 0; background: var(--page); color: var(--text); font: 16px/1.5 -apple-system, "Segoe UI", "Noto Sans",
  Helvetica, Arial, "DejaVu Sans", sans-serif; overflow-wrap: break-word; }}
article {{ box-sizing: border-box; max-width: 896px; margin: 0 auto; padding: 32px; }}
h1, h2 {{ border-bottom: 1px solid var(--line); padding-bottom: 0.3em; }}
a {{ color: var(--link); text-decoration: none; }}
img {{ max-width: 100%; }}
code {{ background: var(--code); font: 85% ui-monospace, Menlo, "DejaVu Sans Mono", monospace; padding: 0.2em 0.4em;
  border-radius: 6px; }}
pre {{ background: var(--code); padding: 16px; overflow: auto; line-height: 1.45; border-radius: 6px; }}
pre code {{ padding: 0; background: none; font-size: 13.6px; }}
table {{ display: block; width: max-content; max-width: 100%; overflow: auto; border-collapse: collapse; }}
th, td {{ border: 1px solid var(--line); padding: 6px 13px; }}
@media (max-width: 600px) {{ article {{ padding: 16px; }} }}
</style>
<article>{content}</article>
"""


@contextlib.contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of the monitor's page of a run."""
    with Server(open_runs([str(run)]), port=0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


def readme_page(folder: Path) -> Path:
    """Write the README as a page of a repository shows it."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    content = markdown.render((PROJECT / "README.md").read_text())
    page = folder / "readme.html"
    page.write_text(README_PAGE.format(base=PROJECT.as_uri(), content=content))
    return page


def open_page(browser: Browser, url: str) -> None:
    """Open a page and wait until it is drawn."""
    browser.errors.clear()
    browser.open("about:blank")
    browser.open(url)
    browser.wait(f"location.href === {url!r} && document.readyState === 'complete'")
    # The page of a run draws what it has received.
    browser.wait(
        "!document.querySelector('#charts') || document.querySelectorAll('canvas').length >= 5"
    )


def take(browser: Browser, folder: Path, name: str, url: str) -> bool:
    """Write the four pictures of a page. Returns whether it has no errors, and is never wider than its window."""
    is_good = True
    for size in (DESKTOP, PHONE):
        browser.size(*size, mobile=size == PHONE)
        for scheme in ("light", "dark"):
            browser.dark(scheme == "dark")
            open_page(browser, url)
            path = folder / f"{name}-{size[0]}-{scheme}.png"
            browser.screenshot(path, full=name in ("readme", "monitor", "report"))
            problems = list(browser.errors)
            width = browser.evaluate("document.documentElement.scrollWidth")
            if width > size[0]:
                problems.append(f"it is {width} pixels wide")
            if problems:
                is_good = False
                print("\n  ".join([str(path), *problems]))
    return is_good


def main(arguments: list[str] | None = None) -> int:
    """Write the pictures. Returns 1 if a page has errors, or is wider than its window, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument(
        "--run", type=Path, help="folder of a recorded run (default: a run with invented values)"
    )
    parser.add_argument(
        "--site", type=Path, default=PROJECT / "build" / "site", help="the built site"
    )
    parser.add_argument("--all", action="store_true", help="all pages of the site")
    options = parser.parse_args(arguments)
    if find() is None:
        print("No Chromium is installed, so there are no pictures: apt-get install chromium")
        return 0
    pages = list(PAGES)
    if options.all:
        guides = sorted(options.site.glob("docs/**/*.html"))
        pages = [str(page.relative_to(options.site)) for page in guides]
    options.folder.mkdir(parents=True, exist_ok=True)
    are_good = True
    with tempfile.TemporaryDirectory() as temporary, Browser(Path(temporary, "profile")) as browser:
        run = options.run or planted_run(Path(temporary, "run"), 1200, 4, slow=2)
        page = Path(temporary, "report.html")
        report.main([str(run), "-o", str(page)])
        with served(run) as url:
            targets = {
                "readme": readme_page(Path(temporary)).as_uri(),
                "monitor": url,
                "report": page.as_uri(),
            }
            for name in pages:
                address = (options.site.resolve() / name).as_uri()
                targets[name.removesuffix(".html").replace("/", "-")] = address
            for name, address in targets.items():
                are_good &= take(browser, options.folder, name, address)
    print(f"{4 * len(targets)} pictures are in {options.folder}")
    return int(not are_good)


if __name__ == "__main__":
    sys.exit(main())
