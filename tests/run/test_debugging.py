"""Who has the terminal, what is said of debuggers, and the thread that reads and writes there."""

from __future__ import annotations

import os
import pty
import queue
import resource
import select
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine.base import Slot
from powertrain.run.debugging import keyboard, sessions
from powertrain.run.debugging.keyboard import Keyboard, Typed
from powertrain.run.debugging.sessions import DebuggerSession, Debugging, Turns, header, unopened_message
from powertrain.run.workers.attempt import CLEARING, TRAINING, Attempt, Member
from powertrain.run.workers.placement import Placement
from powertrain.wire.envelope import FromController
from powertrain.wire.from_controller import DebugEnd, DebugGrant, DebugLine
from powertrain.wire.from_worker import DebugClosed, DebugOpened, DebugOutput, DebugPrompt
from powertrain.wire.values import Frame

PATIENCE = 30.0
AT = Frame(file="/home/me/train.py", line=31, function="train_func", source="breakpoint()")


class Terminal:
    """A terminal whose other end can be standard input and output here."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ours, theirs = pty.openpty()
        attributes = termios.tcgetattr(theirs)
        attributes[3] &= ~termios.ECHO
        termios.tcsetattr(theirs, termios.TCSANOW, attributes)
        self.theirs = os.fdopen(theirs, "r+b", buffering=0)
        self._patch = patch
        # It is not the terminal of this session, which only a process of its own could have.
        self.is_in_foreground = True
        patch.setattr(keyboard, "_is_in_foreground", lambda _: self.is_in_foreground)
        self.shown = ""

    def become_standard(self) -> None:
        """From here on, in this phase of the test: pytest sets its own before each."""
        self._patch.setattr(sys, "stdin", self.theirs)
        self._patch.setattr(sys, "stdout", self.theirs)

    def await_shown(self, text: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.shown:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self.ours], [], [], left)[0], f"{text!r} is not in {self.shown!r}"
            self.shown += os.read(self.ours, 4096).decode().replace("\r", "")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    terminal = Terminal(monkeypatch)
    yield terminal
    terminal.theirs.close()
    os.close(terminal.ours)


# --------------------------------------------------------------------------- turns


@given(st.lists(st.tuples(st.sampled_from(["ask", "leave"]), st.integers(0, 3))))
def test_one_has_the_terminal_and_the_others_get_it_in_the_order_they_came(
    steps: list[tuple[str, int]],
) -> None:
    turns, line = Turns(), list[int]()
    for action, rank in steps:
        if action == "ask":
            line += [rank] if rank not in line else []
            assert turns.request(rank) == (line[0] == rank)
        else:
            had_it = line[:1] == [rank]
            line = [other for other in line if other != rank]
            assert turns.leave(rank) == (line[0] if had_it and line else None)
        assert (turns.holder, *turns.waiting) == (tuple(line) or (None,))


# --------------------------------------------------------------------------- words


def members(count: int) -> list[Member]:
    slots = [Slot(id=str(rank), host="here", address="127.0.0.1") for rank in range(count)]
    placements = [
        Placement(
            rank=n, local_rank=n, local_world_size=count, node_rank=0, slot=slot, visible_gpus=(), device=-1
        )
        for n, slot in enumerate(slots)
    ]
    attempt = Attempt(0, placements, 1)
    attempt.phase = TRAINING
    attempt.members += [Member(place, b"", attempt, pid=100 + place.rank) for place in placements]
    return attempt.members


@pytest.mark.parametrize(
    ("count", "error", "said"),
    [
        (1, "", "rank 0 (pid 100) at train.py:31 in train_func; h for help\n"),
        (
            2,
            "",
            "rank 0 (pid 100) at train.py:31 in train_func; the timeouts of the other rank are paused; h for help\n",
        ),
        (
            4,
            "ValueError: no",
            "rank 0 (pid 100) raised ValueError: no at train.py:31 in train_func; the timeouts of the other 3 ranks "
            "are paused; q to let the run fail; h for help\n",
        ),
    ],
)
def test_the_header_says_which_rank_stopped_where(count: int, error: str, said: str) -> None:
    member = members(count)[0]
    assert header(DebuggerSession(member, DebugOpened(frame=AT, error=error)), member.attempt) == said


def test_what_is_passed_over_is_said_with_its_place_and_its_reason() -> None:
    assert unopened_message(DebugOpened(frame=AT), "standard input is not a terminal").startswith(
        "breakpoint() was passed over at train.py:31: standard input is not a terminal. "
    )


# --------------------------------------------------------------------------- who may open one


class Talk:
    """Debuggers of two ranks in a terminal of their own, and the messages to the ranks."""

    def __init__(self, launcher: str = "", post: Callable[[Typed], None] = lambda _: None) -> None:
        self.sent: list[tuple[int, FromController]] = []
        self._changed = threading.Condition()
        self.told: list[str] = []
        self.pauses: list[str] = []
        self.members = members(3)
        self.debugging = Debugging(
            launcher,
            self,
            send=self._send,
            post=post,
            warn_once=self.told.append,
            begun=lambda: self.pauses.append("begun"),
            over=lambda _: self.pauses.append("over"),
        )

    def _send(self, member: Member, message: FromController) -> None:
        with self._changed:
            self.sent.append((member.rank, message))
            self._changed.notify_all()

    def await_sent(self, kind: type[Any]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: any(isinstance(m, kind) for _, m in self.sent), PATIENCE)

    def hold(self) -> None: ...
    def release(self) -> None: ...

    def opens(self, rank: int, **about: Any) -> bool | None:
        """Whether the rank gets the terminal; None where it has to wait for it."""
        self.sent.clear()
        opened = DebugOpened(frame=AT, **{"native": True, **about})
        self.debugging.on_message(self.members[rank], opened)
        return next((m.granted for r, m in self.sent if r == rank and isinstance(m, DebugGrant)), None)


def test_echoes_and_second_errors_get_no_post_mortem() -> None:
    talk = Talk()
    assert talk.opens(0, error="RuntimeError: Connection closed by peer", secondary=True) is False
    assert talk.opens(1, error="ValueError: no") is True
    assert talk.opens(2, error="ValueError: no") is False
    assert talk.told == []


def test_an_attempt_that_is_ending_gets_no_debugger() -> None:
    talk = Talk()
    talk.members[0].attempt.phase = CLEARING
    assert talk.opens(0) is False


def test_under_torchrun_it_is_said_that_there_is_no_terminal() -> None:
    talk = Talk("torchrun")
    talk.debugging.on_message(talk.members[1], DebugOpened(frame=AT))
    assert talk.sent == [(1, DebugGrant(granted=False))]
    assert talk.told[0].startswith("breakpoint() was passed over at train.py:31: torchrun has the terminal. ")


def test_timeouts_stand_still_from_the_first_debugger_to_the_last() -> None:
    talk = Talk()
    assert (talk.opens(0), talk.opens(1)) == (True, None)
    talk.debugging.on_message(talk.members[0], DebugClosed())
    assert talk.sent[-1] == (1, DebugGrant(granted=True))
    assert talk.pauses == ["begun"]
    talk.debugging.on_process_gone(talk.members[1])
    assert talk.pauses == ["begun", "over"]
    assert not talk.debugging.is_open


def test_when_the_run_stops_all_debuggers_are_left_and_none_is_opened(terminal: Terminal) -> None:
    talk = Talk()
    terminal.become_standard()
    assert (talk.opens(0, native=False), talk.opens(1, native=False)) == (True, None)
    talk.sent.clear()
    talk.debugging.end("the run is stopping")
    assert talk.sent == [(0, DebugEnd()), (1, DebugEnd())]
    assert talk.pauses == ["begun", "over"]
    terminal.await_shown("the run is stopping: all debuggers are left\n")
    assert talk.opens(2) is False
    talk.debugging.close()


def test_plain_pdb_is_left_only_by_typing_in_it() -> None:
    talk = Talk()
    talk.opens(0)
    talk.debugging.end("the run is stopping")
    assert talk.debugging.is_open
    talk.debugging.on_message(talk.members[0], DebugClosed())
    assert not talk.debugging.is_open


def test_what_is_typed_goes_to_the_one_that_talks_and_what_the_next_has_said_is_kept(
    terminal: Terminal,
) -> None:
    talk = Talk(post=lambda typed: talk.debugging.on_typed(typed))
    first, second = talk.members[:2]
    terminal.become_standard()
    for rank in (0, 1):
        talk.opens(rank, native=False)
    talk.debugging.on_message(second, DebugOutput(text="of the second\n"))
    talk.debugging.on_message(first, DebugPrompt(number=7, text="(Pdb) "))
    terminal.await_shown("(Pdb) ")
    talk.sent.clear()
    os.write(terminal.ours, b"c\n")
    talk.await_sent(DebugLine)
    assert talk.sent == [(0, DebugLine(number=7, text="c\n"))]
    assert "of the second" not in terminal.shown
    talk.debugging.on_message(first, DebugClosed())
    terminal.await_shown("of the second\n")
    talk.debugging.on_process_gone(second)
    talk.debugging.close()


def test_the_process_that_gets_the_terminal_back_is_named(terminal: Terminal) -> None:
    talk = Talk()
    first, second = talk.members[:2]
    terminal.become_standard()
    for rank in (0, 1):
        talk.opens(rank, native=False)
    talk.debugging.on_turn_over()  # the first steps over something that the second must come to
    talk.debugging.on_message(second, DebugPrompt(number=1, text="(Pdb) "))
    talk.debugging.on_message(first, DebugPrompt(number=1, text="(Pdb) "))
    terminal.await_shown("rank 0 waits with its debugger\n")
    assert "talks again" not in terminal.shown
    talk.debugging.on_message(second, DebugClosed())
    terminal.await_shown("rank 0 talks again\n(Pdb) ")
    talk.debugging.on_process_gone(first)
    talk.debugging.close()


def test_without_a_terminal_a_rank_is_sent_on_and_the_user_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "why_unusable", lambda: "standard input is not a terminal")
    talk = Talk()
    assert talk.opens(0) is True
    talk.debugging.on_message(talk.members[1], DebugOpened(frame=AT))
    assert talk.sent[-1] == (1, DebugGrant(granted=False))
    assert len(talk.told) == 1


# --------------------------------------------------------------------------- the keyboard


class Screen:
    """A terminal with a keyboard at it."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self.ours, self.theirs, self.await_shown = terminal.ours, terminal.theirs, terminal.await_shown
        self.typed: queue.SimpleQueue[Typed] = queue.SimpleQueue()
        terminal.become_standard()
        self.keyboard = Keyboard(self.typed.put)


