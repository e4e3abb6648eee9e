# SPDX-License-Identifier: Apache-2.0
"""Objects in buckets: what a store keeps, and what the errors say."""

import itertools
import multiprocessing
import os
import random
import socket
import threading
import time
import traceback
from collections import Counter

import pytest
from s3_server import KEY, SECRET, TRANSIENT, RandomFaults, S3Server, Script

from accelerate.core import buckets
from accelerate.core.buckets import Bucket, is_bucket
from accelerate.core.errors import (
    BucketAccessError,
    BucketUnreachableError,
    CheckpointError,
    ConfigurationError,
)

LIMIT = 1 << 30
PART = 1 << 18
BIG = random.Random(0).randbytes(PART * 2 + 12345)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(buckets, "PART_SIZE", PART)
    monkeypatch.setattr(buckets, "_SMALL", PART // 16)


@pytest.fixture
def server():
    with S3Server() as server:
        yield server


@pytest.fixture(params=["s3://bucket/folder", "memory://bucket/folder"])
def bucket(request, server, monkeypatch):
    monkeypatch.setattr(buckets, "_buckets", {})
    return Bucket.of(request.param)[0]


@pytest.fixture
def s3(server):
    return Bucket.of("s3://bucket")[0]


def is_equal_to(data):
    return lambda found: found == data


def test_what_is_a_bucket(tmp_path):
    names = ["s3://b/x", "S3://b", "gs://b/x", "az://b/x", "memory://b/x"]
    assert all(is_bucket(name) for name in names)
    # A path object takes one slash away.
    assert is_bucket(tmp_path.__class__("s3://b/x"))
    paths = ["x", "/x", "C:\\x", "C:/x", "run:1/x", "hf://a/b", tmp_path, None, 3]
    assert not any(is_bucket(path) for path in paths)
    with pytest.raises(ConfigurationError, match=r"ftp://b/x.*accelerate\[buckets\]"):
        is_bucket("ftp://b/x")
    for name, ours in (("s3a", "s3"), ("gcs", "gs"), ("abfss", "az")):
        with pytest.raises(ConfigurationError, match=rf"{name}:// is neither.*{ours}://$"):
            is_bucket(f"{name}://b/x")


@pytest.mark.parametrize("location", ["s3://", "s3:///", "s3://b/../x", "az://b/x"])
def test_locations_that_name_no_bucket(location, monkeypatch):
    for name in list(os.environ):
        if name.startswith("AZURE_"):
            monkeypatch.delenv(name)
    with pytest.raises(ConfigurationError, match=location.partition(":")[0]):
        Bucket.of(location)


def test_without_the_package_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(buckets, "is_available", lambda name: False)
    with pytest.raises(ConfigurationError, match=r"s3://b/x.*accelerate\[buckets\]"):
        Bucket.of("s3://b/x")


def test_a_location_gives_the_same_store(server):
    first, key = Bucket.of("s3://bucket/a//b/")
    assert key == "a/b" and Bucket.of("s3://bucket")[0] is first
    os.environ["AWS_REGION"] = "eu-west-1"
    assert Bucket.of("s3://bucket")[0] is not first
    memory, _ = Bucket.of("memory://x/y")
    assert Bucket.of("memory://x")[0] is memory


def test_objects_are_written_read_listed_and_deleted(bucket):
    odd = "a b/é+x%20&#"
    bucket.write(odd, [b"ab", memoryview(bytearray(b"cd"))])
    bucket.write("empty", [])
    bucket.write("folder/one", [b"1"])
    bucket.write("folder/two/three", [b"123"])
    bucket.write("folderx", [b"1"])
    assert bucket.get(odd, 4) == b"abcd" and bucket.get("empty", 0) == b""
    with pytest.raises(OSError, match="4 bytes; at most 3"):
        bucket.get(odd, 3)
    entry = bucket.stat("folder/two/three")
    assert (entry.key, entry.size) == ("folder/two/three", 3)
    assert abs(entry.modified - time.time()) < 60
    inside = {entry.key: entry.size for entry in bucket.objects("folder")}
    assert inside == {"folder/one": 1, "folder/two/three": 3}
    assert {entry.key for entry in bucket.objects("")} == {odd, "empty", "folderx", *inside}
    folders, entries = bucket.children("folder")
    assert (folders, [entry.key for entry in entries]) == (["two"], ["folder/one"])
    assert bucket.children("")[0] == ["a b", "folder"]
    assert bucket.children("nothing") == ([], [])
    bucket.delete(["folder/one", "absent", odd])
    bucket.delete([])
    assert {entry.key for entry in bucket.objects("")} == {"empty", "folderx", "folder/two/three"}
    for act in (bucket.stat, lambda key: bucket.get(key, 9)):
        with pytest.raises(FileNotFoundError, match="bucket/folder/one"):
            act("folder/one")
    assert bucket.version("folder/one") is None


def test_long_listings_and_deletions(server, s3):
    s3.write("many/0/0", [b"1"])
    for number in range(1, 2500):
        server.objects["bucket", f"many/{number % 3}/{number}"] = server.objects[
            "bucket", "many/0/0"
        ]
    keys = [entry.key for entry in s3.objects("many")]
    assert len(set(keys)) == 2500 and s3.children("many")[0] == ["0", "1", "2"]
    assert len(s3.children("many/1")[1]) == 833
    s3.delete(keys)
    assert server.keys() == []


def test_large_objects_go_in_parts_and_come_in_ranges(bucket, server):
    cuts = [0, 10, 20, 20, 30_000, 60_000, 60_003, PART, 2 * PART + 1, len(BIG) - 1, len(BIG)]
    pieces = [memoryview(BIG)[start:stop] for start, stop in itertools.pairwise(cuts)]
    bucket.write("big", pieces, len(BIG))
    target = bytearray(len(BIG) - 7)
    views = [memoryview(target)[:3], memoryview(target)[3:]]
    bucket.read("big", 7, views)
    assert target == BIG[7:]
    bucket.read("big", 7, [])
    if bucket.url.startswith("s3"):
        acts = Counter(request.act for request in server.requests)
        # One number of the version, four ranges.
        assert acts == {"begin": 1, "part": 3, "complete": 1, "get": 1 + 4}
    for offset in (len(BIG) - 2, len(BIG) + 2):
        with pytest.raises(OSError, match="bucket/big") as caught:
            bucket.read("big", offset, [memoryview(bytearray(5))])
        assert not isinstance(caught.value, CheckpointError)
    with pytest.raises(FileNotFoundError, match="bucket/none"):
        bucket.read("none", 0, [memoryview(bytearray(5))])


def test_an_error_of_the_pieces_leaves_nothing(bucket, server):
    def pieces():
        yield BIG
        raise ZeroDivisionError

    bucket.write("kept", [b"old"])
    for key in ("new", "kept"):
        with pytest.raises(ZeroDivisionError):
            bucket.write(key, pieces())
    assert bucket.get("kept", 9) == b"old" and bucket.version("new") is None
    assert server.uploads == {}


def test_create_and_replace(bucket):
    assert bucket.create("m", b"1", is_equal_to(b"1"))
    assert not bucket.create("m", b"2", is_equal_to(b"2"))
    content, version = bucket.get_with_version("m", 9)
    assert content == b"1" and version == bucket.version("m")
    assert bucket.replace("m", b"3", version, is_equal_to(b"3"))
    assert not bucket.replace("m", b"4", version, is_equal_to(b"4"))
    assert not bucket.replace("none", b"4", version, is_equal_to(b"4"))
    assert bucket.get("m", 9) == b"3" and bucket.version("none") is None


@pytest.mark.parametrize(
    "faults",
    ["500", "503 500", "reset", "slow", "500-after", "reset-after", "409", "reset-after 409 500"],
)
def test_a_lost_answer_to_a_conditional_put_is_cleared_up(server, s3, faults):
    server.faults = Script(*faults.split(), act="put")
    assert s3.create("m", b"1", is_equal_to(b"1"))
    version = s3.version("m")
    server.faults = Script(*faults.split(), act="put")
    assert s3.replace("m", b"2", version, is_equal_to(b"2"))
    assert not server.faults.names and server.data("m") == b"2"
    server.faults = Script(*faults.split(), act="put")
    assert not s3.create("m", b"3", is_equal_to(b"3"))
    server.faults = Script(*faults.split(), act="put")
    assert not s3.replace("m", b"3", version, is_equal_to(b"3"))
    assert server.data("m") == b"2"


def test_of_two_writers_one_wins(server, s3):
    server.faults = RandomFaults(
        0, 0.3, ["500", "reset", "500-after", "reset-after", "409"], most_in_row=3
    )
    for number in range(12):
        key, winners, version = f"m{number}", [], None
        if number % 2:
            s3.write(key, [b"first"])
            version = s3.version(key)

        def write(data, key=key, version=version, winners=winners):
            if version:
                won = s3.replace(key, data, version, is_equal_to(data))
            else:
                won = s3.create(key, data, is_equal_to(data))
            if won:
                winners.append(data)

        writers = [threading.Thread(target=write, args=(bytes([65 + n]),)) for n in range(3)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert winners == [server.data(key)]
    assert sum(server.injected.values()) > 10


@pytest.mark.parametrize("fault", [*TRANSIENT, "cut cut reset"])
@pytest.mark.parametrize("act", ["begin", "part", "complete", "get"])
def test_a_large_object_survives_faults(server, s3, act, fault):
    server.faults = Script(*fault.split(), act=act)
    s3.write("big", [BIG])
    target = bytearray(len(BIG))
    s3.read("big", 0, [memoryview(target)])
    assert target == BIG and s3.get("big", LIMIT) == BIG and not server.faults.names
    # An upload whose begin was not answered is nobody's: the lifecycle rule of the bucket removes it.
    assert len(server.uploads) == (act == "begin" and fault.endswith("after"))


def test_an_answer_that_is_cut_off_is_asked_for_again(server, s3):
    for fault in ("cut", "cut cut reset cut"):
        server.faults = Script(*fault.split())
        with pytest.raises(FileNotFoundError):
            s3.get("none", 9)
        assert not server.faults.names


@pytest.mark.parametrize("fault", ["500", "reset", "reset-after", "500-after reset 503"])
def test_deletions_are_repeated(server, s3, fault):
    s3.write("x", [b"1"])
    server.faults = Script(*fault.split(), act="delete_many")
    s3.delete(["x"])
    assert server.keys() == [] and not server.faults.names


def test_a_lost_upload_is_an_error(server, s3):
    server.faults = lambda request: server.uploads.clear() if request.act == "complete" else None
    s3.write("big", [b"old"])
    with pytest.raises(BucketUnreachableError, match="bucket/big"):
        s3.write("big", [BIG])
    assert server.data("big") == b"old"


def acts_of(bucket):
    """Each kind of request, on the key "x"."""
    return [
        lambda: bucket.get("x", 9),
        lambda: bucket.read("x", 0, [memoryview(bytearray(5))]),
        lambda: bucket.write("x", [b"1"]),
        lambda: bucket.write("x", [BIG]),
        lambda: bucket.create("x", b"1", is_equal_to(b"1")),
        lambda: bucket.replace("x", b"1", {"e_tag": "1"}, is_equal_to(b"1")),
        lambda: list(bucket.objects("x")),
        lambda: bucket.children("x"),
        lambda: bucket.delete(["x"]),
    ]


def check_errors(acts, kind, *facts):
    for act in acts:
        with pytest.raises(kind) as caught:
            act()
        assert all(fact in str(caught.value) for fact in facts)
        told = "".join(traceback.format_exception(caught.value))
        assert KEY not in told and SECRET not in told and "Signature" not in told
        assert isinstance(caught.value, CheckpointError | ConfigurationError)
        assert not isinstance(caught.value, FileNotFoundError)


@pytest.mark.parametrize(
    ("fault", "fact"),
    [
        ("403", "lack the permission"),
        ("skew", "clock"),
        ("key", "AWS_ACCESS_KEY_ID"),
        ("token", "AWS_ACCESS_KEY_ID"),
    ],
)
def test_refusals(server, s3, fault, fact):
    server.faults = lambda request: fault
    check_errors(acts_of(s3), BucketAccessError, "s3://bucket/x", fact)
    # The answer to HEAD has no text, so it does not say why.
    check_errors([lambda: s3.stat("x"), lambda: s3.version("x")], BucketAccessError, "bucket/x")


def test_a_key_does_not_decide_what_an_answer_means(server, s3, monkeypatch):
    server.faults = lambda request: "403"
    for key in ("redirect", "RequestTimeTooSkewed", "NoSuchBucket"):
        check_errors(
            [lambda key=key: s3.get(key, 9)], BucketAccessError, f"bucket/{key}", "permission"
        )
    server.faults = None
    with pytest.raises(FileNotFoundError):
        s3.get("NoSuchBucket", 9)


def test_a_bucket_that_does_not_exist(server):
    bucket, _ = Bucket.of("s3://other")
    check_errors(acts_of(bucket), BucketAccessError, "s3://other/x", "bucket does not exist")


def test_a_store_without_conditional_puts(server, s3, monkeypatch):
    monkeypatch.setenv("AWS_CONDITIONAL_PUT", "disabled")
    bucket, _ = Bucket.of("s3://bucket")
    acts = [lambda: bucket.create("x", b"1", is_equal_to(b"1"))]
    check_errors(acts, BucketAccessError, "s3://bucket/x", "checkpoint check")


@pytest.fixture
def short_retries(monkeypatch):
    monkeypatch.setattr(buckets, "RETRY_SECONDS", 0.5)
    monkeypatch.setattr(buckets, "_buckets", {})


def test_retries_have_a_limit(server, short_retries):
    bucket, _ = Bucket.of("s3://bucket")
    server.faults = lambda request: "503"
    begin = time.monotonic()
    check_errors(acts_of(bucket)[:3], BucketUnreachableError, "s3://bucket/x", "SlowDown")
    check_errors(acts_of(bucket)[3:5], BucketUnreachableError, "s3://bucket/x")
    assert time.monotonic() - begin < 30
    server.faults = lambda request: "409"
    acts = [lambda: bucket.create("x", b"1", is_equal_to(b"1"))]
    check_errors(acts, BucketUnreachableError, "s3://bucket/x", "Conflict")


def test_a_store_that_cannot_be_reached(server, short_retries, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{unused.getsockname()[1]}"
        for endpoint, fact in [
            (closed, "refused"),
            (server.url.replace("http:", "https:"), "https://"),
            ("http://host.invalid", "host.invalid"),
        ]:
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            bucket, _ = Bucket.of("s3://bucket")
            acts = acts_of(bucket)
            check_errors([acts[0], acts[4]], BucketUnreachableError, "s3://bucket/x", fact)


def test_a_store_that_does_not_answer(server, short_retries, monkeypatch, caplog):
    client = {**buckets._CLIENT, "timeout": "2s", "read_timeout": "1s"}
    monkeypatch.setattr(buckets, "_CLIENT", client)
    monkeypatch.setattr(buckets, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        bucket, _ = Bucket.of("s3://bucket")
        acts = [lambda: bucket.children("x")]
        check_errors(acts, BucketUnreachableError, "list s3://bucket/x", "no answer in time")
    assert "list s3://bucket/x" in caplog.messages[0]


def test_without_credentials(server, short_retries, monkeypatch, tmp_path):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    # boto3 looks for them when the store is opened, obstore at the first request.
    errors = (ConfigurationError, BucketAccessError, BucketUnreachableError)
    with pytest.raises(errors, match=r"s3://bucket.*no credentials.*AWS_ACCESS_KEY_ID"):
        Bucket.of("s3://bucket")[0].get("x", 9)
    pytest.importorskip("boto3")
    text = f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n"
    (tmp_path / "credentials").write_text(text)
    bucket, _ = Bucket.of("s3://bucket")
    bucket.write("x", [b"1"])
    assert bucket.get("x", 9) == b"1"


def test_a_forked_process_says_so(server, s3):
    s3.write("x", [b"1"])
    receiver, sender = multiprocessing.Pipe()

    def read():
        try:
            sender.send(Bucket.of("s3://bucket")[0].get("x", 9))
        except ConfigurationError as error:
            sender.send(str(error))

    child = multiprocessing.get_context("fork").Process(target=read)
    child.start()
    assert receiver.poll(30) and "forked" in receiver.recv()
    child.join()
