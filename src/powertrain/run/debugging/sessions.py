"""Debuggers of ranks in the one terminal: who may talk there, who waits, and what is said of it.

A rank that stops asks for the terminal. One has it at a time; the others wait in the order in which they came. Whoever
has it keeps it until he leaves his debugger, or runs for a while although others wait: he may be waiting for them.
"""

from __future__ import annotations

import codecs
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from powertrain.run.debugging.keyboard import Keyboard, Typed, why_unusable
from powertrain.run.workers.attempt import TRAINING, Attempt, Member
from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_controller import DebugEnd, DebugGrant, DebugLine
from powertrain.wire.from_worker import DebugClosed, DebugOpened, DebugOutput, DebugPrompt
from powertrain.wire.values import Frame

#: Seconds for which a debugger that runs keeps the terminal while others wait for it.
TURN = 1.0
#: Characters that are kept of what a debugger says before it has the terminal.
_OUTPUT_LIMIT = 2**20


class TerminalView(Protocol):
    """What shows the run in the same terminal, and can keep off it."""

    def hold(self) -> None: ...
    def release(self) -> None: ...


class Turns:
    """Who has the terminal, and who waits for it, as numbers of ranks. Pure."""

    def __init__(self) -> None:
        self.holder: int | None = None
        self.waiting: list[int] = []

    def ask(self, rank: int) -> bool:
        """True where it has the terminal now; else it waits, behind those who do already."""
        if self.holder is None:
            self.holder = rank
        elif self.holder != rank and rank not in self.waiting:
            self.waiting.append(rank)
        return self.holder == rank

    def leave(self, rank: int) -> int | None:
        """Who gets the terminal because this one has left it; None where nobody does."""
        if rank in self.waiting:
            self.waiting.remove(rank)
        if rank != self.holder:
            return None
        self.holder = self.waiting.pop(0) if self.waiting else None
        return self.holder


@dataclass
class DebuggerSession:
    """A rank's debugger, from the moment it asks for the terminal until it is left."""

    member: Member
    opened: DebugOpened
    granted: bool = False
    #: What it asks for, if it waits for a line.
    prompt: DebugPrompt | None = None
    #: What it has said while another one had the terminal.
    unshown: str = ""
    #: Of what its rank prints meanwhile.
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    @property
    def place(self) -> str:
        return place_of(self.opened.frame)


def place_of(frame: Frame) -> str:
    """ "train.py:31"."""
    return f"{os.path.basename(frame.file)}:{frame.line}"


def header(session: DebuggerSession, attempt: Attempt) -> str:
    """What is said when a debugger gets the terminal for the first time."""
    member, opened, others = session.member, session.opened, attempt.world_size - 1
    who = f"rank {member.rank} (pid {member.pid}) "
    who += f"raised {opened.error} at " if opened.error else "at "
    paused = {0: "", 1: "; the timeouts of the other rank are paused"}.get(
        others, f"; the timeouts of the other {others} ranks are paused"
    )
    leave = "; q to let the run fail" if opened.error else ""
    return f"{who}{session.place} in {opened.frame.function}{paused}{leave}; h for help\n"


def waits(session: DebuggerSession) -> str:
    """What is said of a rank that has to wait for the terminal."""
    if session.granted:
        return f"rank {session.member.rank} waits with its debugger\n"
    if session.opened.error:
        return f"rank {session.member.rank} waits with {session.opened.error}, {session.place}\n"
    return f"rank {session.member.rank} waits at its breakpoint, {session.place}\n"


def again(session: DebuggerSession) -> str:
    """What is said when a debugger gets the terminal back from another."""
    return f"rank {session.member.rank} talks again\n"


def passed_over(opened: DebugOpened, why: str) -> str:
    """What is said of a debugger that cannot be opened at all."""
    what = "No debugger is opened for the error" if opened.error else "breakpoint() was passed over"
    return (
        f"{what} at {place_of(opened.frame)}: {why}. Start the script itself in the foreground of a terminal, "
        "or debug it in one process with num_workers=0."
    )


