"""A debugger in a rank, whose prompt is in the terminal that the run was launched in.

``breakpoint()`` and ``pdb.set_trace()`` open it, and so does an error with ``RunConfig(post_mortem=True)``. What it
prints and asks goes over the rank's wire to the run, which decides who may talk in the terminal and sends the answers.
Only the thread that stopped is held, so beats go on. Where the rank lives in the launching process itself, it is plain
pdb: the run is only told, so that its view makes way.
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

#: Characters that one command may print: what is beyond them is left out, so that no memory fills up with it.
OUTPUT_LIMIT = 2**20
#: Characters of what an error says, at the head of a post mortem.
_LONGEST_MESSAGE = 300
#: Modules in which a step does not stop.
_OURS = ["powertrain", "powertrain.*"]
#: The variable by which the user may choose another debugger, or none; and what it says of the usual one.
_VARIABLE, _USUAL = "PYTHONBREAKPOINT", ("", "pdb.set_trace")
#: What it names for processes that a rank starts anew: nobody would answer a debugger there.
_PASSES_OVER = f"{__name__}.pass_over"


class Dialogue:
    """A rank's talk with the terminal, one debugger at a time. It is the file that a relayed pdb reads and writes.

    ``heard`` and ``over`` are called on the side thread, everything else on the thread that the debugger holds.
    """

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, say: Callable[[FromWorker], None], *, native: bool = False) -> None:
        """``native`` where the debugger has this process's own terminal."""
        self._say, self.native = say, native
        self._answers: queue.SimpleQueue[FromController | None] = queue.SimpleQueue()
        self._in_use, self._thread = threading.Lock(), 0
        #: What was written and not sent yet, what was written last, and how much of it since the last prompt.
        self._unsaid, self._last = list[str](), ""
        self._printed = self._prompts = 0
        #: True once nobody will answer any more, and so no debugger opens.
        self._is_over = False
        #: True from the moment the terminal is asked for until the debugger is left.
        self.is_open = False

    # -- the side thread's

    def heard(self, command: FromController) -> None:
        """The run has answered."""
        if isinstance(command, (DebugEnd, Dismissed)):
            self.over()
        else:
            self._answers.put(command)

    def over(self) -> None:
        """Nobody will answer any more."""
        self._is_over = True
        self._answers.put(None)

    # -- the debugger's

    def open(self, frame: Frame, error: str = "", *, secondary: bool = False) -> bool:
        """Wait for the terminal. False where there is none to be had: then nothing is opened."""
        if self.is_open and self._thread == threading.get_ident():
            return True  # a breakpoint that was stepped into
        self._in_use.acquire()
        if self._is_over:
            self._in_use.release()
            return False
        self.is_open, self._thread = True, threading.get_ident()
        self._say(DebugOpened(frame=frame, error=error, secondary=secondary, native=self.native))
        answer = self._answer(DebugGrant)
        if isinstance(answer, DebugGrant) and answer.granted:
            return True
        self._is_over |= not error  # it was not granted here, and will not be at the next line either
        self._free()
        return False

    def close(self, quit_at: Frame | None = None) -> None:
        """Give the terminal back: the rank goes on, or the run is to end where the user has quit."""
        self._send_all("".join(self._unsaid))
        self._free()
        self._say(DebugClosed())
        if quit_at is not None:
            self._say(DebugQuit(frame=quit_at))

    def _free(self) -> None:
        self.is_open = False
        self._in_use.release()

    def _answer(self, kind: type[Message]) -> FromController | None:
        """The next answer of this kind; None where none will come."""
        while not self._is_over:
            answer = self._answers.get()
            if isinstance(answer, kind):
                return answer
        return None

    # -- the file

    def write(self, text: str) -> int:
        """Keep text for the terminal: what one command prints, up to the limit."""
        room = OUTPUT_LIMIT - self._printed
        if room > 0:
            self._unsaid.append(text[:room])
        self._printed += len(text)
        self._last = text
        if 0 <= room < len(text):
            self._unsaid.append(f"\n[only the first {OUTPUT_LIMIT:,} characters are shown]\n")
        return len(text)

    def flush(self) -> None:
        """Send what was written, but for a line without an end: it may be a prompt."""
        lines, newline, rest = "".join(self._unsaid).rpartition("\n")
        self._unsaid = [rest]
        if newline:
            self._say(DebugOutput(text=_sendable(lines + newline)))

    def readline(self) -> str:
        """Ask for a line; what was written last is the prompt. "" at the end of input."""
        for stream in (sys.__stdout__, sys.__stderr__):
            with contextlib.suppress(Exception):  # what the program prints should be there before the prompt
                stream.flush()  # type: ignore[union-attr]
        prompt = "" if "\n" in self._last else self._last
        self._send_all("".join(self._unsaid).removesuffix(prompt))
        self._prompts += 1
        self._printed = 0
        self._say(DebugPrompt(number=self._prompts, text=_sendable(prompt)))
        answer = self._answer(DebugLine)
        return answer.text if isinstance(answer, DebugLine) else ""

    def _send_all(self, text: str) -> None:
        self._unsaid, self._last = [], ""
        if text:
            self._say(DebugOutput(text=_sendable(text)))

    def isatty(self) -> bool:
        return False


class _Interrupted(BaseException):
    """Ctrl-C was pressed at a prompt in this process's own terminal."""


