# SPDX-License-Identifier: Apache-2.0
"""A rank's output on its way to the console: whole lines, marks, held tracebacks."""

import os

import pytest

from accelerate.launchers.streams import Stream


@pytest.fixture
def console():
    """A stream to feed, and a function that reads what came out."""
    made = []

    def make(**options):
        source, feed = os.pipe()
        out, sink = os.pipe()
        os.set_blocking(source, False)
        os.set_blocking(out, False)
        stream = Stream(source, sink, **{"mark": None, "log": None, "holding": True, **options})
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


def test_lines_come_out_whole(console):
    stream, write, read = console()
    assert write(b"one\ntw") == b"one\n"
    assert write(b"o\n 50%\r") == b"two\n 50%\r"
    write(b"no end")
    stream.release()
    assert read() == b"no end"


def test_lines_are_marked_with_their_rank(console):
    _, write, _ = console(mark="[rank1]: ", holding=False)
    assert write(b"a\nb\n") == b"[rank1]: a\n[rank1]: b\n"
    # torch has marked the lines of its traceback already.
    assert write(b"[rank1]: c\n") == b"[rank1]: c\n"


def test_a_traceback_is_held_from_its_line_on(console):
    stream, write, read = console()
    assert write(b"before\n[rank1]: Trace") == b"before\n"
    assert write(b"back (most recent call last):\n  File\nValueError: x\n") == b""
    assert stream.drop() == b"[rank1]: Traceback (most recent call last):\n  File\nValueError: x\n"
    assert write(b"Traceback (most recent call last):\nX\n") == b""
    stream.release()
    assert read() == b"Traceback (most recent call last):\nX\n"


def test_a_survived_traceback_is_shown(console, monkeypatch):
    stream, write, _ = console()
    write(b"Traceback (most recent call last):\nX\n")
    stream.held_since -= 2
    assert write(b"going on\n") == b"Traceback (most recent call last):\nX\ngoing on\n"


def test_a_lone_traceback_is_held_for_a_shorter_time(console):
    stream, write, read = console()
    write(b"Traceback (most recent call last):\nX\n")
    stream.held_since -= 2
    stream.release_if_old()
    assert read() == b""
    stream.release_if_old(alone=True)
    assert read() == stream.shown == b"Traceback (most recent call last):\nX\n"


def test_a_terminal_that_a_killed_process_has_changed_is_brought_back():
    from accelerate.launchers.streams import Modes

    modes = Modes()
    modes.note(b"text \x1b[?25l bar \x1b[?1049h")
    assert modes.undoing() == b"\x1b[?25h\x1b[?1049l\x1b[0m"
    modes.note(b"\x1b[?1049l\x1b[?25h")
    assert modes.undoing() == b""
