# SPDX-License-Identifier: Apache-2.0
"""Write pictures of the monitor, a report and pages of the built site, at two widths, in light and dark.

python tools/screenshots.py build/screenshots                   of a run with invented values
python tools/screenshots.py build/screenshots --run runs/demo   of a recorded run

The site is that of `make docs`.
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
    "docs/first_training.html",
    "docs/comparison.html",
    "docs/parallelism.html",
    "docs/layouts/fsdp.html",
    "docs/reference/api/accelerator.html",
    "docs/launch.html",
    "docs/hang.html",
)


@contextlib.contextmanager
def served(run: Path) -> Iterator[str]:
    """The address of the monitor's page of a run."""
    with Server(open_runs([str(run)]), port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.url
        finally:
            server.shutdown()
            thread.join()


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
    options = parser.parse_args(arguments)
    if find() is None:
        parser.error("no Chromium is installed (Debian: apt-get install chromium)")
    if absent := [page for page in PAGES if not (options.site / page).is_file()]:
        parser.error(f"{options.site} has no {absent[0]}: run `make docs`")
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as temporary, Browser(Path(temporary, "profile")) as browser:
        run = options.run or planted_run(Path(temporary, "run"), 1200, 4, slow=2)
        page = Path(temporary, "report.html")
        report.main([str(run), "-o", str(page)])
        with served(run) as url:
            targets = [("monitor", url), ("report", page.as_uri())]
            targets += [
                (f"site-{Path(name).stem}", (options.site.resolve() / name).as_uri())
                for name in PAGES
            ]
            for name, url in targets:
                for size in (DESKTOP, PHONE):
                    for scheme in ("light", "dark"):
                        browser.dark(scheme == "dark")
                        browser.size(*size, mobile=size == PHONE)
                        open_page(browser, url)
                        path = options.folder / f"{name}-{size[0]}-{scheme}.png"
                        browser.screenshot(path, full=not name.startswith("site"))
                        width = browser.evaluate("document.documentElement.scrollWidth")
                        problems = [
                            *browser.errors,
                            *([f"it is {width} pixels wide"] if width > size[0] else []),
                        ]
                        failed |= bool(problems)
                        print("\n  ".join([str(path), *problems]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
