"""A debugger in a rank: it asks for the terminal, talks there, and is never the reason why a rank stands still."""

# ruff: noqa: T100 (breakpoints are what these tests are about)
from __future__ import annotations

import bdb
import os
import pdb
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from powertrain.wire.envelope import FromController, FromWorker
from powertrain.wire.from_controller import DebugEnd, DebugGrant, DebugLine, Dismissed
from powertrain.wire.from_worker import DebugClosed, DebugOpened, DebugOutput, DebugPrompt, DebugQuit
from powertrain.wire.values import Frame
from powertrain.worker import debugger as debugger_module
from powertrain.worker.debugger import OUTPUT_LIMIT, Debugger, Dialogue, where_quit

PATIENCE = 30.0


class Person:
    """Who answers a rank's debugger: the run, and the user behind it."""

    def __init__(self, *lines: str, grants: bool = True) -> None:
        self.lines, self.grants = list(lines), grants
        self.heard: list[Any] = []
        self.dialogue = Dialogue(self.hear)

    def hear(self, message: FromWorker) -> None:
        self.heard.append(message)
        if isinstance(message, DebugOpened):
            self.dialogue.on_reply(DebugGrant(granted=self.grants))
        elif isinstance(message, DebugPrompt):
            text = f"{self.lines.pop(0)}\n" if self.lines else ""
            self.dialogue.on_reply(DebugLine(number=message.number, text=text))

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    @property
    def shown(self) -> str:
        return "".join(message.text for message in self.of(DebugOutput))


@pytest.fixture(autouse=True)
def _own_tracing() -> Iterator[None]:
    """Who measures these tests by tracing lines goes on doing so after each."""
    before = sys.gettrace()
    yield
    sys.settrace(before)


def run(person: Person, function: Any = None) -> None:
    with Debugger(1, person.dialogue).installed():
        (function or stops)()


def stops() -> None:
    number = 41
    breakpoint()
    number += 1


def test_a_breakpoint_stops_at_the_callers_line_and_answers() -> None:
    person = Person("p number", "c")
    run(person)
    (opened,) = person.of(DebugOpened)
    assert (opened.frame.file, opened.frame.function) == (__file__, "stops")
    assert opened.frame.source == "breakpoint()"
    assert "\n41\n" in person.shown
    assert [prompt.text for prompt in person.of(DebugPrompt)] == ["(Pdb) ", "(Pdb) "]
    assert person.heard[-1] == DebugClosed()
    assert not person.dialogue.is_open


def test_its_interactive_console_is_in_the_same_terminal() -> None:
    person = Person("interact", "for step in range(2): number += step", "", "number + 100")
    before = sys.stdin, sys.stdout, sys.stderr
    run(person)
    assert "\n142\n" in person.shown.replace(">>> ", "\n")
    assert ">>> " in {prompt.text for prompt in person.of(DebugPrompt)}
    assert (sys.stdin, sys.stdout, sys.stderr) == before


def test_the_hooks_are_what_they_were_afterwards() -> None:
    before = sys.breakpointhook, pdb.set_trace
    run(Person("c"))
    assert (sys.breakpointhook, pdb.set_trace) == before


def test_stepping_beyond_the_function_ends_with_it() -> None:
    person = Person("n", "n", "n", "n", "n")
    run(person)
    assert person.heard[-1] == DebugClosed()
    assert len(person.lines) >= 2
    assert sys.gettrace() is None


def test_a_breakpoint_that_is_stepped_over_does_not_ask_for_the_terminal_again() -> None:
    def twice() -> None:
        breakpoint()
        stops()

    person = Person("n", "c", "c")
    run(person, twice)
    assert len(person.of(DebugOpened)) == 1


def test_where_there_is_no_terminal_the_rank_goes_on_and_does_not_ask_again() -> None:
    person = Person(grants=False)

    def loop() -> None:
        for _ in range(3):
            breakpoint()

    run(person, loop)
    assert len(person.of(DebugOpened)) == 1
    assert person.of(DebugPrompt) == []


