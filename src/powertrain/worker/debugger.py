"""A debugger in a rank, whose prompt is in the terminal that the run was launched in.

``breakpoint()`` and ``pdb.set_trace()`` open it, and so does an error with ``RunConfig(post_mortem=True)``. Its output
and prompts go over the rank's wire to the run, which decides which debugger has the terminal and sends the replies.
Only the thread that stopped is held, so heartbeats continue. Where the rank lives in the launching process itself, it
is plain pdb: the run is only notified, so that its view releases the terminal.
"""

from __future__ import annotations

import bdb
import contextlib
import os
import pdb  # noqa: T100 (this is what debugs a rank)
import queue
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

from powertrain.trace.stacks.frames import as_frame, is_users
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_controller import DebugEnd, DebugGrant, DebugLine, Dismissed
from powertrain.wire.from_worker import DebugClosed, DebugOpened, DebugOutput, DebugPrompt, DebugQuit
from powertrain.wire.values import Frame, Message
from powertrain.worker import failure

#: Characters that one command may print: the rest is left out, so that memory stays bounded.
OUTPUT_LIMIT = 2**20
#: Characters of an error's message, at the head of a post mortem.
_LONGEST_MESSAGE = 300
#: Modules in which a step does not stop.
_OURS = ["powertrain", "powertrain.*"]
#: The variable by which the user may choose another debugger, or none; and its values for the usual one.
_VARIABLE, _USUAL = "PYTHONBREAKPOINT", ("", "pdb.set_trace")
#: Its value for processes that a rank starts: a debugger there would have no terminal.
_PASSES_OVER = f"{__name__}.pass_over"


class Dialogue:
    """The connection of a rank's debugger with the terminal, one at a time. A relayed pdb reads and writes it as a
    file.

    ``on_reply`` and ``over`` are called on the side thread, everything else on the thread that the debugger holds.
    """

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, send: Callable[[FromWorker], None], *, native: bool = False) -> None:
        """``native`` where the debugger has this process's own terminal."""
        self._send, self.native = send, native
        self._answers: queue.SimpleQueue[FromController | None] = queue.SimpleQueue()
        self._in_use, self._thread = threading.Lock(), 0
        #: Text that was not sent yet, the text written last, and the characters written since the last prompt.
        self._unsent, self._last = list[str](), ""
        self._printed = self._prompts = 0
        #: True once no more replies will come, and so no debugger opens.
        self._is_over = False
        #: True from the request for the terminal until the debugger is left.
        self.is_open = False

    # -- the side thread's

    def on_reply(self, command: FromController) -> None:
        """Handle a reply of the run."""
        if isinstance(command, (DebugEnd, Dismissed)):
            self.over()
        else:
            self._answers.put(command)

    def over(self) -> None:
        """Note that no more replies will come."""
        self._is_over = True
        self._answers.put(None)

    # -- the debugger's

    def open(self, frame: Frame, error: str = "", *, secondary: bool = False) -> bool:
        """Wait for the terminal. Return False where there is none: then no debugger opens."""
        if self.is_open and self._thread == threading.get_ident():
            return True  # a breakpoint that was stepped into
        self._in_use.acquire()
        if self._is_over:
            self._in_use.release()
            return False
        self.is_open, self._thread = True, threading.get_ident()
        self._send(DebugOpened(frame=frame, error=error, secondary=secondary, native=self.native))
        answer = self._answer(DebugGrant)
        if isinstance(answer, DebugGrant) and answer.granted:
            return True
        self._is_over |= not error  # it was not granted here, and will not be at the next line either
        self._free()
        return False

    def close(self, quit_at: Frame | None = None) -> None:
        """Release the terminal: the rank continues, or the run ends where the user has quit."""
        self._send_all("".join(self._unsent))
        self._free()
        self._send(DebugClosed())
        if quit_at is not None:
            self._send(DebugQuit(frame=quit_at))

    def _free(self) -> None:
        self.is_open = False
        self._in_use.release()

    def _answer(self, kind: type[Message]) -> FromController | None:
        """Return the next reply of this kind; None where none will come."""
        while not self._is_over:
            answer = self._answers.get()
            if isinstance(answer, kind):
                return answer
        return None

    # -- the file

    def write(self, text: str) -> int:
        """Keep text for the terminal: the output of one command, up to the limit."""
        room = OUTPUT_LIMIT - self._printed
        if room > 0:
            self._unsent.append(text[:room])
        self._printed += len(text)
        self._last = text
        if 0 <= room < len(text):
            self._unsent.append(f"\n[only the first {OUTPUT_LIMIT:,} characters are shown]\n")
        return len(text)

    def flush(self) -> None:
        """Send the written text, except a line without an end: it may be a prompt."""
        lines, newline, rest = "".join(self._unsent).rpartition("\n")
        self._unsent = [rest]
        if newline:
            self._send(DebugOutput(text=_sendable(lines + newline)))

    def readline(self) -> str:
        """Prompt for a line; the text written last is the prompt. "" at the end of input."""
        for stream in (sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):  # output of the program should be shown before the prompt
                stream.flush()  # type: ignore[union-attr]
        prompt = "" if "\n" in self._last else self._last
        self._send_all("".join(self._unsent).removesuffix(prompt))
        self._prompts += 1
        self._printed = 0
        self._send(DebugPrompt(number=self._prompts, text=_sendable(prompt)))
        answer = self._answer(DebugLine)
        return answer.text if isinstance(answer, DebugLine) else ""

    def _send_all(self, text: str) -> None:
        self._unsent, self._last = [], ""
        if text:
            self._send(DebugOutput(text=_sendable(text)))

    def isatty(self) -> bool:
        return False


