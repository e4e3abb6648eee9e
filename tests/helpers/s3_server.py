# SPDX-License-Identifier: Apache-2.0
"""A server of the S3 protocol in this process, with faults: one lock, so that conditional puts are atomic.

with S3Server() as server:  # AWS_ENDPOINT_URL and credentials are in os.environ meanwhile
    save("s3://bucket/run")
server.faults = RandomFaults(seed=0, rate=0.2)
"""

from __future__ import annotations

import collections
import dataclasses
import email.utils
import hashlib
import itertools
import os
import random
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape, unescape

KEY, SECRET = "AKIATESTTESTTEST", "a-secret-that-nobody-may-see"

# A fault before the act; those that end in "-after" come when the act is done, and the client sees an error.
TRANSIENT = ("500", "503", "slow", "reset", "cut", "500-after", "reset-after")
# Answers that no retry changes: name -> status, code.
REFUSALS = {
    "403": (403, "AccessDenied"),
    "skew": (403, "RequestTimeTooSkewed"),
    "key": (403, "InvalidAccessKeyId"),
    "token": (400, "ExpiredToken"),
    "409": (409, "ConditionalRequestConflict"),
    "501": (501, "NotImplemented"),
}


@dataclasses.dataclass
class Request:
    """What a plan of faults sees: the method, the key, and what is asked ("put", "part", "list", ...)."""

    method: str
    key: str
    act: str


Plan = Callable[[Request], str | None]


class RandomFaults:
    """Transient faults by a seeded random choice, never more than `most_in_row` for one key and act."""

    def __init__(
        self,
        seed: int,
        rate: float,
        names: Iterable[str] = TRANSIENT,
        most_in_row: int = 4,
        keys: str = "",
    ) -> None:
        self.dice = random.Random(seed)
        self.rate, self.names, self.most_in_row = rate, list(names), most_in_row
        self.keys = re.compile(keys)
        self.row: collections.Counter[tuple[str, str]] = collections.Counter()

    def __call__(self, request: Request) -> str | None:
        place = (request.act, request.key)
        if not self.keys.search(request.key):
            return None
        if self.dice.random() >= self.rate or self.row[place] >= self.most_in_row:
            self.row[place] = 0
            return None
        self.row[place] += 1
        return self.dice.choice(self.names)


class Script:
    """Each of these faults once, for the requests of one act ("" for all) in their order."""

    def __init__(self, *names: str, act: str = "") -> None:
        self.names, self.act = list(names), act

    def __call__(self, request: Request) -> str | None:
        if self.names and self.act in ("", request.act):
            return self.names.pop(0)
        return None


@dataclasses.dataclass
class Stored:
    data: bytes
    etag: str
    modified: float


@dataclasses.dataclass
class Upload:
    bucket: str
    key: str
    started: float
    parts: dict[int, tuple[str, bytes]]