class _Pdb(pdb.Pdb):
    """pdb in a :class:`Dialogue`: leaving it gives the terminal back, and an end of input goes on."""

    def __init__(self, dialogue: Dialogue) -> None:
        files: Any = {} if dialogue.native else {"stdin": dialogue, "stdout": dialogue}
        # The run hears Ctrl-C, here as always.
        super().__init__(skip=_OURS, nosigint=True, **files)
        self._dialogue = dialogue
        self._leaves = self._is_post_mortem = False

    def interaction(self, frame: FrameType | None, *about: Any) -> None:
        if frame is not None and not self._dialogue.open(_frame(frame)):
            self.set_continue()  # at a breakpoint that was set in an earlier talk: there is none any more
            return
        self._leaves = False
        with self._left_by_interrupt():
            super().interaction(frame, *about)
        if self._leaves or self._is_post_mortem:
            self._dialogue.close(_frame(frame) if self.quitting and frame is not None else None)

    @contextlib.contextmanager
    def _left_by_interrupt(self) -> Iterator[None]:
        """Ctrl-C at a prompt in this process's own terminal leaves it, as the run has others left: it is stopping."""
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

    def look_at(self, traceback: TracebackType) -> None:
        """Talk about an error, with the terminal already granted; it is given back when this returns."""
        self.reset()
        self._is_post_mortem = True
        try:
            self.interaction(None, traceback)
        finally:
            self._is_post_mortem = False

    def setup(self, *about: Any) -> None:
        """Of an error the user's own line is shown first; what that has called is further down."""
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
    """What opens debuggers in this process while it is a rank."""

    def __init__(self, rank: int, dialogue: Dialogue) -> None:
        self._rank, self._dialogue = rank, dialogue
        self._made: _Pdb | None = None
        self._pid = os.getpid()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """``breakpoint()`` and ``pdb.set_trace()`` open this one while the block runs. In the user's own process they
        stay with whoever has them already: an editor, a notebook, a test runner."""
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
        """Let the user look at where ``error`` was raised. Returns when he has, or where he cannot."""
        report, traceback = failure.describe(error), failure.without_ours(error.__traceback__)
        if traceback is None or os.getpid() != self._pid:
            return
        frame = Frame(file=report.file, line=report.line, function=report.function, source=report.source)
        what = f"{report.type}: {report.message}".rstrip(": ")[:_LONGEST_MESSAGE]
        if self._dialogue.open(frame, what, secondary=report.secondary):
            self._pdb().look_at(traceback)

    def _at_breakpoint(self, *args: Any, header: str | None = None, **options: Any) -> None:
        """Stop in the caller's frame. Nothing may follow ``set_trace``: from there on every line is looked at."""
        if os.environ.get(_VARIABLE, "") not in (*_USUAL, _PASSES_OVER):
            sys.__breakpointhook__(*args, **options)  # noqa: T100 (the user's own choice)
            return
        frame = sys._getframe(1)
        if os.getpid() != self._pid:
            _pass_over(frame, f"rank {self._rank}")
        elif self._dialogue.open(_frame(frame)):
            self._stop_tracing()  # where this line was stepped over: its own frames are none to stop in
            if header is not None:
                self._pdb().message(header)
            self._pdb().set_trace(frame)

    def _pdb(self) -> _Pdb:
        """Made when the terminal is granted: by then the view no longer stands between it and this process."""
        if self._made is None:
            self._made = _Pdb(self._dialogue)
        return self._made

    def _leave(self) -> None:
        """The user's function is over: whoever steps through it would step through ours."""
        self._stop_tracing()
        if self._dialogue.is_open:
            self._dialogue.close()

    def _stop_tracing(self) -> None:
        """Look at no more lines, if it is this debugger that does."""
        if getattr(sys.gettrace(), "__self__", None) is self._made is not None:
            sys.settrace(None)


@contextlib.contextmanager
def _passed_over_elsewhere() -> Iterator[None]:
    """Processes that are started anew while the block runs pass over their breakpoints."""
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
    """What ``breakpoint()`` calls in a process that a rank has started anew."""
    _pass_over(sys._getframe(1), "a rank")


#: The process in which it was said already that breakpoints are passed over.
_told_in = 0


def _pass_over(frame: FrameType, rank: str) -> None:
    global _told_in
    if _told_in == os.getpid():
        return
    _told_in = os.getpid()
    where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
    print(
        f"breakpoint() at {where} is passed over: process {os.getpid()} was started by {rank}, and only the rank's own "
        "process can open a debugger. Have a DataLoader load in it, with num_workers=0.",
        file=sys.stderr,
        flush=True,
    )


def where_quit(error: BaseException | None) -> Frame | None:
    """Where the user has quit a debugger, if that is what has raised ``error``: one with a message was only handed on
    from another process, in which nobody has quit anything."""
    if not isinstance(error, bdb.BdbQuit) or error.args:
        return None
    report = failure.describe(error)
    return Frame(file=report.file, line=report.line, function=report.function, source=report.source)


def is_attached() -> bool:
    """True while a debugger, or another tool, looks at every line of this thread: ``python -m pdb script.py``."""
    monitoring: Any = getattr(sys, "monitoring", None)
    return sys.gettrace() is not None or (
        monitoring is not None and monitoring.get_tool(monitoring.DEBUGGER_ID) is not None
    )


def _frame(frame: FrameType) -> Frame:
    return as_frame((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