class Debugging:
    """The debuggers of a run. The controller's thread only, but for :meth:`printed`."""

    def __init__(
        self,
        launcher: str,
        view: TerminalView,
        *,
        send: Callable[[Member, FromController], None],
        post: Callable[[Any], None],
        tell_once: Callable[[str], None],
        begun: Callable[[], None],
        over: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``launcher`` started this process and has its terminal; "" for none. ``begun`` is called when the first
        debugger opens, ``over`` with the seconds for which any was open when the last one is closed."""
        self._launcher, self._view = launcher, view
        self._send, self._post, self._tell_once = send, post, tell_once
        self._begun, self._over, self._clock = begun, over, clock
        self._sessions: dict[int, DebuggerSession] = {}
        self._turns = Turns()
        #: The rank that had the terminal last; -1 before the first.
        self._talked = -1
        self._keyboard: Keyboard | None = None
        #: The one that was let go of last, which may still have something to write.
        self._last: Keyboard | None = None
        #: How many lines were asked for: the number of the last question.
        self._questions = 0
        self._since = 0.0
        #: When the one that has the terminal is made to share it; inf while that is not in question.
        self.due = float("inf")
        #: The attempt in which an error was looked at already.
        self._looked_at = -1
        self._is_ending = False

    @property
    def is_open(self) -> bool:
        """True while any rank is in a debugger, or waits to be."""
        return bool(self._sessions)

    # -- what ranks say

    def heard(self, member: Member, message: FromWorker) -> None:
        """A rank's debugger says something."""
        session = self._sessions.get(member.rank)
        match message:
            case DebugOpened():
                self._opened(member, message)
            case DebugOutput() if session is not None:
                self._said(session, message.text)
            case DebugPrompt() if session is not None:
                session.prompt = message
                self._want(session)
            case DebugClosed() if session is not None:
                self._leave(session)

    def _opened(self, member: Member, opened: DebugOpened) -> None:
        if not self._may_open(member, opened):
            self._send(member, DebugGrant(granted=False))
            return
        if opened.error:
            self._looked_at = member.attempt.number
        if not self._sessions:
            self._since = self._clock()
            self._begun()
        self._sessions[member.rank] = DebuggerSession(member, opened)
        self._want(self._sessions[member.rank])

    def _may_open(self, member: Member, opened: DebugOpened) -> bool:
        """One error is looked at, the first that is no echo; the others are in the logs and in the report."""
        attempt = member.attempt
        if self._is_ending or attempt.phase != TRAINING:
            return False
        if opened.error and (opened.secondary or self._looked_at == attempt.number):
            return False
        why = "" if opened.native else self._why_unusable()
        if why:
            self._tell_once(passed_over(opened, why))
        return not why

    def _why_unusable(self) -> str:
        return f"{self._launcher} has the terminal" if self._launcher else why_unusable()

    def _said(self, session: DebuggerSession, text: str) -> None:
        if self._has_turn(session):
            self._show(text)
        else:
            session.unshown = (session.unshown + text)[-_OUTPUT_LIMIT:]

    def gone(self, member: Member) -> None:
        """The rank's process has ended."""
        session = self._sessions.get(member.rank)
        if session is not None:
            self._withdraw(session)
            self._show(f"rank {member.rank} has ended, and its debugger with it\n")
            self._leave(session)

    # -- what the user says

    def typed(self, typed: Typed) -> None:
        """A line was typed."""
        session = self._talking
        if session is not None and session.prompt is not None and typed.number == self._questions:
            self._send(session.member, DebugLine(number=session.prompt.number, text=typed.text))
            session.prompt = None
            self._share()

    def share(self) -> None:
        """At :attr:`due`: the one that has the terminal still runs, and others wait for it."""
        self.due = float("inf")
        session = self._talking
        if session is not None and session.prompt is None and self._turns.waiting:
            self._show(f"rank {session.member.rank} is still running\n")
            self._pass_on(session)

    def printed(self, rank: int, data: bytes) -> bool:
        """Show what a rank prints while it is stepped through. False where that is for others to show. Any thread."""
        session, keyboard = self._sessions.get(rank), self._keyboard
        if session is None or keyboard is None or not self._has_turn(session):
            return False
        keyboard.show(session.decoder.decode(data))
        return True

    # -- the end

    def end(self, why: str) -> None:
        """Have every debugger left, and open none any more. Plain pdb is left when the user does."""
        self._is_ending = True
        if any(session.opened.native for session in self._sessions.values()):
            return
        for session in self._sessions.values():
            self._send(session.member, DebugEnd())
        self.forget(why)

    def close(self) -> None:
        """Let go of the terminal."""
        self.forget("the run is over")
        if self._last is not None:
            self._last.join()

    def forget(self, why: str) -> None:
        """All debuggers are left: their processes are being ended, or are told to go on."""
        if self._sessions:
            if self._keyboard is not None:
                self._keyboard.withdraw()
            self._show(f"{why}: all debuggers are left\n")
            self._sessions.clear()
            self._turns = Turns()
            self._end_talk()

    # -- turns

    @property
    def _talking(self) -> DebuggerSession | None:
        """The one that has the terminal."""
        holder = self._turns.holder
        return self._sessions.get(holder) if holder is not None else None

    def _has_turn(self, session: DebuggerSession) -> bool:
        return self._turns.holder == session.member.rank

    def _want(self, session: DebuggerSession) -> None:
        """Let it talk, or wait."""
        was_waiting = session.member.rank in self._turns.waiting
        if self._turns.ask(session.member.rank):
            self._let_talk(session)
        elif not was_waiting:
            self._show(waits(session))
            self._share()

    def _let_talk(self, session: DebuggerSession) -> None:
        if session.opened.native:
            self._view.hold()
        elif self._keyboard is None:
            self._keyboard = Keyboard(self._post, self._view.hold, self._view.release)
        if not session.granted:
            session.granted = True
            self._show(header(session, session.member.attempt))
            self._send(session.member, DebugGrant(granted=True))
        elif self._talked != session.member.rank:
            self._show(again(session))
        self._talked = session.member.rank
        if session.unshown:
            self._show(session.unshown)
            session.unshown = ""
        if session.prompt is not None and self._keyboard is not None:
            self.due = float("inf")
            self._questions += 1
            self._keyboard.ask(self._questions, session.prompt.text)

    def _share(self) -> None:
        """Whoever has the terminal, runs and is waited for has it for a while longer."""
        runs = self._talking is not None and self._talking.prompt is None
        if runs and self._turns.waiting and self.due == float("inf"):
            self.due = self._clock() + TURN

    def _pass_on(self, session: DebuggerSession) -> None:
        rank = self._turns.leave(session.member.rank)
        if rank is not None:
            self._let_talk(self._sessions[rank])
            self._share()

    def _leave(self, session: DebuggerSession) -> None:
        """It is left, for whatever reason: the next one may talk."""
        del self._sessions[session.member.rank]
        self._withdraw(session)
        self._pass_on(session)
        if not self._sessions:
            self._end_talk()

    def _withdraw(self, session: DebuggerSession) -> None:
        """It will not take a line any more."""
        if self._has_turn(session):
            self.due = float("inf")
            if self._keyboard is not None:
                self._keyboard.withdraw()

    def _end_talk(self) -> None:
        self._last, self._keyboard = self._keyboard, None
        self.due = float("inf")
        if self._last is not None:
            self._last.close()
        else:
            self._view.release()
        self._over(self._clock() - self._since)

    def _show(self, text: str) -> None:
        if self._keyboard is not None:
            self._keyboard.show(text)