class S3Server:
    """The server. `objects`, `uploads`, `requests` and `injected` are for tests to look at.

    Args:
        buckets: the names of those that there are.
        faults: says the fault of each request, or None.
        stale: for how many seconds a listing does not show a new object, and shows a deleted one.
        slow: seconds of a slow answer.
        conditions: whether If-None-Match and If-Match are obeyed; old stores ignore them.
    """

    def __init__(
        self,
        buckets: Iterable[str] = ("bucket",),
        faults: Plan | None = None,
        stale: float = 0.0,
        slow: float = 0.05,
        conditions: bool = True,
    ) -> None:
        self.buckets = set(buckets)
        self.faults, self.stale, self.slow, self.conditions = faults, stale, slow, conditions
        self.objects: dict[tuple[str, str], Stored] = {}
        self.deleted: dict[tuple[str, str], tuple[float, Stored]] = {}
        self.uploads: dict[str, Upload] = {}
        self.requests: list[Request] = []
        self.injected: collections.Counter[str] = collections.Counter()
        self.on_put: Callable[[str, bytes], None] = lambda key, data: None
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.owner = self
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._before: dict[str, str | None] = {}

    def environment(self) -> dict[str, str]:
        """The variables with which a client finds it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def __enter__(self) -> S3Server:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self._before = {name: os.environ.get(name) for name in self.environment()}
        os.environ.update(self.environment())
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._server.shutdown()
        self._server.server_close()

    def keys(self, bucket: str = "bucket") -> list[str]:
        """The keys of a bucket, sorted."""
        with self.lock:
            return sorted(key for name, key in self.objects if name == bucket)

    def data(self, key: str, bucket: str = "bucket") -> bytes:
        """The content of an object."""
        with self.lock:
            return self.objects[bucket, key].data

    def listed(self, bucket: str) -> dict[str, Stored]:
        """What a listing shows, which may be stale."""
        limit = time.time() - self.stale
        rows = {
            key: stored
            for (name, key), stored in self.objects.items()
            if name == bucket and (not self.stale or stored.modified < limit)
        }
        for (name, key), (when, stored) in self.deleted.items():
            if self.stale and name == bucket and when > limit:
                rows.setdefault(key, stored)
        return rows


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    owner: S3Server

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that was killed, or a fault, has closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _serve(self) -> None:
        self.owner: S3Server = self.server.owner  # type: ignore[attr-defined]
        address = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(address.query, keep_blank_values=True))
        bucket, _, key = urllib.parse.unquote(address.path).lstrip("/").partition("/")
        self.bucket, self.key = bucket, key
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        act = self._act()
        request = Request(self.command, key or self.query.get("prefix", ""), act)
        with self.owner.lock:
            self.owner.requests.append(request)
            fault = self.owner.faults(request) if self.owner.faults else None
            if fault == "cut" and act != "get":
                fault = "reset"
            conditions = (self.headers.get("If-Match"), self.headers.get("If-None-Match"))
            if fault == "409" and not any(conditions):
                fault = None
            if fault:
                self.owner.injected[fault] += 1
        if fault in ("500", "503"):
            self._error(int(fault), "InternalError" if fault == "500" else "SlowDown")
        elif fault in REFUSALS:
            self._error(*REFUSALS[fault])
        elif fault == "reset":
            self._reset()
        elif bucket not in self.owner.buckets:
            self._error(404, "NoSuchBucket")
        elif f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._error(403, "InvalidAccessKeyId")
        else:
            if fault == "slow":
                time.sleep(self.owner.slow)
            with self.owner.lock:
                status, body, headers = getattr(self, f"_{act}")()
            if fault == "500-after":
                self._error(500, "InternalError")
            elif fault == "reset-after":
                self._reset()
            else:
                self._answer(status, body, headers, cut=fault == "cut")

    def _act(self) -> str:
        names = {
            ("PUT", "partNumber"): "part",
            ("POST", "uploads"): "begin",
            ("POST", "uploadId"): "complete",
            ("DELETE", "uploadId"): "abort",
            ("GET", "uploads"): "list_uploads",
            ("POST", "delete"): "delete_many",
            ("GET", "list-type"): "list",
        }
        for (method, word), name in names.items():
            if self.command == method and word in self.query:
                return name
        return {"GET": "get", "HEAD": "get", "PUT": "put", "DELETE": "delete"}[self.command]

    def _answer(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
        else:
            self.wfile.write(body)

    def _xml(self, name: str, content: str) -> tuple[int, bytes, dict[str, str]]:
        text = f'<?xml version="1.0"?><{name}>{content}</{name}>'
        return 200, text.encode(), {"Content-Type": "application/xml"}

    def _error(self, status: int, code: str) -> None:
        facts = f"<Code>{code}</Code><Message>about {code}</Message><AWSAccessKeyId>{KEY}</AWSAccessKeyId>"
        _, body, headers = self._xml("Error", f"{facts}<StringToSign>{SECRET}</StringToSign>")
        self._answer(status, body, headers)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def _failed(self, status: int, code: str) -> tuple[int, bytes, dict[str, str]]:
        return status, self._xml("Error", f"<Code>{code}</Code>")[1], {}

    def _condition(self) -> tuple[int, bytes, dict[str, str]] | None:
        """The answer to a put whose condition does not hold."""
        stored = self.owner.objects.get((self.bucket, self.key))
        if not self.owner.conditions:
            return None
        if self.headers.get("If-None-Match") == "*" and stored is not None:
            return self._failed(412, "PreconditionFailed")
        wanted = self.headers.get("If-Match")
        if wanted is not None and stored is None:
            return self._failed(404, "NoSuchKey")
        if wanted is not None and stored is not None and wanted != stored.etag:
            return self._failed(412, "PreconditionFailed")
        return None

    def _store(self, data: bytes, etag: str) -> str:
        self.owner.objects[self.bucket, self.key] = Stored(data, etag, time.time())
        self.owner.on_put(self.key, data)
        return etag

    def _put(self) -> tuple[int, bytes, dict[str, str]]:
        refused = self._condition()
        if refused is not None:
            return refused
        return 200, b"", {"ETag": self._store(self.body, _etag(self.body))}

    def _get(self) -> tuple[int, bytes, dict[str, str]]:
        stored = self.owner.objects.get((self.bucket, self.key))
        if stored is None:
            return self._failed(404, "NoSuchKey")
        headers = {
            "ETag": stored.etag,
            "Last-Modified": email.utils.formatdate(stored.modified, usegmt=True),
            "Accept-Ranges": "bytes",
        }
        if self.headers.get("If-Match", stored.etag) != stored.etag:
            return self._failed(412, "PreconditionFailed")
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        size = len(stored.data)
        if found is None:
            if self.command == "HEAD":
                headers["Content-Length"] = str(size)
            return 200, stored.data, headers
        first, last = found[1], found[2]
        start = int(first) if first else max(0, size - int(last))
        stop = min(size, int(last) + 1) if first and last else size
        if start >= size:
            return self._failed(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        return 206, stored.data[start:stop], headers

    def _remove(self, key: str) -> None:
        stored = self.owner.objects.pop((self.bucket, key), None)
        if stored is not None:
            self.owner.deleted[self.bucket, key] = (time.time(), stored)

    def _delete(self) -> tuple[int, bytes, dict[str, str]]:
        self._remove(self.key)
        return 204, b"", {}

    def _delete_many(self) -> tuple[int, bytes, dict[str, str]]:
        names = [unescape(name) for name in re.findall("<Key>(.*?)</Key>", self.body.decode())]
        for name in names:
            self._remove(name)
        rows = "".join(f"<Deleted><Key>{escape(name)}</Key></Deleted>" for name in names)
        return self._xml("DeleteResult", rows)

    def _list(self) -> tuple[int, bytes, dict[str, str]]:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        after = self.query.get("continuation-token") or self.query.get("start-after", "")
        most = int(self.query.get("max-keys", "1000"))
        rows: list[str] = []
        last, more, folders = "", False, set()
        for key, stored in sorted(self.owner.listed(self.bucket).items()):
            rest = key[len(prefix) :]
            folder = f"{prefix}{rest.partition(delimiter)[0]}{delimiter}" if delimiter else ""
            shown = folder if delimiter and delimiter in rest else key
            if not key.startswith(prefix) or shown <= after or shown in folders:
                continue
            if len(rows) == most:
                more = True
                break
            last = shown
            if shown == folder:
                folders.add(folder)
                rows.append(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>")
                continue
            moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(stored.modified))
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{moment}.000Z</LastModified>"
                f"<ETag>{escape(stored.etag)}</ETag><Size>{len(stored.data)}</Size></Contents>"
            )
        token = f"<NextContinuationToken>{escape(last)}</NextContinuationToken>" if more else ""
        head = f"<Name>{self.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(rows)}</KeyCount>"
        head += f"<MaxKeys>{most}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
        return self._xml("ListBucketResult", head + "".join(rows))

    def _begin(self) -> tuple[int, bytes, dict[str, str]]:
        number = f"upload-{next(self.owner.numbers)}"
        self.owner.uploads[number] = Upload(self.bucket, self.key, time.time(), {})
        head = f"<Bucket>{self.bucket}</Bucket><Key>{escape(self.key)}</Key>"
        return self._xml("InitiateMultipartUploadResult", f"{head}<UploadId>{number}</UploadId>")

    def _part(self) -> tuple[int, bytes, dict[str, str]]:
        upload = self.owner.uploads.get(self.query["uploadId"])
        if upload is None:
            return self._failed(404, "NoSuchUpload")
        etag = _etag(self.body)
        upload.parts[int(self.query["partNumber"])] = (etag, self.body)
        return 200, b"", {"ETag": etag}

    def _complete(self) -> tuple[int, bytes, dict[str, str]]:
        upload = self.owner.uploads.get(self.query["uploadId"])
        if upload is None:
            return self._failed(404, "NoSuchUpload")
        refused = self._condition()
        if refused is not None:
            return refused
        text = self.body.decode()
        numbers = [int(number) for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", text)]
        etags = [unescape(tag, {"&quot;": '"'}) for tag in re.findall("<ETag>(.*?)</ETag>", text)]
        rows = [upload.parts.get(number, ("", b"")) for number in numbers]
        if numbers != sorted(set(numbers)) or etags != [etag for etag, _ in rows]:
            return self._failed(400, "InvalidPart")
        data = b"".join(part for _, part in rows)
        etag = self._store(data, f'{_etag(data)[:-1]}-{len(rows)}"')
        del self.owner.uploads[self.query["uploadId"]]
        return self._xml("CompleteMultipartUploadResult", f"<ETag>{escape(etag)}</ETag>")

    def _abort(self) -> tuple[int, bytes, dict[str, str]]:
        if self.owner.uploads.pop(self.query["uploadId"], None) is None:
            return self._failed(404, "NoSuchUpload")
        return 204, b"", {}

    def _list_uploads(self) -> tuple[int, bytes, dict[str, str]]:
        rows = ""
        for number, upload in self.owner.uploads.items():
            moment = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(upload.started))
            if upload.bucket == self.bucket and upload.key.startswith(self.query.get("prefix", "")):
                rows += f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{number}</UploadId>"
                rows += f"<Initiated>{moment}</Initiated></Upload>"
        head = f"<Bucket>{self.bucket}</Bucket><IsTruncated>false</IsTruncated>"
        return self._xml("ListMultipartUploadsResult", head + rows)


def _etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