@pytest.fixture
def screen(terminal: Terminal) -> Iterator[Screen]:
    screen = Screen(terminal)
    yield screen
    screen.keyboard.close()
    screen.keyboard.join()


def test_a_line_that_is_typed_answers_the_question(screen: Screen) -> None:
    screen.keyboard.show("stopped\n")
    screen.keyboard.prompt(1, "(Pdb) ")
    screen.await_shown("stopped\n(Pdb) ")
    os.write(screen.ours, b"p x\nn\n")
    assert screen.typed.get(timeout=PATIENCE) == Typed(1, "p x\n")
    screen.keyboard.prompt(2, "(Pdb) ")
    assert screen.typed.get(timeout=PATIENCE) == Typed(2, "n\n")


def test_an_end_of_input_is_an_empty_line(screen: Screen) -> None:
    screen.keyboard.prompt(1, "(Pdb) ")
    screen.await_shown("(Pdb) ")
    os.write(screen.ours, b"\x04")
    assert screen.typed.get(timeout=PATIENCE) == Typed(1, "")


def test_a_prompt_is_written_again_after_what_comes_in_between(screen: Screen) -> None:
    screen.keyboard.prompt(1, "(Pdb) ")
    screen.await_shown("(Pdb) ")
    screen.keyboard.show("rank 2 waits\n")
    screen.await_shown("(Pdb) \nrank 2 waits\n(Pdb) ")


