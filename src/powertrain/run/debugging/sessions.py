"""Debuggers of ranks in the one terminal: which has it, which wait, and the lines shown about it.

A rank that stops requests the terminal. One has it at a time; the others wait in the order of their requests. A rank
keeps it until its debugger is left, or has been running for a while although others wait: it may be waiting for them.
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
TURN_TIMEOUT_S = 1.0
#: Characters that are kept of a debugger's output before it has the terminal.
_OUTPUT_LIMIT = 2**20


class TerminalView(Protocol):
    """The view of the run in the same terminal, which can release it."""

    def hold(self) -> None: ...
    def release(self) -> None: ...


class Turns:
    """The rank that has the terminal, and those that wait for it. Pure."""

    def __init__(self) -> None:
        self.holder: int | None = None
        self.waiting: list[int] = []

    def request(self, rank: int) -> bool:
        """Return True where the rank has the terminal now; else it joins the queue."""
        if self.holder is None:
            self.holder = rank
        elif self.holder != rank and rank not in self.waiting:
            self.waiting.append(rank)
        return self.holder == rank

    def leave(self, rank: int) -> int | None:
        """Return the rank that gets the terminal because this one has left it; None for none."""
        if rank in self.waiting:
            self.waiting.remove(rank)
        if rank != self.holder:
            return None
        self.holder = self.waiting.pop(0) if self.waiting else None
        return self.holder


@dataclass
class DebuggerSession:
    """A rank's debugger, from its request for the terminal until it is left."""

    member: Member
    opened: DebugOpened
    granted: bool = False
    #: Its prompt, if it waits for a line.
    prompt: DebugPrompt | None = None
    #: Its output while another rank had the terminal.
    unshown: str = ""
    #: Decodes the output of its rank.
    decoder: Any = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))

    @property
    def place(self) -> str:
        return place_of(self.opened.frame)


def place_of(frame: Frame) -> str:
    """ "train.py:31"."""
    return f"{os.path.basename(frame.file)}:{frame.line}"


def header(session: DebuggerSession, attempt: Attempt) -> str:
    """Return the line shown when a debugger gets the terminal for the first time."""
    member, opened, others = session.member, session.opened, attempt.world_size - 1
    who = f"rank {member.rank} (pid {member.pid}) "
    who += f"raised {opened.error} at " if opened.error else "at "
    paused = {0: "", 1: "; the timeouts of the other rank are paused"}.get(
        others, f"; the timeouts of the other {others} ranks are paused"
    )
    leave = "; q to let the run fail" if opened.error else ""
    return f"{who}{session.place} in {opened.frame.function}{paused}{leave}; h for help\n"


def waiting_line(session: DebuggerSession) -> str:
    """Return the line shown for a rank that waits for the terminal."""
    if session.granted:
        return f"rank {session.member.rank} waits with its debugger\n"
    if session.opened.error:
        return f"rank {session.member.rank} waits with {session.opened.error}, {session.place}\n"
    return f"rank {session.member.rank} waits at its breakpoint, {session.place}\n"


def turn_line(session: DebuggerSession) -> str:
    """Return the line shown when a debugger gets the terminal back from another."""
    return f"rank {session.member.rank} talks again\n"


def unopened_message(opened: DebugOpened, why: str) -> str:
    """Return the warning about a debugger that cannot be opened."""
    what = "No debugger is opened for the error" if opened.error else "breakpoint() was passed over"
    return (
        f"{what} at {place_of(opened.frame)}: {why}. Start the script itself in the foreground of a terminal, "
        "or debug it in one process with num_workers=0."
    )


