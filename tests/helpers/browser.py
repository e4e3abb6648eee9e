# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium that is driven through its DevTools protocol, without a package."""

from __future__ import annotations

import base64
import json
import os
import secrets
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find() -> str | None:
    """The path of a Chromium, None if none is installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page. `errors` are what the page's console has got.

    Args:
        folder: an empty folder for the browser's profile.
    """

    def __init__(self, folder: Path, timeout: float = 60) -> None:
        program = find()
        assert program, "no Chromium is installed"
        self.timeout = timeout
        self.errors: list[str] = []
        self._number = 0
        arguments = (
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        )
        others = (
            "--remote-debugging-port=0",
            f"--user-data-dir={folder}",
            "--hide-scrollbars",
            "about:blank",
        )
        self.process = subprocess.Popen(
            [program, *arguments, *others],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.port = int(self._until(lambda: (folder / "DevToolsActivePort").read_text().split()[0]))
        pages = self._until(lambda: [page for page in self._get("/json") if page["type"] == "page"])
        self._connect(pages[0]["webSocketDebuggerUrl"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.call("Browser.close")
        except (OSError, AssertionError):
            pass
        self.socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, 9)
            self.process.wait(10)

    def _until(self, attempt: Any) -> Any:
        end = time.monotonic() + self.timeout
        while True:
            try:
                if found := attempt():
                    return found
            except (OSError, IndexError):
                pass
            assert time.monotonic() < end, "the browser did not start"
            assert self.process.poll() is None, (
                f"the browser has exited with {self.process.returncode}"
            )
            time.sleep(0.05)

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
            return json.load(answer)

    # -- WebSocket (RFC 6455), as far as the protocol needs it

    def _connect(self, url: str) -> None:
        path = url.split(str(self.port), 1)[1]
        self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=self.timeout)
        key = base64.b64encode(secrets.token_bytes(16)).decode()
        self.socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.stream = self.socket.makefile("rb")
        assert b"101" in self.stream.readline()
        while self.stream.readline().strip():
            pass

    def _send(self, text: str) -> None:
        data, mask = text.encode(), secrets.token_bytes(4)
        size = len(data)
        length = bytes([0x80 | size]) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
        if size >= 1 << 16:
            length = b"\xff" + size.to_bytes(8, "big")
        masked = bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))
        self.socket.sendall(b"\x81" + length + mask + masked)

    def _receive(self) -> dict[str, Any]:
        data = b""
        while True:
            first, second = self.stream.read(2)
            size = second & 0x7F
            if size >= 126:
                size = int.from_bytes(self.stream.read(2 if size == 126 else 8), "big")
            part = self.stream.read(size)
            if first & 0x0F <= 2:
                data += part
                if first & 0x80:
                    return dict(json.loads(data))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and note what the page reports meanwhile."""
        self._number += 1
        self._send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = self._receive()
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return dict(message["result"])
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, values: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.errors.append(
                str(details.get("exception", {}).get("description") or details["text"])
            )
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.errors.append(f"{values['entry']['text']} {values['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled" and values["type"] in ("error", "assert"):
            self.errors.append(str(values["args"]))

    # -- what tests do

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, expression: str, timeout: float | None = None) -> Any:
        """Wait until an expression is true, and return its value."""
        end = time.monotonic() + (timeout or self.timeout)
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression} is still {found!r}; errors: {self.errors}"
            time.sleep(0.02)
        return found

    def size(self, width: int, height: int, mobile: bool = False, scale: float = 1) -> None:
        """Set the size of the window in CSS pixels, and how many pixels of a picture one of them is wide."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)

    def dark(self, on: bool) -> None:
        """Set the colour scheme that the system prefers."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path, full: bool = False) -> None:
        """Write a picture of the window, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        path.write_bytes(base64.b64decode(found["data"]))
