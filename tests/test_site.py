# SPDX-License-Identifier: Apache-2.0
"""The built site in a browser: what people search for leads to the guide, and no page is wider than a phone.

`make docs` runs it. The variable SITE is the folder of the site.
"""

from __future__ import annotations

import functools
import http.server
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from browser import Browser, find

SITE = os.environ.get("SITE", "")
pytestmark = [
    pytest.mark.skipif(not SITE, reason="SITE is not set: `make docs` sets it"),
    pytest.mark.skipif(
        find() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
    ),
]
MEMORY, MACHINES = (
    {"docs/planning.html"},
    {
        "docs/launch_machines.html",
        "docs/launch_engines.html",
        "docs/recipes/several_machines.html",
    },
)
STANDSTILL, API = {"docs/hang.html"}, {"docs/reference/api/accelerator.html"}
# What is searched for, and the guides of which one comes first.
SEARCHES = {
    "out of memory": MEMORY,
    "OOM": MEMORY,
    "CUDA out of memory": MEMORY,
    "slurm": MACHINES,
    "multi-node": MACHINES,
    "LoRA": {"docs/recipes/one_gpu_lora.html", "docs/fine_tuning.html"},
    "hang": STANDSTILL,
    "deadlock": STANDSTILL,
    "NCCL timeout": STANDSTILL,
    "mixed precision": {"docs/quickstart.html"},
    "gradient accumulation": {"docs/quickstart.html"},
    "EMA": {"docs/recipes/ema.html"},
    "FSDP": {"docs/layouts/fsdp.html"},
    "activation checkpointing": {"docs/recipes/eight_gpus.html"},
    "resume": {"docs/checkpoints.html"},
    "wandb": {"docs/tracking.html"},
    "NaN": {"docs/training_options.html"},
    "slow": {"docs/slow.html"},
    "S3": {"docs/buckets.html"},
    "accumulate": API,
}


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=SITE)
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_leads_to_the_guide(query: str, browser: Browser, url: str) -> None:
    browser.open("about:blank")
    browser.open(f"{url}search.html?q={quote(query)}")
    browser.wait("!!document.querySelector('#search-results .search-summary')?.innerText")
    links = browser.evaluate(
        "[...document.querySelectorAll('#search-results li a')].map((link) => link.href)"
    )
    pages = [link.removeprefix(url).partition("?")[0].partition("#")[0] for link in links]
    assert len(pages) == len(set(pages))
    assert pages and pages[0] in SEARCHES[query], pages[:3]
    assert not {
        page for page in pages if page.startswith(("benchmarks", "CHANGELOG", "CONTRIBUTING"))
    }


def pages_to_look_at() -> list[str]:
    """All pages, and of those with source code the longest."""
    pages = sorted(Path(SITE).rglob("*.html"))
    sources = [page for page in pages if "_modules" in page.parts]
    longest = max(sources, key=lambda page: page.stat().st_size)
    kept = [page for page in pages if page not in sources or page == longest]
    names = [str(page.relative_to(SITE)) for page in kept]
    names.remove("index.html")
    return names


def open_page(browser: Browser, url: str) -> None:
    browser.open(url)
    browser.wait(f"location.href === {url!r} && document.readyState === 'complete'")


# Dashes, and the dashes of a flag, with which a line ends although text follows.
LONE_DASHES = """(() => {
  const found = [], range = document.createRange();
  const walker = document.createTreeWalker(document.querySelector('article'), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest('pre, table') || !/[-\u2013\u2014]/.test(node.data)) continue;
    for (const { index, 0: text } of node.data.matchAll(/(?<!\\S)[-\u2013\u2014]+(?!>)\\s*(?=\\S)/g)) {
      const tops = [index, index + text.length].map((at) => {
        range.setStart(node, at);
        range.setEnd(node, at + 1);
        return range.getBoundingClientRect().top;
      });
      if (Math.abs(tops[0] - tops[1]) > 4) found.push(node.data.slice(Math.max(0, index - 20), index + 20));
    }
  }
  return found;
})()"""


def test_pages_fit_a_phone_in_both_themes(browser: Browser, url: str) -> None:
    browser.size(390, 844, mobile=True)
    wide, dashes = {}, {}
    for name in pages_to_look_at():
        open_page(browser, url + name)
        for is_dark in (False, True):
            browser.dark(is_dark)
            width = browser.evaluate("document.documentElement.scrollWidth")
            if width > 390:
                wide[name] = width
        lone_dashes = browser.evaluate(LONE_DASHES)
        if lone_dashes:
            dashes[name] = lone_dashes
    assert wide == {} and dashes == {}


def test_the_contents_are_at_the_right_side(browser: Browser, url: str) -> None:
    browser.dark(False)
    for width in (1280, 1360, 1600):
        browser.size(width, 900)
        for name in ("docs/checkpoints.html", "docs/reference/api/accelerator.html"):
            open_page(browser, url + name)
            left, right, article = browser.evaluate(
                "(() => { const box = document.querySelector('.toc-drawer').getBoundingClientRect();"
                "return [box.left, box.right, document.querySelector('article').getBoundingClientRect().right]; })()"
            )
            assert article <= left < right <= width + 1
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            tables = browser.evaluate(
                "[...document.querySelectorAll('article > section table')].map("
                "(table) => Math.round(table.getBoundingClientRect().left))"
            )
            assert len(set(tables)) <= 1


def test_each_name_of_the_reference_leads_to_its_source() -> None:
    texts: dict[Path, str] = {}
    links, without = 0, 0
    for page in Path(SITE, "docs/reference/api").glob("*.html"):
        text = page.read_text()
        for kind in ("function", "class", "method", "property"):
            for entry in re.findall(rf'<dl class="py {kind}">\s*<dt.*?</dt>', text, re.S):
                link = re.search(
                    r'href="([^"]*_modules/[^"#]*)#([^"]*)"><span class="viewcode', entry
                )
                if link is None:
                    # It is a method of torch, or a function that another function has made.
                    without += 1
                    continue
                source = (page.parent / link[1]).resolve()
                if source not in texts:
                    texts[source] = source.read_text()
                assert f'id="{link[2]}"' in texts[source]
                links += 1
    assert links > 800 and without < 0.1 * links
