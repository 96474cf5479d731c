"""The terminal that a run was launched in, while debuggers of its ranks use it: shows text, and prompts for lines.

A thread of its own writes and reads, from the first debugger to the last: a terminal that takes nothing (Ctrl-S), or a
user who thinks, holds up no other thread. It reads only while a prompt is open, and a line at a time: other input stays
in the terminal.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from powertrain.text.printable import clean_output

#: Characters kept for a terminal that does not take them; later text is left out.
_PENDING_LIMIT = 4 * 2**20
#: Bytes of one write, once the terminal is ready: so many it takes without blocking the thread.
_PIECE = 512
#: Seconds between two checks whether this process is in the foreground again; and for the thread to end.
_POLL_INTERVAL_S, _EXIT_TIMEOUT_S = 0.5, 2.0

#: Held by the one run of this process that has the terminal.
_taken = threading.Lock()


@dataclass(frozen=True)
class Typed:
    """The line typed at prompt ``number``, with its line end; "" at the end of input (Ctrl-D)."""

    number: int
    text: str


def why_unusable() -> str:
    """Return why this process's terminal cannot be used for input; "" where it can."""
    for stream, name in ((sys.stdin, "standard input"), (sys.stdout, "standard output")):
        try:
            if stream is None or not os.isatty(stream.fileno()):
                return f"{name} is not a terminal"
        except (OSError, ValueError, AttributeError):
            return f"{name} is not a terminal"
    return "" if _is_in_foreground(sys.stdin.fileno()) else "this process runs in the background"


def _is_in_foreground(terminal: int) -> bool:
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:  # it is not the terminal of this session
        return False


class Keyboard:
    """Output and input of the terminal; all methods may be called from any thread, and return at once."""

    def __init__(
        self,
        typed: Callable[[Typed], None],
        take: Callable[[], None] = lambda: None,
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        """``typed`` is called with each line; ``take`` before anything is written, and ``give_back`` in the end, to
        have exclusive use. All three on this object's own thread."""
        self._typed, self._take, self._give_back = typed, take, give_back
        self._input, self._output = sys.stdin.fileno(), sys.stdout.fileno()
        self._lock = threading.Lock()
        self._pending: deque[str] = deque()
        self._pending_size = 0
        #: The number and text of the open prompt. And the part of a line that was read without its end.
        self._question: tuple[int, str] | None = None
        self._begun = ""
        #: The begin of an escape sequence whose rest has not come yet.
        self._cut = ""
        #: True while a prompt stands at the end of what was written.
        self._is_at_prompt = False
        self._closes = self._is_over = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="powertrain-keyboard", daemon=True)
        self._thread.start()

    def show(self, text: str) -> None:
        """Write ``text``, which keeps its colours and loses other controls. A prompt that stands there is written again
        after it."""
        with self._lock:
            text, self._cut = _split_cut_sequence(self._cut + text)
            text = _fit(text)
            if self._pending_size > _PENDING_LIMIT:
                return
            self._pending.append(text)
            self._pending_size += len(text)
            if self._pending_size > _PENDING_LIMIT:
                self._pending.append("\n[some text was left out: this terminal is too slow for it]\n")
        self._wake()

    def prompt(self, number: int, prompt: str) -> None:
        """Prompt for a line: ``typed`` is called with ``number`` when there is one. Replaces an older prompt."""
        with self._lock:
            self._question = number, _fit(prompt)
            self._is_at_prompt = False
        self._wake()
        if self._is_over:  # the terminal is gone
            self._answer("")

    def withdraw(self) -> None:
        """Withdraw the open prompt."""
        with self._lock:
            self._question = None
        self._wake()

    def close(self) -> None:
        """Let the thread write the remaining text, and release the terminal."""
        self._closes = True
        self._wake()

    def join(self) -> None:
        """Wait for the thread; but not for a terminal that takes nothing."""
        self._thread.join(_EXIT_TIMEOUT_S)

    def _wake(self) -> None:
        with self._lock, contextlib.suppress(BlockingIOError):  # it is full: the thread will wake
            if not self._is_over:
                os.write(self._wake_write, b"x")

    # -- the thread

    def _run(self) -> None:
        try:
            while not _taken.acquire(timeout=_POLL_INTERVAL_S):
                if self._closes:
                    return
            try:
                self._take()
                self._talk()
            finally:
                self._give_back()
                _taken.release()
        finally:
            with self._lock:
                self._is_over = True
                os.close(self._wake_read)
                os.close(self._wake_write)
            self._answer("")

    def _talk(self) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            while self._write() and not self._closes:
                self._wait()

    def _wait(self) -> None:
        """Wait until there is something to write, or a line was typed at the open prompt."""
        reads = self._question is not None and _is_in_foreground(self._input)
        waits = [self._wake_read, *([self._input] if reads else [])]
        in_background = self._question is not None and not reads
        ready = _ready(waits, select.POLLIN, _POLL_INTERVAL_S if in_background else None)
        if self._wake_read in ready:
            os.read(self._wake_read, 4096)
        elif self._input in ready:
            self._read()

    def _read(self) -> None:
        """Read one line: a terminal gives no more at a time. Without its end it was Ctrl-D in the middle of it."""
        data = os.read(self._input, 4096).decode("utf-8", "replace")
        self._begun += data
        if not data or data.endswith("\n"):
            text, self._begun = self._begun, ""
            self._answer(text)

    def _answer(self, text: str) -> None:
        with self._lock:
            question, self._question = self._question, None
            self._is_at_prompt = False
        if question is not None:
            self._typed(Typed(question[0], text))

    def _write(self) -> bool:
        """Write all pending text, then the prompt. Return False when it is time to end and the terminal takes no
        more."""
        while True:
            with self._lock:
                prompt = self._question[1] if self._question and not self._is_at_prompt else ""
                text = "".join(self._pending)
                if text and self._is_at_prompt:  # on a new line; the prompt comes again
                    text, prompt = f"\n{text}", self._question[1] if self._question else ""
                self._pending.clear()
                self._pending_size = 0
                self._is_at_prompt = self._question is not None
            if not text and not prompt:
                return True
            if not self._put((text + prompt).encode("utf-8", "replace")):
                return False

    def _put(self, data: bytes) -> bool:
        rest = memoryview(data)
        while rest:
            while not _ready([self._output], select.POLLOUT, _POLL_INTERVAL_S):
                if self._closes:
                    return False
            with contextlib.suppress(BlockingIOError):  # where another program has made it non-blocking
                rest = rest[os.write(self._output, rest[:_PIECE]) :]
        return True


def _fit(text: str) -> str:
    """Return text of a rank's debugger for the terminal: a carriage return begins a line and overwrites none."""
    return clean_output(text.replace("\r\n", "\n").replace("\r", "\n"))


def _split_cut_sequence(text: str) -> tuple[str, str]:
    """``text``, and the begin of a colour at its end."""
    cut = re.search(r"\x1b(?:\[[0-9;:]{0,32})?\Z", text)
    return (text[: cut.start()], cut[0]) if cut else (text, "")


def _ready(descriptors: Sequence[int], event: int, within: float | None) -> set[int]:
    """Return the descriptors that are ready for ``event``, or broken. Not ``select``, which fails with many open
    files."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, event)
    return {descriptor for descriptor, _ in poll.poll(None if within is None else within * 1000)}
