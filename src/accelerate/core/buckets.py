# SPDX-License-Identifier: Apache-2.0
"""Objects in a bucket of S3, GCS or Azure, or in this process's memory, through obstore.

A key is written as a whole or not at all. Nothing is renamed. What decides between two writers is a conditional put.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import itertools
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from . import env
from .errors import BucketAccessError, BucketUnreachableError, ConfigurationError
from .imports import is_available

if TYPE_CHECKING:
    from obstore.store import ObjectStore

    Version = dict[
        str, Any
    ]  # entity tag, and the number of the version where the store counts them

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")

# Scheme -> what the store needs to be told.
SCHEMES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and AWS_ENDPOINT_URL",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "memory": "",
}
# Schemes of other libraries -> ours.
_SYNONYMS = {"s3a": "s3", "s3n": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "azure": "az"}
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
# Bytes of a part of an upload, and of a range that one request reads; each has a request of its own.
PART_SIZE = 16 << 20
# S3 has at most 10,000 parts an object.
_MOST_PARTS = 9_000
_PARALLEL = 8
_SMALL = 1 << 20
# Requests are retried after 0.1 s, 0.2 s, ... 15 s.
RETRY_SECONDS = 180.0
_MOST_RETRIES = 10
_LONGEST_DELAY = 15.0
# After so many seconds a request that has no answer yet is logged.
_PATIENCE = 15.0
_CLIENT = {
    # http is used only where the user's endpoint says so.
    "allow_http": True,
    "connect_timeout": "10s",
    # A whole request: its part of an upload, for example.
    "timeout": "180s",
    "read_timeout": "60s",
}

_NO_BUCKET = "NoSuchBucket|ContainerNotFound|bucket does not exist|InvalidBucketName"
# What an answer says -> what it means, and what to do.
_REFUSALS = (
    (
        "MissingAccount|169.254.169.254|metadata.google|CredentialProvider|Failed to get credentials",
        "there are no credentials",
        "Set {variables}",
    ),
    (
        _NO_BUCKET,
        "this bucket does not exist",
        "Create it, or correct the name, endpoint or region",
    ),
    (
        "RequestTimeTooSkewed|RequestExpired|date header.*(old|future)",
        "the clocks of this machine and the store differ",
        "Set the clock of this machine (NTP)",
    ),
    (
        "InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|AuthenticationFailed|Unauthenticated"
        "|401 Unauthorized|lack valid authentication",
        "the store does not accept these credentials",
        "Set or renew {variables}",
    ),
    (
        "AccessDenied|PermissionDenied|403 Forbidden|lacked the necessary privileges",
        "these credentials lack the permission",
        "Grant it, or use different credentials ({variables})",
    ),
    (
        "redirect",
        "the bucket is in another region, or at another endpoint",
        "Set {variables}",
    ),
    (
        "NotImplemented|NotSupported|MethodNotAllowed|not yet implemented",
        "the store does not support this operation",
        "Use a store with conditional writes; `accelerate checkpoint check` shows what this one "
        "lacks",
    ),
    (
        r"status code: 4(?!08|09|29)\d\d",
        "the store rejects the request",
        "Check credentials and endpoint ({variables})",
    ),
)
_UNREACHABLE = (
    (
        "certificate|InvalidContentType|corrupt message|rustls|UnknownIssuer|HandshakeFailure",
        "a secure connection cannot be established",
        "Check whether the endpoint uses http:// or https://, and check the certificates of this "
        "machine",
    ),
    ("", "the store cannot be reached or fails", "Check the network and the endpoint, then run it again"),
)  # fmt: skip


def is_bucket(location: Any) -> bool:
    """Whether a location that a user has given is in a bucket, and not a local path.

    Raises ConfigurationError for a scheme that is neither. `hf://` is that of huggingface_hub.
    """
    if not isinstance(location, str | os.PathLike):
        return False
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)", os.fsdecode(location))
    if found is None:
        return False
    scheme = found[1].lower()
    if scheme in SCHEMES:
        return True
    # A path object has one slash less, and a folder may have a colon in its name.
    if scheme == "hf" or found[2] == "/":
        return False
    advice = ""
    if scheme in _SYNONYMS:
        advice = f". Write {_SYNONYMS[scheme]}://"
    raise ConfigurationError(
        f"{os.fsdecode(location)!r}: checkpoints can be in local folders or, with `pip install "
        f"accelerate[buckets]`, in buckets ({', '.join(f'{name}://' for name in SCHEMES)}); "
        f"{scheme}:// is neither{advice}"
    )


class Entry(NamedTuple):
    """An object: its key, its size in bytes, and when it was written (seconds since the epoch)."""

    key: str
    size: int
    modified: float


_buckets: dict[Any, Bucket] = {}
_lock = threading.Lock()
# The threads of obstore are in the process that was the first to open a bucket. A child by `fork` would wait for them.
_process = 0


class Bucket:
    """One bucket. Errors name the bucket and the key, and never credentials.

    Every method raises BucketAccessError where the store refuses, and BucketUnreachableError where it does not answer,
    or fails in spite of retries. Both are errors of a checkpoint, and of the system (OSError).

    Args:
        url: scheme and name, such as "s3://bucket".
        store: that of obstore.
    """

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url = url
        self.store = store

    @classmethod
    def of(cls, location: str | os.PathLike[str]) -> tuple[Bucket, str]:
        """The bucket and the key of a location for which `is_bucket` is true.

        Credentials and endpoint are those of the environment; those of S3 also boto3's where it is installed.
        """
        global _process
        text = os.fsdecode(location)
        scheme, _, path = text.partition(":")
        scheme = scheme.lower()
        name, _, key = path.lstrip("/").partition("/")
        if not name:
            raise ConfigurationError(
                f"{text!r} does not name a bucket: write {scheme}://bucket/folder"
            )
        if not is_available("obstore"):
            raise ConfigurationError(
                f"{text}: `pip install accelerate[buckets]` for checkpoints in buckets"
            )
        parts = [part for part in key.split("/") if part]
        if ".." in parts or "." in parts:
            raise ConfigurationError(f"{text!r}: a key cannot contain the part '.' or '..'")
        url = f"{scheme}://{name}"
        variables = [sorted(env.all_with_prefix(prefix).items()) for prefix in _VARIABLES]
        identity = (url, str(variables))
        if scheme == "memory":
            identity = (url, "")
        with _lock:
            if identity not in _buckets:
                _process = _process or os.getpid()
                _buckets[identity] = cls(url, _open(scheme, name))
        return _buckets[identity], "/".join(parts)

    def get(self, key: str, limit: int) -> bytes:
        """The content of an object. Raises FileNotFoundError, or OSError for one of more than `limit` bytes."""
        return self.get_with_version(key, limit)[0]

    def get_with_version(self, key: str, limit: int) -> tuple[bytes, Version]:
        """The content of an object and its version, as `get`."""
        import obstore

        def request() -> tuple[bytes, Version]:
            with self._named_errors("read", key):
                answer = obstore.get(self.store, key)
                size = answer.meta["size"]
                if size > limit:
                    text = f"it has {size} bytes; at most {limit} are read"
                    raise OSError(errno.EFBIG, text, f"{self.url}/{key}")
                return bytes(answer.bytes()), _version(answer.meta)

        # obstore retries everything but "not found" that is cut off within its text.
        return _repeated(request, "body error")

    def read(self, key: str, offset: int, views: Sequence[memoryview]) -> None:
        """Fill writable memory with the bytes of an object from an offset on, in parallel requests.

        Raises FileNotFoundError, or OSError for an object that ends before.
        """
        requests = []
        for view in views:
            target = view.cast("B")
            for start in range(0, len(target), PART_SIZE):
                part = target[start : start + PART_SIZE]
                requests.append((offset, part))
                offset += len(part)
        if len(requests) <= 1:
            for start, part in requests:
                self._read_range(key, start, part)
            return
        with ThreadPoolExecutor(min(_PARALLEL, len(requests))) as pool:
            for done in [pool.submit(self._read_range, key, *request) for request in requests]:
                done.result()

    def _read_range(self, key: str, start: int, target: memoryview) -> None:
        import obstore

        with self._named_errors("read", key):
            content = obstore.get_range(self.store, key, start=start, length=len(target))
        if len(content) != len(target):
            raise _too_short(f"{self.url}/{key}", start + len(target))
        target[:] = memoryview(content)

    def write(self, key: str, pieces: Iterable[bytes | memoryview], size: int = 0) -> None:
        """Write an object from pieces that are taken as they are sent: one put, or parts in parallel if it is large.

        After an error, also one of `pieces`, there is no new object, and the parts are removed.

        Args:
            key: of the object. One that exists is replaced.
            pieces: contiguous bytes, which are sent without a copy: they may not change before this returns.
            size: that of the object in bytes, if known. It makes parts of a very large object larger.
        """
        import obstore

        part_size = max(PART_SIZE, -(-size // _MOST_PARTS))
        stream = _joined(pieces)
        first: list[memoryview | bytearray] = []
        count = 0
        while count <= PART_SIZE:
            piece = next(stream, None)
            if piece is None:
                with self._named_errors("write", key):
                    obstore.put(self.store, key, first, use_multipart=False)
                return
            first.append(piece)
            count += len(piece)
        before = None
        with contextlib.suppress(BucketAccessError):
            before = self.version(key)
        try:
            with self._named_errors("write", key, is_long=True):
                obstore.put(
                    self.store,
                    key,
                    itertools.chain(first, stream),
                    use_multipart=True,
                    chunk_size=part_size,
                    max_concurrency=_PARALLEL,
                )
        except FileNotFoundError:
            # Without the first answer to "complete", the next one says that there is no such upload.
            if self.version(key) == before:
                raise self._error("write", key, "404 NoSuchUpload") from None

    def create(self, key: str, data: bytes, is_ours: Callable[[bytes], bool]) -> bool:
        """Write an object if there is none; whether the object is ours now.

        An error leaves it open whether the object was written, or will be.

        Args:
            key: of the object.
            data: its content, sent in one request.
            is_ours: whether an object that is there is this one. A lost answer leaves one, and the retry meets it.
        """
        return self._put_if(key, data, None, is_ours)

    def replace(
        self, key: str, data: bytes, version: Version, is_ours: Callable[[bytes], bool]
    ) -> bool:
        """Write an object if it still has this version; whether the object is ours now. As `create` else."""
        return self._put_if(key, data, version, is_ours)

    def _put_if(
        self, key: str, data: bytes, expected: Version | None, is_ours: Callable[[bytes], bool]
    ) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        condition: Any = expected or "create"
        deadline = time.monotonic() + RETRY_SECONDS
        delay = 0.1
        while True:
            try:
                with self._named_errors("write", key, AlreadyExistsError, PreconditionError):
                    obstore.put(self.store, key, data, mode=condition, use_multipart=False)
                return True
            except BucketUnreachableError:
                # Perhaps it was written. A request with a condition may be sent again.
                if time.monotonic() > deadline:
                    raise
            except (AlreadyExistsError, PreconditionError, FileNotFoundError):
                current = None
                with contextlib.suppress(FileNotFoundError):
                    content, current = self.get_with_version(key, 1 << 62)
                    if is_ours(content):
                        return True
                # The store may answer "conflict" for two requests at the same time, and write neither.
                if current != expected:
                    return False
                if time.monotonic() > deadline:
                    raise self._error("write", key, "409 Conflict") from None
            time.sleep(delay)
            delay = min(2 * delay, _LONGEST_DELAY)

    def version(self, key: str) -> Version | None:
        """The version of an object, None where there is none."""
        import obstore

        with contextlib.suppress(FileNotFoundError), self._named_errors("read", key):
            return _version(obstore.head(self.store, key))
        return None

    def stat(self, key: str) -> Entry:
        """Size and time of an object. Raises FileNotFoundError."""
        import obstore

        with self._named_errors("read", key):
            return _entry(obstore.head(self.store, key))

    def objects(self, prefix: str) -> Iterator[Entry]:
        """All objects in a folder and the folders below, in no order; an empty prefix is the whole bucket."""
        import obstore

        batches = iter(obstore.list(self.store, prefix or None, chunk_size=1000))
        while True:
            with self._named_errors("list", prefix):
                batch = next(batches, None)
            if batch is None:
                return
            for row in batch:
                yield _entry(row)

    def children(self, prefix: str) -> tuple[list[str], list[Entry]]:
        """The names of the folders directly in a folder, and its objects."""
        import obstore

        with self._named_errors("list", prefix):
            answer = obstore.list_with_delimiter(self.store, prefix or None)
        folders = [name.rstrip("/").rpartition("/")[2] for name in answer["common_prefixes"]]
        return sorted(folders), [_entry(row) for row in answer["objects"]]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. One that is not there counts as deleted."""
        import obstore

        names = list(keys)

        def request() -> None:
            with self._named_errors("delete", names[0] if names else ""):
                obstore.delete(self.store, names)

        try:
            # obstore sends no POST again.
            _repeated(request, "")
        except FileNotFoundError:
            # GCS and Azure stop at a missing object.
            for name in names:
                with contextlib.suppress(FileNotFoundError), self._named_errors("delete", name):
                    obstore.delete(self.store, name)

    def check_access(self, folder: str) -> None:
        """Write, list, read and remove a small object in a folder. Raises what these raise."""
        key = f"{folder}/.accelerate-access-{uuid.uuid4().hex[:8]}".lstrip("/")
        self.write(key, [b"1"])
        self.children(folder)
        self.get(key, 1)
        self.delete([key])

    @contextlib.contextmanager
    def _named_errors(
        self, act: str, key: str, *expected: type[Exception], is_long: bool = False
    ) -> Iterator[None]:
        """A block of one request, whose errors become ours, except for those that are expected.

        A request that waits is logged, unless it `is_long`: many parts that may take as long as they need.
        """
        from obstore.exceptions import BaseError

        if os.getpid() != _process:
            raise ConfigurationError(
                f"cannot {act} {self.url}/{key} in a process that was forked after its parent "
                "used a bucket: start the process with `spawn`, or use buckets only in child "
                "processes"
            )
        waiting = threading.Timer(_PATIENCE, self._log_wait, (act, key))
        waiting.daemon = True
        if not is_long:
            waiting.start()
        try:
            yield
        except expected:
            raise
        except FileNotFoundError as error:
            if re.search(_NO_BUCKET, _without_key(str(error), key)):
                raise self._error(act, key, str(error)) from None
            raise FileNotFoundError(
                errno.ENOENT, os.strerror(errno.ENOENT), f"{self.url}/{key}"
            ) from None
        except (BaseError, ValueError, NotImplementedError) as error:
            if re.search("InvalidRange|Invalid range|status code: 416", str(error)):
                raise _too_short(f"{self.url}/{key}") from None
            # The text of the store may have the signature of a request, so it is no cause.
            raise self._error(act, key, str(error)) from None
        finally:
            waiting.cancel()

    def _log_wait(self, act: str, key: str) -> None:
        logger.warning(
            "no answer for %.0f s to the request to %s %s/%s. It will be retried for up to %.0f s",
            _PATIENCE,
            act,
            self.url,
            key,
            RETRY_SECONDS,
        )

    def _error(self, act: str, key: str, text: str) -> OSError:
        scheme = self.url.partition(":")[0]
        answer = _without_key(text, key)
        for kind, facts in (
            (BucketAccessError, _REFUSALS),
            (BucketUnreachableError, _UNREACHABLE),
        ):
            for pattern, meaning, remedy in facts:
                if re.search(pattern, answer):
                    remedy = remedy.format(variables=SCHEMES[scheme])
                    return kind(
                        f"cannot {act} {self.url}/{key}: {meaning} ({_reason(text)}). {remedy}"
                    )
        raise AssertionError("the last pattern fits everything")


