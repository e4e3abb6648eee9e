# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser, on a run that grows: curves follow, the slow rank is marked, and nothing goes wrong.

With the variable SCREENSHOTS each test leaves a picture of the page in that folder (`make screenshots`).
"""

import os
import threading
import time
from pathlib import Path

import pytest
from browser import Browser, find
from planted_runs import START, planted_records, planted_run, write_lines, write_steps

from accelerate.commands import report
from accelerate.monitor.run import open_runs
from accelerate.monitor.server import Server
from accelerate.telemetry.records import events_file

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        find() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
    ),
]
# The pixels of a chart that have the colour of a variable.
COLORED = """((card, name) => {
  const cards = [...document.querySelectorAll('.card')];
  const canvas = cards.find((box) => box.querySelector('h2')?.textContent.startsWith(card)).querySelector('canvas');
  const probe = canvas.getContext('2d'), data = probe.getImageData(0, 0, canvas.width, canvas.height).data;
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    count += Math.abs(data[i] - r) + Math.abs(data[i + 1] - g) + Math.abs(data[i + 2] - b) < 24 && data[i + 3] > 200;
  return count;
})"""
STEP = "Number(document.querySelector('.tile b')?.textContent.replaceAll(',', ''))"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def serve():
    servers = []

    def start(*folders, host=None):
        server = Server(open_runs([str(folder) for folder in folders]), host, 0)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        servers.append((server, thread))
        return server.url

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_errors(browser, request):
    browser.errors.clear()
    browser.dark(False)
    browser.size(1280, 900)
    yield
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.screenshot(Path(folder, f"{request.node.name}.png"), full=True)
    browser.open("about:blank")
    assert browser.errors == []


def test_a_live_run(browser, serve, tmp_path):
    records = [
        planted_records(400, rank, "data" if rank == 1 else None, wait="backward")
        for rank in range(2)
    ]
    browser.open(serve(tmp_path))
    browser.wait(
        "document.querySelector('.empty')?.textContent.startsWith('Waiting for the first step of')"
    )
    for rank in range(2):
        write_steps(tmp_path, rank, 2, records[rank][:100])
    browser.wait(f"{STEP} === 100")
    browser.wait("document.querySelectorAll('canvas').length >= 7")
    assert browser.evaluate(f"{COLORED}('Loss', '--run0')") > 100
    assert browser.evaluate(f"{COLORED}('Step time of each rank', '--slow')") == 0
    latencies = []
    for stop in range(120, 401, 40):
        for rank in range(2):
            write_steps(
                tmp_path,
                rank,
                2,
                records[rank][stop - 20 if stop == 120 else stop - 40 : stop],
                "ab",
            )
        begin = time.monotonic()
        browser.wait(f"{STEP} === {stop}")
        latencies.append(time.monotonic() - begin)
    print(f"a new step is shown after {min(latencies):.2f} to {max(latencies):.2f} s")
    browser.wait(
        "[...document.querySelectorAll('.tile.slow b')].some((tile) => tile.textContent === 'rank 1')"
    )
    browser.wait(f"{COLORED}('Step time of each rank', '--slow') > 200")
    browser.wait(
        "document.querySelector('#findings').textContent.includes('Rank 1 on node0 was slow')"
    )
    write_lines(
        events_file(tmp_path, 0),
        {"time": time.time(), "event": "hang", "message": "<img src=x onerror=alert(1)>"},
    )
    browser.wait("document.querySelector('#events')?.textContent.includes('onerror')")
    assert browser.evaluate("document.querySelectorAll('#events img').length") == 0


def test_zoom_and_hover(browser, serve, tmp_path):
    browser.open(serve(planted_run(tmp_path, 4000, 3, slow=2)))
    browser.wait("document.querySelectorAll('canvas').length >= 8")
    browser.evaluate("document.querySelector('canvas').scrollIntoView({block: 'center'})")
    box = browser.evaluate(
        "JSON.parse(JSON.stringify(document.querySelector('canvas').getBoundingClientRect()))"
    )
    y = box["y"] + 80

    def mouse(kind, part, **more):
        x = box["x"] + 58 + part * (box["width"] - 68)
        browser.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    mouse("mouseMoved", 0.5)
    browser.wait(
        "!document.querySelector('#tip').hidden && /step [12],\\d+/.test(document.querySelector('#tip').textContent)"
    )
    mouse("mousePressed", 0.25, button="left", clickCount=1)
    mouse("mouseMoved", 0.4, button="left", buttons=1)
    mouse("mouseReleased", 0.5, button="left", clickCount=1)
    mouse("mousePressed", 0.1, button="left", clickCount=1)
    mouse("mouseReleased", 0.1, button="left", clickCount=1)
    browser.wait("document.querySelector('#findings').textContent.includes('Steps 9')")
    assert browser.evaluate("document.querySelector('#all').ariaPressed") == "false"
    mouse("mousePressed", 0.3, button="left", clickCount=2)
    mouse("mouseReleased", 0.3, button="left", clickCount=2)
    browser.wait("document.querySelector('#findings').textContent.includes('Steps 1 to 4,000')")
    browser.evaluate("document.querySelector('#tail').click()")
    browser.wait("document.querySelector('#findings').textContent.includes('to 4,000') && "
                 "!document.querySelector('#findings').textContent.includes('Steps 1 to')")  # fmt: skip


def test_runs_side_by_side_in_both_themes_and_on_a_phone(browser, serve, tmp_path):
    folders = [
        planted_run(tmp_path / name, steps, 2, slow=1)
        for name, steps in (("first", 900), ("second", 600))
    ]
    browser.dark(True)
    browser.size(390, 800, mobile=True)
    browser.open(serve(*folders, host="127.0.0.1"))
    browser.wait("document.querySelectorAll('tbody tr').length >= 2")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    for paint in ("--run0", "--run1"):
        assert browser.evaluate(f"{COLORED}('Loss', '{paint}')") > 50
    browser.evaluate("document.querySelector('#theme').click()")
    assert browser.evaluate("document.documentElement.dataset.theme") == "light"
    browser.evaluate("document.querySelectorAll('#runs input')[1].click()")
    browser.wait(f"{COLORED}('Loss', '--run1') === 0")
    browser.evaluate("localStorage.clear()")


def test_a_report_in_one_file(browser, tmp_path):
    folder = planted_run(tmp_path / "run", 2000, 4, slow=2)
    (folder / "note.txt").write_text("stuck")
    write_lines(
        events_file(folder, 0),
        {"time": START + 9, "event": "hang", "path": "note.txt", "message": "<b>"},
    )
    report.main([str(folder), "-o", str(tmp_path / "report.html")])
    browser.open((tmp_path / "report.html").as_uri())
    browser.wait("document.querySelectorAll('canvas').length >= 8")
    assert browser.evaluate(f"{COLORED}('Loss', '--run0')") > 100
    assert browser.evaluate(f"{COLORED}('Step time of each rank', '--slow')") > 200
    assert browser.evaluate(
        "document.querySelector('#findings').textContent.includes('Rank 2 on node0 was slow')"
    )
    assert browser.evaluate("document.querySelector('#events a').href").endswith("/run/note.txt")
    assert browser.evaluate("document.querySelector('#status').textContent.includes('last step')")
    browser.evaluate("document.querySelector('#in').click()")
    assert browser.evaluate("document.querySelector('#all').ariaPressed") == "false"
    browser.wait(f"{COLORED}('Loss', '--run0') > 100")