class Debugging:
    """The debuggers of a run. The controller's thread only, but for :meth:`show_output`."""

    def __init__(
        self,
        launcher: str,
        view: TerminalView,
        *,
        send: Callable[[Member, FromController], None],
        post: Callable[[Any], None],
        warn_once: Callable[[str], None],
        begun: Callable[[], None],
        over: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``launcher`` started this process and has its terminal; "" for none. ``begun`` is called when the first
        debugger opens, ``over`` with the seconds for which any was open when the last one is closed."""
        self._launcher, self._view = launcher, view
        self._send, self._post, self._warn_once = send, post, warn_once
        self._begun, self._over, self._clock = begun, over, clock
        self._sessions: dict[int, DebuggerSession] = {}
        self._turns = Turns()
        #: The rank that had the terminal last; -1 before the first.
        self._last_holder = -1
        self._keyboard: Keyboard | None = None
        #: The one that was closed last, which may still have output to write.
        self._last: Keyboard | None = None
        #: The number of the last prompt.
        self._prompts = 0
        self._since = 0.0
        #: When the turn of the current debugger ends; inf for no limit.
        self.due = float("inf")
        #: The attempt in which an error was already debugged.
        self._debugged_attempt = -1
        self._is_ending = False

    @property
    def is_open(self) -> bool:
        """Return True while any rank is in a debugger, or waits for the terminal."""
        return bool(self._sessions)

    # -- messages of ranks

    def on_message(self, member: Member, message: FromWorker) -> None:
        """Handle a message of a rank's debugger."""
        session = self._sessions.get(member.rank)
        match message:
            case DebugOpened():
                self._on_opened(member, message)
            case DebugOutput() if session is not None:
                self._on_output(session, message.text)
            case DebugPrompt() if session is not None:
                session.prompt = message
                self._request_turn(session)
            case DebugClosed() if session is not None:
                self._on_left(session)

    def _on_opened(self, member: Member, opened: DebugOpened) -> None:
        if not self._can_open(member, opened):
            self._send(member, DebugGrant(granted=False))
            return
        if opened.error:
            self._debugged_attempt = member.attempt.number
        if not self._sessions:
            self._since = self._clock()
            self._begun()
        self._sessions[member.rank] = DebuggerSession(member, opened)
        self._request_turn(self._sessions[member.rank])

    def _can_open(self, member: Member, opened: DebugOpened) -> bool:
        """Return True for a breakpoint, and for the first error that is no echo; the others are in the logs and the
        report."""
        attempt = member.attempt
        if self._is_ending or attempt.phase != TRAINING:
            return False
        if opened.error and (opened.secondary or self._debugged_attempt == attempt.number):
            return False
        why = "" if opened.native else self._why_unusable()
        if why:
            self._warn_once(unopened_message(opened, why))
        return not why

    def _why_unusable(self) -> str:
        return f"{self._launcher} has the terminal" if self._launcher else why_unusable()

    def _on_output(self, session: DebuggerSession, text: str) -> None:
        if self._has_turn(session):
            self._show(text)
        else:
            session.unshown = (session.unshown + text)[-_OUTPUT_LIMIT:]

    def on_process_gone(self, member: Member) -> None:
        """Close the debugger of a rank whose process has ended."""
        session = self._sessions.get(member.rank)
        if session is not None:
            self._withdraw(session)
            self._show(f"rank {member.rank} has ended, and its debugger with it\n")
            self._on_left(session)

    # -- input of the user

    def on_typed(self, typed: Typed) -> None:
        """Send the typed line to the debugger that has the terminal."""
        session = self._holder
        if session is not None and session.prompt is not None and typed.number == self._prompts:
            self._send(session.member, DebugLine(number=session.prompt.number, text=typed.text))
            session.prompt = None
            self._limit_turn()

    def on_turn_over(self) -> None:
        """Pass the terminal on at :attr:`due`, where its debugger still runs and others wait."""
        self.due = float("inf")
        session = self._holder
        if session is not None and session.prompt is None and self._turns.waiting:
            self._show(f"rank {session.member.rank} is still running\n")
            self._pass_on(session)

    def show_output(self, rank: int, data: bytes) -> bool:
        """Show the output of a rank that is being debugged. Return False for any other rank. Any thread."""
        session, keyboard = self._sessions.get(rank), self._keyboard
        if session is None or keyboard is None or not self._has_turn(session):
            return False
        keyboard.show(session.decoder.decode(data))
        return True

    # -- the end

    def end(self, why: str) -> None:
        """Close every debugger, and open no more. Plain pdb stays open until the user leaves it."""
        self._is_ending = True
        if any(session.opened.native for session in self._sessions.values()):
            return
        for session in self._sessions.values():
            self._send(session.member, DebugEnd())
        self.forget(why)

    def close(self) -> None:
        """Release the terminal."""
        self.forget("the run is over")
        if self._last is not None:
            self._last.join()

    def forget(self, why: str) -> None:
        """Forget all debuggers: their processes are being ended, or continue."""
        if self._sessions:
            if self._keyboard is not None:
                self._keyboard.withdraw()
            self._show(f"{why}: all debuggers are left\n")
            self._sessions.clear()
            self._turns = Turns()
            self._release_terminal()

    # -- turns

    @property
    def _holder(self) -> DebuggerSession | None:
        """Return the debugger that has the terminal."""
        holder = self._turns.holder
        return self._sessions.get(holder) if holder is not None else None

    def _has_turn(self, session: DebuggerSession) -> bool:
        return self._turns.holder == session.member.rank

    def _request_turn(self, session: DebuggerSession) -> None:
        """Give the terminal to the debugger, or let it wait."""
        was_waiting = session.member.rank in self._turns.waiting
        if self._turns.request(session.member.rank):
            self._give_turn(session)
        elif not was_waiting:
            self._show(waiting_line(session))
            self._limit_turn()

    def _give_turn(self, session: DebuggerSession) -> None:
        if session.opened.native:
            self._view.hold()
        elif self._keyboard is None:
            self._keyboard = Keyboard(self._post, self._view.hold, self._view.release)
        if not session.granted:
            session.granted = True
            self._show(header(session, session.member.attempt))
            self._send(session.member, DebugGrant(granted=True))
        elif self._last_holder != session.member.rank:
            self._show(turn_line(session))
        self._last_holder = session.member.rank
        if session.unshown:
            self._show(session.unshown)
            session.unshown = ""
        if session.prompt is not None and self._keyboard is not None:
            self.due = float("inf")
            self._prompts += 1
            self._keyboard.prompt(self._prompts, session.prompt.text)

    def _limit_turn(self) -> None:
        """Limit the turn of a debugger that runs while others wait."""
        runs = self._holder is not None and self._holder.prompt is None
        if runs and self._turns.waiting and self.due == float("inf"):
            self.due = self._clock() + TURN_TIMEOUT_S

    def _pass_on(self, session: DebuggerSession) -> None:
        rank = self._turns.leave(session.member.rank)
        if rank is not None:
            self._give_turn(self._sessions[rank])
            self._limit_turn()

    def _on_left(self, session: DebuggerSession) -> None:
        """Remove the debugger, and pass the terminal on."""
        del self._sessions[session.member.rank]
        self._withdraw(session)
        self._pass_on(session)
        if not self._sessions:
            self._release_terminal()

    def _withdraw(self, session: DebuggerSession) -> None:
        """Withdraw its prompt."""
        if self._has_turn(session):
            self.due = float("inf")
            if self._keyboard is not None:
                self._keyboard.withdraw()

    def _release_terminal(self) -> None:
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