def test_quitting_says_where_and_raises_what_is_known_as_such() -> None:
    person = Person("q")
    with pytest.raises(BaseException) as raised:
        run(person)
    (quits,) = person.of(DebugQuit)
    frame = where_quit(raised.value)
    assert frame is not None
    assert quits.frame == frame
    assert frame.source == "number += 1"
    assert where_quit(ValueError()) is None
    handed_on = bdb.BdbQuit("Caught BdbQuit in DataLoader worker process 0.")
    assert where_quit(handed_on) is None, "nobody has quit anything in this process"


@pytest.mark.parametrize("end", [DebugEnd(), Dismissed()])
def test_a_rank_whose_run_ends_is_not_held_at_its_prompt(end: FromController) -> None:
    asked = threading.Event()

    class Silent(Person):
        def hear(self, message: FromWorker) -> None:
            if isinstance(message, DebugPrompt):
                self.heard.append(message)
                asked.set()
            else:
                super().hear(message)

    person = Silent()
    thread = threading.Thread(target=run, args=(person,))
    thread.start()
    assert asked.wait(PATIENCE)
    assert person.dialogue.is_open
    person.dialogue.on_reply(end)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not person.dialogue.open(Frame(file="", line=0, function=""))


def test_another_debugger_that_the_user_has_named_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(debugger_module, "named", lambda: called.append(1), raising=False)
    monkeypatch.setenv("PYTHONBREAKPOINT", f"{debugger_module.__name__}.named")
    person = Person()
    run(person)
    assert (called, person.heard) == ([1], [])


def test_in_a_process_of_the_ranks_own_a_breakpoint_is_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    person = Person()
    with Debugger(1, person.dialogue).installed():
        pid = os.fork()
        if pid == 0:
            try:
                stops()
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
    line = stops.__code__.co_firstlineno + 2
    assert f"breakpoint() at test_debugger.py:{line} is passed over: process {pid} was started by rank 1" in (
        capfd.readouterr().err
    )
    assert person.heard == []


@pytest.mark.parametrize("variable", [None, "pdb.set_trace"])
def test_a_process_that_is_started_anew_passes_over_its_breakpoints_and_says_so_once(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    if variable is not None:
        monkeypatch.setenv("PYTHONBREAKPOINT", variable)
    person, ended = Person(), list[Any]()

    def starts_a_process() -> None:
        code = "for _ in range(3): breakpoint()"
        ended.append(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30))

    run(person, starts_a_process)
    assert ended[0].returncode == 0
    assert ended[0].stderr.count("is passed over") == 1
    assert (person.heard, os.environ.get("PYTHONBREAKPOINT")) == ([], variable)


def test_in_the_users_own_process_breakpoints_stay_with_their_debugger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    monkeypatch.setattr(sys, "breakpointhook", lambda: called.append("the editor's"))
    person = Person()
    person.dialogue.native = True
    run(person)
    assert (called, person.heard) == (["the editor's"], [])


def test_what_one_command_prints_is_cut_and_the_prompt_is_not() -> None:
    person = Person(f"p 'x' * {2 * OUTPUT_LIMIT}", "p 6 * 7", "c")
    run(person)
    assert OUTPUT_LIMIT <= len(person.shown) < OUTPUT_LIMIT + 1000
    assert person.shown.endswith(f"[only the first {OUTPUT_LIMIT:,} characters are shown]\n42\n")
    assert {prompt.text for prompt in person.of(DebugPrompt)} == {"(Pdb) "}


def test_a_command_that_prints_many_lines_does_not_take_long() -> None:
    person = Person()
    began = time.monotonic()
    for number in range(150_000):
        print(number, file=person.dialogue)
    person.dialogue.readline()
    assert time.monotonic() - began < 60.0
    assert person.shown == "".join(f"{number}\n" for number in range(150_000))


def test_a_post_mortem_shows_the_users_innermost_line_first() -> None:
    def fails() -> None:
        import json

        text = "{"
        json.loads(text)

    person = Person("p text", "d", "q")
    rank = Debugger(1, person.dialogue)
    try:
        fails()
    except ValueError as error:
        rank.post_mortem(error)
    (opened,) = person.of(DebugOpened)
    assert opened.error.startswith("json.decoder.JSONDecodeError: Expecting property name")
    assert opened.frame.source == "json.loads(text)"
    assert "-> json.loads(text)\n'{'\n" in person.shown
    assert "json/__init__.py" in person.shown
    assert person.heard[-1] == DebugClosed()
    assert person.of(DebugQuit) == []