def _open(scheme: str, name: str) -> ObjectStore:
    from obstore import store
    from obstore.exceptions import BaseError

    options: dict[str, Any] = {
        "client_options": _CLIENT,
        "retry_config": {
            "max_retries": _MOST_RETRIES,
            "retry_timeout": datetime.timedelta(seconds=RETRY_SECONDS),
            "backoff": {"max_backoff": datetime.timedelta(seconds=_LONGEST_DELAY)},
        },
    }
    try:
        if scheme == "memory":
            return store.MemoryStore()
        if scheme == "gs":
            return store.GCSStore(name, **options)
        if scheme == "az":
            return store.AzureStore(name, **options)
        return store.S3Store(name, credential_provider=_credentials_of_boto3(), **options)
    except (BaseError, ValueError) as error:
        raise ConfigurationError(
            f"cannot open {scheme}://{name}: {_reason(str(error))}. Set {SCHEMES[scheme]}"
        ) from None


def _credentials_of_boto3() -> Any:
    """Those of ~/.aws, a profile, single sign-on or the machine's role, which obstore knows in part; None without."""
    variables = env.all_with_prefix("AWS_")
    if "AWS_ACCESS_KEY_ID" in variables or "AWS_SKIP_SIGNATURE" in variables:
        return None
    if not is_available("boto3"):
        return None
    from obstore.auth.boto3 import Boto3CredentialProvider

    try:
        return Boto3CredentialProvider()
    except ValueError:
        raise ValueError("there are no credentials") from None


