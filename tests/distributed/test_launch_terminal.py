# SPDX-License-Identifier: Apache-2.0
"""The launcher and the questions on a terminal: Ctrl-C and Ctrl-D end them, and the terminal is as it was."""

import os
import pty
import subprocess
import sys
import termios

import pytest

MAIN = [sys.executable, "-m", "accelerate.commands.main"]


# Makes standard input the controlling terminal, and becomes the command. Tests in the background may ignore Ctrl-C.
TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A command on a pseudo terminal of its own."""

    def __init__(self, command, home):
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(self.ours)
        env = {**os.environ, "HF_HOME": str(home), "TERM": "xterm"}
        # No `preexec_fn`: Python code between fork and exec can wait for a thread of pytest, which the child has not.
        self.process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", TAKE_TERMINAL, *command],
            stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.text = b""

    def read_until(self, words):
        while words not in self.text:
            self._read()

    def _read(self):
        data = os.read(self.ours, 4096)
        assert data
        self.text += data

    def end(self):
        """The exit code and all that was written."""
        try:
            while True:
                self._read()
        except (OSError, AssertionError):
            return self.process.wait(timeout=60), self.text.decode(errors="replace")

    def press(self, key):
        os.write(self.ours, key)


PROGRESS = """
import os, sys, time
if os.environ["RANK"] == "0":
    # What a progress bar of rich does.
    print("\\x1b[?25l working", flush=True)
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)
time.sleep(60)
"""


@pytest.mark.timeout(120)
def test_the_terminal_is_as_it_was_after_an_interrupt(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRESS)
    terminal = Terminal(
        [*MAIN, "launch", "-q", "--cpu", "--num_processes", "2", str(script)], tmp_path
    )
    terminal.read_until(b"working")
    terminal.press(b"\x03")
    code, text = terminal.end()
    assert code == 130 and "ended by SIGINT" in text and "Traceback" not in text, text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.timeout(120)
def test_a_terminal_that_is_closed_ends_the_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRESS)
    terminal = Terminal(
        [*MAIN, "launch", "-q", "--cpu", "--num_processes", "2", str(script)], tmp_path
    )
    terminal.read_until(b"working")
    os.close(terminal.ours)
    assert terminal.process.wait(timeout=60) == 129


@pytest.mark.timeout(120)
@pytest.mark.parametrize("key", [b"\x03", b"\x04"])
def test_questions_end_on_ctrl_c_and_ctrl_d(tmp_path, key):
    terminal = Terminal([*MAIN, "config"], tmp_path)
    # The first question that this machine does not answer itself.
    terminal.read_until(b"How many machines")
    # Once is enough, also in the moment before the prompt listens.
    terminal.press(key)
    code, text = terminal.end()
    assert code == 130, text
    assert "interrupted; nothing was written" in text and "Traceback" not in text
    assert not (tmp_path / "accelerate").exists()
