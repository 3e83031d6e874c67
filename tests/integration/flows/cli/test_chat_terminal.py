"""The chat on a terminal: keys, history, Ctrl-C and Ctrl-D."""

import os
import pty
import re
import select
import subprocess
import sys
import time
from typing import Self

import psutil
import pytest

from flows.cli.app import main

pytestmark = pytest.mark.torch

CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Terminal:
    """A chat whose terminal the test is."""

    def __init__(self, *words: str) -> None:
        self._screen, side = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli.app", "chat", *words],
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # Ctrl-C goes to it
            env={**os.environ, "TERM": "xterm"},
        )
        os.close(side)
        self._shown = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._screen)

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def interrupt_line(self) -> None:
        """Ctrl-C while a line is typed.

        Python's `input` notices a signal that comes just before it waits for a key only at the next
        key: too early for a user, but not for one of many tests. So it waits for a key first.
        """
        process = psutil.Process(self._process.pid)
        asleep, end = 0, time.monotonic() + 60
        while asleep < 10 and time.monotonic() < end:
            time.sleep(0.01)
            asleep = asleep + 1 if process.status() == psutil.STATUS_SLEEPING else 0
        self.type(CTRL_C)

    def wait_for(self, pattern: str, *, seconds: float = 200.0) -> str:
        """What was shown since the last wait, up to what matches."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self._shown)) is None:
            left = end - time.monotonic()
            ready, _, _ = select.select([self._screen], [], [], max(left, 0))
            assert ready, f"no {pattern!r} in {self._shown!r}"
            self._shown += os.read(self._screen, 4096).decode("utf-8", "replace")
        shown, self._shown = self._shown[: found.end()], self._shown[found.end() :]
        return shown

    def code(self) -> int:
        """The exit code, once it has left."""
        return self._process.wait()


def test_history_settings_and_control_keys(model, tmp_path):
    words = (str(model), "--home", str(tmp_path), "--max-tokens", "900", "--temperature", "0")
    with Terminal(*words) as terminal:
        greeting = terminal.wait_for("> $")
        assert "parameters: a tiny model" in greeting
        terminal.type("/seed 5\r")
        terminal.wait_for("\r\nseed 5\r\n> $")
        terminal.type(UP + "1\r")  # the line before, and one more digit
        terminal.wait_for("\r\nseed 51\r\n> $")

        terminal.type("hello\r")
        terminal.wait_for("hello\r\n.{20}")
        terminal.type(CTRL_C)
        terminal.wait_for(r" \[stopped\]\r\n> $")

        terminal.type("half a li")
        terminal.wait_for("half a li$")
        terminal.interrupt_line()
        terminal.wait_for(r"Ctrl-C again leaves\.\r\n> $")
        terminal.type("/topk\r")  # between two of them, so the chat does not end
        terminal.wait_for("top_k 50\r\n> $")
        terminal.interrupt_line()
        terminal.wait_for(r"Ctrl-C again leaves\.\r\n> $")
        terminal.type(CTRL_D)
        assert terminal.code() == 0

    history = tmp_path / "chat_history"
    assert history.read_text().splitlines() == ["/seed 5", "/seed 51", "hello", "/topk"]
    assert history.stat().st_mode & 0o077 == 0

    with Terminal(*words) as terminal:
        terminal.wait_for("> $")
        terminal.type(UP + UP + UP + "\r")  # what the session before typed
        terminal.wait_for("\r\nseed 51\r\n> $")
        terminal.interrupt_line()
        terminal.wait_for(r"Ctrl-C again leaves\.\r\n> $")
        terminal.interrupt_line()
        assert terminal.code() == 0
    assert history.read_text().splitlines()[-1] == "/seed 51"


def test_a_pipe_gets_the_answers_and_nothing_else(model, tmp_path, capfdbinary):
    words = ["chat", str(model), "--max-tokens", "8", "--home", str(tmp_path), "--seed", "1"]
    command = [sys.executable, "-m", "flows.cli.app", *words]
    piped = subprocess.run(command, input=b"hi\n", capture_output=True, check=True)
    assert main([*words, "-p", "hi"]) == 0
    assert (piped.stdout, piped.stderr) == capfdbinary.readouterr()
    assert piped.stdout.endswith(b"\n")
    assert not (tmp_path / "chat_history").exists()
