# SPDX-License-Identifier: Apache-2.0
"""The built site in a browser: what people search for leads to the guide, and no page is wider than a phone.

`make docs` runs it. The variable SITE is the folder of the site.
"""

from __future__ import annotations

import functools
import http.server
import os
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
    assert pages and pages[0] in SEARCHES[query], pages[:3]
    assert not {
        page for page in pages if page.startswith(("benchmarks", "CHANGELOG", "CONTRIBUTING"))
    }


def test_no_page_is_wider_than_a_phone(browser: Browser, url: str) -> None:
    browser.size(390, 844, mobile=True)
    wide = {}
    for page in sorted(Path(SITE).rglob("*.html")):
        name = str(page.relative_to(SITE))
        if name == "index.html" or "class=" not in page.read_text():
            continue
        browser.open("about:blank")
        browser.open(url + name)
        browser.wait(f"location.href === {url + name!r} && document.readyState === 'complete'")
        width = browser.evaluate("document.documentElement.scrollWidth")
        if width > 390:
            wide[name] = width
    assert wide == {}
