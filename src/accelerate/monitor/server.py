# SPDX-License-Identifier: Apache-2.0
"""The page on localhost: its files, the data that it requests, and who may request it."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import math
import os
import re
import secrets
import shutil
import socket
import socketserver
import sys
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any, ClassVar
from urllib.parse import parse_qs, unquote, urlsplit

from ..core.errors import ConfigurationError
from .current import METRICS_TYPE, metrics
from .page_data import packed, run_data
from .run import Run
from .summary import Summary, summarize
from .view import view

# The port that is tried first, and how many after it.
DEFAULT_PORT = 6606
_PORTS = 100
# Seconds for which what was read answers further requests, and for which a summary of a growing run is shown: at
# least, and in times of what it took.
_AGE = 0.1
_SUMMARY_AGE = 2.0
_SUMMARY_TIMES = 10
_MOST_PIXELS = 4000
# Connections at the same time, the seconds that a request may take to arrive, and those of a pause where the process
# has no file descriptor left.
MOST_CONNECTIONS = 64
REQUEST_SECONDS = 10.0
PAUSE = 1.0
_MOST_SUMMARIES = 64

_PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
}
# What needs no token: these files are the same for every run.
_OPEN_PATHS = ("/page.js", "/charts.js", "/page.css")
# A Host header: an IPv6 address in brackets or a name, and perhaps a port.
_HOST = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]*)?")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Serves the page of some runs.

    Args:
        runs: the runs.
        host: the address to listen on. None: 127.0.0.1, and requests need no token.
        port: the port. None: the first free one from `DEFAULT_PORT` on.

    Raises:
        ConfigurationError: the port is in use, or the address is not one of this machine.
    """

    daemon_threads = True
    request_queue_size = 64
    # Windows would let a second server take the same port.
    allow_reuse_address: bool = os.name != "nt"

    def __init__(
        self, runs: Sequence[Run], host: str | None = None, port: int | None = None
    ) -> None:
        self.runs: list[Run] = list(runs)
        self.token: str | None = None if host is None else secrets.token_urlsafe(16)
        self.host: str = host or "127.0.0.1"
        if ":" in self.host:
            self.address_family: socket.AddressFamily = socket.AF_INET6
        # (run, start, stop) -> the version of the run, until when it is shown while the run grows, and the summary
        self._summaries: dict[tuple[int, int | None, int | None], tuple[int, float, Summary]] = {}
        # Connection -> when its present request began; infinite while it is answered.
        self.waiting: dict[Any, float] = {}
        chosen = range(DEFAULT_PORT, DEFAULT_PORT + _PORTS) if port is None else [port]
        for candidate in chosen:
            try:
                super().__init__((self.host, candidate), Handler)
                return
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise ConfigurationError(
                        f"--host {self.host}: {error.strerror or error}"
                    ) from None
                if error.errno == errno.EADDRINUSE:
                    reason = "is in use"
                else:
                    reason = "needs more rights"
        if port is None:
            raise ConfigurationError(
                f"all ports from {chosen[0]} to {chosen[-1]} are in use: choose one with --port"
            )
        raise ConfigurationError(
            f"port {port} {reason}: choose another with --port, or omit --port"
        )

    @property
    def url(self) -> str:
        """The address of the page."""
        shown = f"[{self.host}]" if ":" in self.host else self.host
        if self.host in ("0.0.0.0", "::"):
            shown = socket.gethostname()
        return f"http://{shown}:{self.server_port}/" + (
            f"?token={self.token}" if self.token else ""
        )

    def server_bind(self) -> None:
        """Bind the port. HTTPServer would look up the name of the machine, which may take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name: str = self.host
        self.server_port: int = int(self.server_address[1])

    def get_request(self) -> Any:
        """Accept a connection, or pause: the loop would otherwise try again at once."""
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(PAUSE)
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether there is a place for a connection."""
        if len(self.waiting) >= MOST_CONNECTIONS:
            return False
        self.waiting[request] = time.monotonic()
        return True

    def service_actions(self) -> None:
        """Close the connections whose request has not arrived in time. The loop calls this twice a second."""
        for connection, begin in list(self.waiting.items()):
            if time.monotonic() - begin > REQUEST_SECONDS:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.waiting.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore browsers that close a connection; report everything else."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    def accepts_host(self, header: str | None) -> bool:
        """Whether a Host header names this machine.

        A foreign page whose name was pointed to this address (DNS rebinding) sends its own name.
        """
        match = _HOST.fullmatch(header or "")
        host = (match[1] or match[2]).lower() if match else ""
        if host in ("127.0.0.1", "localhost", "::1"):
            return True
        if self.token is None:
            return False
        try:
            ipaddress.ip_address(host)
            return True
        except ValueError:
            return host in {
                self.host.lower(),
                socket.gethostname().lower(),
                socket.getfqdn().lower(),
            }

    def accepts_token(self, given: str) -> bool:
        """Whether a request has the token, if one is needed."""
        return self.token is None or hmac.compare_digest(given.encode(), self.token.encode())

    def answer(self, start: int | None, stop: int | None, pixels: int, known: str) -> bytes | None:
        """The data of the page, None if the browser has it: `known` is the version that it has."""
        versions = [run.refresh(_AGE) for run in self.runs]
        version = self._version(versions, start, stop)
        if known == version:
            return None
        runs = [self._run_data(number, start, stop, pixels) for number in range(len(self.runs))]
        return packed(self._version(versions, start, stop), runs)

    def _version(self, versions: list[int], start: int | None, stop: int | None) -> str:
        """The versions of the runs and of their summaries: one that is out of date is made anew after a while."""
        now = time.monotonic()
        made = []
        for number, version in enumerate(versions):
            old = self._summaries.get((number, start, stop))
            made.append(old[0] if old and now < old[1] else version)
        return ".".join(map(str, [*versions, *made]))

    def _run_data(
        self, number: int, start: int | None, stop: int | None, pixels: int
    ) -> dict[str, Any]:
        run = self.runs[number]
        with run.lock:
            # Of several runs one may have no step of the range.
            outside = start is not None and start > max(1, run.last_step)
            shown = view(run, run.last_step + 1 if outside else start, stop, pixels)
            return run_data(
                run, shown, self._summary((number, start, stop), run, None if outside else start)
            )

    def _summary(
        self, key: tuple[int, int | None, int | None], run: Run, start: int | None
    ) -> Summary:
        now = time.monotonic()
        old = self._summaries.get(key)
        if old and (old[0] == run.version or now < old[1]):
            return old[2]
        summary = summarize(run, start, key[2])
        # One of many ranks takes longer than the data of the page.
        until = time.monotonic() + max(_SUMMARY_AGE, _SUMMARY_TIMES * (time.monotonic() - now))
        while len(self._summaries) >= _MOST_SUMMARIES:
            self._summaries.pop(next(iter(self._summaries)), None)
        self._summaries[key] = run.version, until, summary
        return summary