def _repeated(request: Callable[[], T], reason: str) -> T:
    """What a request returns that may be sent again, and is for a while when it fails for this reason (a pattern)."""
    deadline = time.monotonic() + RETRY_SECONDS
    delay = 0.1
    while True:
        try:
            return request()
        except BucketUnreachableError as error:
            if time.monotonic() > deadline or not re.search(reason, str(error)):
                raise
        time.sleep(delay)
        delay = min(2 * delay, _LONGEST_DELAY)


def _joined(pieces: Iterable[bytes | memoryview]) -> Iterator[memoryview | bytearray]:
    """The same bytes, with the small pieces joined: those of thousands of small tensors, for example."""
    small = bytearray()
    for piece in pieces:
        view = memoryview(piece).cast("B")
        if len(view) < _SMALL:
            small += view
            if len(small) < _SMALL:
                continue
        if small:
            yield small
            small = bytearray()
        if len(view) >= _SMALL:
            yield view
    if small:
        yield small


def _too_short(url: str, wanted: int = 0) -> OSError:
    text = "it ends before the requested bytes"
    if wanted:
        text = f"it has fewer than {wanted} bytes"
    return OSError(errno.EIO, text, url)


def _version(meta: Any) -> Version:
    fields = {name: meta[name] for name in ("e_tag", "version")}
    return {name: value for name, value in fields.items() if value is not None}