def test_nothing_is_read_while_no_line_is_asked_for(screen: Screen) -> None:
    screen.keyboard.prompt(1, "(Pdb) ")
    screen.keyboard.withdraw()
    os.write(screen.ours, b"mine\n")
    screen.keyboard.show("done\n")
    screen.await_shown("done\n")
    screen.keyboard.close()
    screen.keyboard.join()
    assert screen.theirs.read(100) == b"mine\n"
    assert screen.typed.empty()


def test_a_process_in_the_background_does_not_read(screen: Screen) -> None:
    screen.terminal.is_in_foreground = False
    screen.keyboard.prompt(1, "(Pdb) ")
    screen.await_shown("(Pdb) ")
    os.write(screen.ours, b"c\n")
    screen.keyboard.show("still here\n")
    screen.await_shown("still here\n")
    assert screen.typed.empty()
    screen.terminal.is_in_foreground = True
    assert screen.typed.get(timeout=PATIENCE) == Typed(1, "c\n")


def test_a_terminal_that_takes_nothing_holds_nothing_up_and_fills_no_memory(screen: Screen) -> None:
    for _ in range(100):
        screen.keyboard.show("x" * 2**20)
    assert sum(map(len, screen.keyboard._pending)) < 2 * keyboard._PENDING_LIMIT
    closing = threading.Thread(target=screen.keyboard.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_descriptors_beyond_what_select_can_take_are_fine(terminal: Terminal) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    taken = [os.dup(terminal.ours) for _ in range(1050)]
    try:
        screen = Screen(terminal)
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    screen.keyboard.prompt(1, "(Pdb) ")
    screen.await_shown("(Pdb) ")
    os.write(screen.ours, b"c\n")
    assert screen.typed.get(timeout=PATIENCE) == Typed(1, "c\n")
    screen.keyboard.close()
    screen.keyboard.join()


def test_a_terminal_that_another_program_made_non_blocking_takes_everything(screen: Screen) -> None:
    os.set_blocking(screen.theirs.fileno(), False)
    text = "".join(f"line {number}\n" for number in range(20_000))
    screen.keyboard.show(text)
    screen.await_shown("line 19999\n")
    assert screen.terminal.shown == text


def test_without_a_terminal_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert keyboard.why_unusable() == "standard input is not a terminal"
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb"), os.fdopen(theirs, "r+b", buffering=0) as terminal:
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr(sys, "stdout", terminal)
        assert keyboard.why_unusable() == "this process runs in the background"
