# SPDX-License-Identifier: Apache-2.0
"""A rank's output on its way to the console: complete lines, prefixes, delayed tracebacks."""

import errno
import os
import re

import pytest

from accelerate.launchers.streams import RANK_FAILED, TRACEBACK, Stream


@pytest.fixture
def console():
    """A stream to feed, and a function that reads what came out."""
    made = []

    def make(**options):
        source, feed = os.pipe()
        out, sink = os.pipe()
        os.set_blocking(source, False)
        os.set_blocking(out, False)
        stream = Stream(
            source, sink, **{"prefix": None, "log": None, "delay_tracebacks": True, **options}
        )
        made.extend((feed, out, sink))

        def read():
            try:
                return os.read(out, 65536)
            except BlockingIOError:
                return b""

        def write(data):
            os.write(feed, data)
            stream.read()
            return read()

        return stream, write, read

    yield make
    for descriptor in made:
        os.close(descriptor)


def test_lines_are_complete(console):
    stream, write, read = console()
    assert write(b"one\ntw") == b"one\n"
    assert write(b"o\n 50%\r") == b"two\n 50%\r"
    write(b"no end")
    stream.flush()
    assert read() == b"no end"


def test_lines_are_prefixed_with_their_rank(console):
    _, write, _ = console(prefix="[rank1]: ", delay_tracebacks=False)
    assert write(b"a\nb\n") == b"[rank1]: a\n[rank1]: b\n"
    # torch has prefixed the lines of its traceback already.
    assert write(b"[rank1]: c\n") == b"[rank1]: c\n"


def test_a_traceback_is_delayed_from_its_line_on(console):
    stream, write, read = console()
    assert write(b"before\n[rank1]: Trace") == b"before\n"
    assert write(b"back (most recent call last):\n  File\nValueError: x\n") == b""
    assert stream.delayed == "[rank1]: Traceback (most recent call last):\n  File\nValueError: x\n"
    stream.drop_delayed()
    assert stream.delayed == "" and read() == b""
    assert write(b"Traceback (most recent call last):\nX\n") == b""
    stream.flush()
    assert read() == b"Traceback (most recent call last):\nX\n"


def test_what_torch_logs_of_a_lost_store_is_delayed_and_no_failure(console):
    stream, write, read = console()
    log = b"[rank1]:[W1126 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=4): got 0 bytes\nframe #0: x\n"
    assert (
        write(b"before\n" + log) == b"before\n"
        and stream.failing_since is None
        and "before" in stream.last_output
    )
    assert write(TRACEBACK + b"\nX\n") == b"" and stream.failing_since is not None
    stream.flush()
    assert read() == log + TRACEBACK + b"\nX\n"


def test_how_long_a_traceback_is_delayed(console):
    stream, write, read = console()
    write(b"Traceback (most recent call last):\nX\n")
    stream._delayed_since -= 2
    stream._read_at -= 2
    assert not stream.is_expired(False)
    # It has printed more for a while: it has only logged the error.
    write(b"going on\n")
    assert stream.is_expired(False) and not stream.is_expired(True)
    stream.flush()
    assert read() == b"Traceback (most recent call last):\nX\ngoing on\n"
    assert stream.last_output == "Traceback (most recent call last):\nX\ngoing on\n"
    assert stream.failing_since is not None
    assert write(b"more\n") == b"more\n" and stream.failing_since is None


def test_the_first_failure_that_a_starter_reports(console):
    stream, write, _ = console(delay_tracebacks=False)
    write(b"1: KeyError: 'x'\n1: accelerate: rank 1 en")
    write(b"ded, code -9\n0: accelerate: rank 0 ended, code 1\n")
    report = re.search(RANK_FAILED, stream.rank_failure)
    assert report.groups() == (b"1", b"-9")
    assert stream.rank_failure[: report.start()] == b"1: KeyError: 'x'\n1: "


def test_a_prefixed_last_line_is_completed(console):
    stream, write, read = console(prefix="[rank0]: ")
    write(b"no end")
    stream.finish()
    assert read() == b"[rank0]: no end\n"


def test_a_progress_bar_stays_before_what_is_printed_after_it(console):
    """Its last state has no line end; it is on the other stream."""
    (bar, write_bar, read_bar), (output, write_output, _) = console(), console()
    bar.other, output.other = output, bar
    assert write_bar(b"\rbar 9") == b"\r"
    assert (write_output(b"\nend\n"), read_bar()) == (b"\nend\n", b"bar 9")
    # Lines of several ranks with prefixes do not mix.
    output.prefix = b"[rank0]: "
    assert write_bar(b"x") == b"" and write_output(b"end\n") and read_bar() == b""


def test_a_full_disk_is_recorded(tmp_path):
    source, feed = os.pipe()
    with (
        open("/dev/full", "wb", buffering=0) as full,
        open(tmp_path / "log", "wb", buffering=0) as log,
    ):
        stream = Stream(source, full.fileno(), None, log, delay_tracebacks=False)
        os.write(feed, b"lost\n")
        stream.read()
        assert stream.lost.errno == errno.ENOSPC and (tmp_path / "log").read_bytes() == b"lost\n"
        os.close(feed)
        stream.read()