def _entry(meta: Any) -> Entry:
    return Entry(meta["path"], meta["size"], meta["last_modified"].timestamp())


def _without_key(text: str, key: str) -> str:
    """The text of an error without the words of the key, which say nothing about what has happened."""
    # A request to the service that has the credentials of a machine says that there are no others.
    text = re.sub(r"https?://(?!169\.254\.169\.254|metadata\.google)\S+", "", text)
    for form in (f"path {key}", f"location {key}", f'"{key}"'):
        text = text.replace(form, "")
    return text


def _reason(text: str) -> str:
    """What the store says, short, without its debug output, queries of URLs, and values of secret variables."""
    line = text.partition("\n\nDebug source")[0]
    code = re.search(r"<Code>(\w+)</Code>", line)
    network = re.search(r'message: "([^"]*)"', text)
    is_silent = re.search(r"\bkind: Timeout\b", text)
    status = re.search(r"status code: (\d+ [A-Za-z ]+)", line)
    if code is not None:
        return code[1]
    if status is not None:
        return status[1].strip()
    if network is not None:
        return network[1]
    if is_silent is not None:
        return "no answer in time"
    line = re.sub(r"\?\S*", "?...", " ".join(line.split()))
    for prefix in _VARIABLES:
        for name, value in env.all_with_prefix(prefix).items():
            if len(value) > 3 and re.search("KEY|SECRET|TOKEN|SAS|PASSWORD", name):
                line = line.replace(value, "***")
    return line[:300]
