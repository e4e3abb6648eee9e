# SPDX-License-Identifier: Apache-2.0
"""Write pictures of a report and of pages of the built site, in light and dark: python tools/screenshots.py FOLDER."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

PROJECT = Path(__file__).parents[1]
sys.path.insert(0, str(PROJECT / "tests" / "helpers"))

from browser import Browser, find  # noqa: E402
from planted_runs import planted_run  # noqa: E402

from accelerate.commands import report  # noqa: E402

DESKTOP, PHONE = (1280, 1600), (390, 1200)
# Pages of the site, and the size of the window.
PAGES = {
    "docs/index.html": DESKTOP,
    "docs/first_training.html": DESKTOP,
    "docs/comparison.html": DESKTOP,
    "docs/parallelism.html": DESKTOP,
    "docs/reference/api/accelerator.html": DESKTOP,
    "docs/launch.html": PHONE,
}


def main(arguments: list[str] | None = None) -> int:
    """Write the pictures. Returns 1 if a page has errors, or is wider than its window, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder for the pictures")
    parser.add_argument("--site", type=Path, default=PROJECT / "build" / "site", help="the built site")
    options = parser.parse_args(arguments)
    if find() is None:
        parser.error("no Chromium is installed (Debian: apt-get install chromium)")
    if absent := [page for page in PAGES if not (options.site / page).is_file()]:
        parser.error(f"{options.site} has no {absent[0]}: run `make docs`")
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = False
    with tempfile.TemporaryDirectory() as temporary, Browser(Path(temporary, "profile")) as browser:
        run, page = planted_run(Path(temporary, "run"), 1200, 2, slow=1), Path(temporary, "report.html")
        report.main([str(run), "-o", str(page)])
        targets = [("report", page.as_uri(), DESKTOP), ("report-phone", page.as_uri(), PHONE)]
        for name, size in PAGES.items():
            short = f"site-{Path(name).stem}" + "-phone" * (size == PHONE)
            targets.append((short, (options.site.resolve() / name).as_uri(), size))
        for name, url, size in targets:
            for scheme in ("light", "dark"):
                browser.errors.clear()
                browser.dark(scheme == "dark")
                browser.size(*size, mobile=size == PHONE)
                browser.open("about:blank")
                browser.open(url)
                browser.wait(f"location.href === {url!r} && document.readyState === 'complete'")
                browser.screenshot(options.folder / f"{name}-{scheme}.png")
                width = browser.evaluate("document.documentElement.scrollWidth")
                problems = [*browser.errors, *([f"it is {width} pixels wide"] if width > size[0] else [])]
                failed |= bool(problems)
                print("\n  ".join([f"{options.folder / name}-{scheme}.png", *problems]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