class Handler(BaseHTTPRequestHandler):
    """Answers one connection of a browser."""

    server: Server
    server_version = "accelerate"
    sys_version = ""
    protocol_version = "HTTP/1.1"
    timeout: ClassVar[float | None] = REQUEST_SECONDS

    def do_GET(self) -> None:
        """Answer with a file of the page, with data, or with a file of a run."""
        self.server.waiting[self.connection] = math.inf
        self._answer()
        self.server.waiting[self.connection] = time.monotonic()

    def _answer(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # what follows is a body, which is not read
        try:
            url = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST, "There is no page at this address.")
            return
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or url.netloc or not self.server.accepts_host(hosts[0]):
            self._refuse(
                HTTPStatus.FORBIDDEN,
                "This host name does not belong to this machine. Use the printed address.",
            )
        elif url.path not in _OPEN_PATHS and not self.server.accepts_token(query.get("token", "")):
            self._refuse(
                HTTPStatus.FORBIDDEN, "The token is missing or wrong. Use the full printed address."
            )
        elif url.path in _PAGE_FILES:
            name, kind = _PAGE_FILES[url.path]
            self._send(resources.files(__package__).joinpath("page", name).read_bytes(), kind)
        elif url.path == "/api/view":
            self._send_view(query)
        elif url.path == "/metrics":
            for run in self.server.runs:
                run.refresh(_AGE)
            self._send(metrics(self.server.runs).encode(errors="replace"), METRICS_TYPE)
        elif url.path.startswith("/file/"):
            self._send_file(url.path.removeprefix("/file/"))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "This page does not exist.")

    do_HEAD = do_GET

    def _send_view(self, query: dict[str, str]) -> None:
        try:
            start, stop = (
                int(query[name]) if query.get(name) else None for name in ("start", "stop")
            )
            pixels = max(16, min(_MOST_PIXELS, int(query.get("pixels", 800))))
            if any(value is not None and not 1 <= value < 2**32 for value in (start, stop)):
                raise ValueError
        except ValueError:
            self._refuse(
                HTTPStatus.BAD_REQUEST, "start, stop and pixels are numbers of steps and pixels."
            )
            return
        data = self.server.answer(start, stop, pixels, query.get("version", ""))
        if data is None:
            self.send_response(HTTPStatus.NO_CONTENT)
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
        else:
            self._send(data, "application/octet-stream")

    def _send_file(self, path: str) -> None:
        """Send a file that an event of a run names."""
        number, _, name = unquote(path).partition("/")
        named_file = None
        for index, run in enumerate(self.server.runs):
            is_named = any(event.get("path") == name for event in run.events)
            if str(index) == number and is_named:
                named_file = run.file(name)
        if named_file is None:
            self._refuse(
                HTTPStatus.NOT_FOUND, "No event of the run refers to this file in the run's folder."
            )
            return
        try:
            file = open(named_file, "rb")  # noqa: SIM115 - closed below
        except OSError as error:
            self._refuse(HTTPStatus.NOT_FOUND, f"The file cannot be read: {error.strerror}.")
            return
        with file:
            self.send_response(HTTPStatus.OK)
            self._common_headers(os.fstat(file.fileno()).st_size)
            # Never shown as a page of this address, whatever it contains.
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Disposition", "attachment")
            self.end_headers()
            if self.command != "HEAD":
                shutil.copyfileobj(file, self.wfile)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._send(text.encode() + b"\n", "text/plain; charset=utf-8", status)

    def _send(self, data: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        self._common_headers(len(data))
        self.send_header("Content-Type", kind)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _common_headers(self, length: int) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: the terminal belongs to the user."""