class _Interrupted(BaseException):
    """Ctrl-C was pressed at a prompt in this process's own terminal."""


class _Pdb(pdb.Pdb):
    """pdb in a :class:`Dialogue`: leaving it releases the terminal, and an end of input continues."""

    def __init__(self, dialogue: Dialogue) -> None:
        files: Any = {} if dialogue.native else {"stdin": dialogue, "stdout": dialogue}
        # The run handles Ctrl-C, here as always.
        super().__init__(skip=_OURS, nosigint=True, **files)
        self._dialogue = dialogue
        self._leaves = self._is_post_mortem = False

    def interaction(self, frame: FrameType | None, *about: Any) -> None:
        if frame is not None and not self._dialogue.open(_frame(frame)):
            self.set_continue()  # at a breakpoint that was set in an earlier session, which is over
            return
        self._leaves = False
        with self._left_by_interrupt():
            super().interaction(frame, *about)
        if self._leaves or self._is_post_mortem:
            self._dialogue.close(_frame(frame) if self.quitting and frame is not None else None)

    @contextlib.contextmanager
    def _left_by_interrupt(self) -> Iterator[None]:
        """Leave the debugger on Ctrl-C at a prompt in this process's own terminal: the run is stopping."""
        if not self._dialogue.native or threading.current_thread() is not threading.main_thread():
            yield
            return
        before: Any = signal.getsignal(signal.SIGINT)

        def leave(*caught: Any) -> None:
            with contextlib.suppress(KeyboardInterrupt):  # which pdb takes for itself
                if callable(before):
                    before(*caught)
            raise _Interrupted

        signal.signal(signal.SIGINT, leave)
        try:
            yield
        except _Interrupted:
            self.message("")
            self.forget()
            self.set_continue()
        finally:
            signal.signal(signal.SIGINT, before)

    def post_mortem_at(self, traceback: TracebackType) -> None:
        """Debug an error, with the terminal already granted; it is released when this returns."""
        self.reset()
        self._is_post_mortem = True
        try:
            self.interaction(None, traceback)
        finally:
            self._is_post_mortem = False

    def setup(self, *about: Any) -> None:
        """Show the user's own line of an error first; the frames it has called are further down."""
        super().setup(*about)
        users = [n for n, (frame, _) in enumerate(self.stack) if is_users(frame.f_code.co_filename)]
        if self._is_post_mortem and users:
            with self._in_silence():
                self._select_frame(users[-1])

    @contextlib.contextmanager
    def _in_silence(self) -> Iterator[None]:
        before = self.stdout
        with open(os.devnull, "w") as nowhere:
            self.stdout = nowhere
            try:
                yield
            finally:
                self.stdout = before

    def set_continue(self) -> None:
        super().set_continue()
        self._leaves = True

    def set_quit(self) -> None:
        super().set_quit()
        self._leaves = True

    def do_interact(self, arg: str) -> bool | None:
        own: Any = self._dialogue
        before = sys.stdin, sys.stdout, sys.stderr
        if not self._dialogue.native:
            sys.stdin = sys.stdout = sys.stderr = own
        try:
            return super().do_interact(arg)
        finally:
            sys.stdin, sys.stdout, sys.stderr = before

    do_interact.__doc__ = pdb.Pdb.do_interact.__doc__  # which is what its help says

    def do_EOF(self, arg: str) -> bool | None:
        """EOF (Ctrl-D)

        Go on, as ``continue`` does.
        """
        self.message("")
        return self.do_continue(arg)


class Debugger:
    """Opens debuggers in this process while it is a rank."""

    def __init__(self, rank: int, dialogue: Dialogue) -> None:
        self._rank, self._dialogue = rank, dialogue
        self._made: _Pdb | None = None
        self._pid = os.getpid()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Make ``breakpoint()`` and ``pdb.set_trace()`` open this debugger while the block runs. In the user's own
        process existing hooks stay: of an editor, a notebook, a test runner."""
        before = sys.breakpointhook, pdb.set_trace
        if not self._dialogue.native or sys.breakpointhook is sys.__breakpointhook__:
            sys.breakpointhook = self._at_breakpoint
            pdb.set_trace = self._at_breakpoint
        try:
            with _passed_over_elsewhere():
                yield
        finally:
            self._leave()
            sys.breakpointhook, pdb.set_trace = before

    def post_mortem(self, error: BaseException) -> None:
        """Open a debugger where ``error`` was raised. Returns when the user leaves it, or where it cannot open."""
        report, traceback = failure.describe(error), failure.without_ours(error.__traceback__)
        if traceback is None or os.getpid() != self._pid:
            return
        frame = Frame(file=report.file, line=report.line, function=report.function, source=report.source)
        what = f"{report.type}: {report.message}".rstrip(": ")[:_LONGEST_MESSAGE]
        if self._dialogue.open(frame, what, secondary=report.secondary):
            self._pdb().post_mortem_at(traceback)

    def _at_breakpoint(self, *args: Any, header: str | None = None, **options: Any) -> None:
        """Stop in the caller's frame. Nothing may follow ``set_trace``: from there on every line is traced."""
        if os.environ.get(_VARIABLE, "") not in (*_USUAL, _PASSES_OVER):
            sys.__breakpointhook__(*args, **options)  # noqa: T100 (the user's own choice)
            return
        frame = sys._getframe(1)
        if os.getpid() != self._pid:
            _pass_over(frame, f"rank {self._rank}")
        elif self._dialogue.open(_frame(frame)):
            self._stop_tracing()  # where this line was stepped over: do not stop in these frames
            if header is not None:
                self._pdb().message(header)
            self._pdb().set_trace(frame)

    def _pdb(self) -> _Pdb:
        """Return a new pdb. Made when the terminal is granted: by then the view has released it."""
        if self._made is None:
            self._made = _Pdb(self._dialogue)
        return self._made

    def _leave(self) -> None:
        """Stop tracing after the user's function: stepping on would lead into this package."""
        self._stop_tracing()
        if self._dialogue.is_open:
            self._dialogue.close()

    def _stop_tracing(self) -> None:
        """Stop tracing lines, if it is this debugger that does."""
        if getattr(sys.gettrace(), "__self__", None) is self._made is not None:
            sys.settrace(None)


@contextlib.contextmanager
def _passed_over_elsewhere() -> Iterator[None]:
    """Make processes that are started while the block runs pass over their breakpoints."""
    before = os.environ.get(_VARIABLE)
    if (before or "") in _USUAL:
        os.environ[_VARIABLE] = _PASSES_OVER
    try:
        yield
    finally:
        if os.environ.get(_VARIABLE) == _PASSES_OVER:
            del os.environ[_VARIABLE]
            if before is not None:
                os.environ[_VARIABLE] = before


def pass_over(*_: Any, **__: Any) -> None:
    """Pass over ``breakpoint()`` in a process that a rank has started."""
    _pass_over(sys._getframe(1), "a rank")


#: The process that has already warned that breakpoints are passed over.
_warned_in = 0


def _pass_over(frame: FrameType, rank: str) -> None:
    global _warned_in
    if _warned_in == os.getpid():
        return
    _warned_in = os.getpid()
    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    print(
        f"breakpoint() at {where} is passed over: process {os.getpid()} was started by {rank}, and only the rank's own "
        "process can open a debugger. Have a DataLoader load in it, with num_workers=0.",
        file=sys.stderr,
        flush=True,
    )


def where_quit(error: BaseException | None) -> Frame | None:
    """Return where the user has quit a debugger, if that raised ``error``. An error with a message was passed on from
    another process, in which no debugger was quit."""
    if not isinstance(error, bdb.BdbQuit) or error.args:
        return None
    report = failure.describe(error)
    return Frame(file=report.file, line=report.line, function=report.function, source=report.source)


def is_attached() -> bool:
    """Return True while a debugger, or another tool, traces every line of this thread: ``python -m pdb script.py``."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )


def _frame(frame: FrameType) -> Frame:
    return as_frame((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
