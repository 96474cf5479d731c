"""Debuggers of ranks in the launching terminal, as a person at it meets them."""

# ruff: noqa: T100 (breakpoints are what the stories are about)
from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.stories.at_terminal import AtTerminal
from tests.stories.conftest import Fits, journal_of
from tests.stories.engines import on

import powertrain
from powertrain.run import events as ev

_DRIVER = Path(__file__).parent / "drivers" / "debugged.py"
PROMPT = "(Pdb) "
#: At the same desk as the first story there, which so is the only one that waits for it to be set up.
HERE = on("local")


class Desk(AtTerminal):
    """The launching process, and the scenes that it plays."""

    def __init__(self, engine: str, directory: Path, variables: dict[str, str]) -> None:
        self.directory = directory
        env = {**os.environ, "STORY_DIRECTORY": str(directory), "STORY_ENGINE": engine, **variables}
        super().__init__([sys.executable, str(_DRIVER)], env, directory)
        self._scene, self._number = "nothing", 0
        if engine == "local":  # a fit that the stories wait for
            self.outcome()

    def play(self, scene: str) -> None:
        self._scene, self._number = scene, self._number + 1
        self.tell(f"play-{self._number}", scene)

    def outcome(self) -> dict[str, Any]:
        """What came of the scene, once it is over."""
        told = self.directory / f"outcome-{self._number}"
        self.shown = self.watch_until(told.exists, f"end of {self._scene}")
        return dict(json.loads(told.read_text()))

    def facts(self) -> list[Any]:
        return journal_of(self.directory / "storage" / f"{self._scene}-{self._number}")

    def leave(self) -> None:
        self._number += 1
        self.tell(f"play-{self._number}", "end")

    def tell(self, name: str, content: str = "") -> None:
        """Say something to the scene: see ``story.tell``."""
        unfinished = self.directory / f".{name}"
        unfinished.write_text(content)
        unfinished.rename(self.directory / name)


@pytest.fixture(scope="module")
def desk(engine: str, request: pytest.FixtureRequest) -> Iterator[Desk]:
    """One for all stories on an engine: what ranks are forked from is warm after the first."""
    variables = {}
    if engine == "ray":
        variables["RAY_ADDRESS"] = request.getfixturevalue("ray_cluster").address
    with (
        tempfile.TemporaryDirectory(prefix="desk-", dir="/tmp") as directory,
        Desk(engine, Path(directory), variables) as desk,
    ):
        yield desk
        desk.leave()


@pytest.fixture
def only_story_on_ray(desk: Desk, engine: str) -> Iterator[None]:
    """The desk is left after it on Ray, where its agents would wait for the next."""
    yield
    if engine == "ray":
        desk.leave()


def place(line: str) -> str:
    """Where in the driver a line of code is."""
    lines = [n for n, text in enumerate(_DRIVER.read_text().splitlines(), 1) if text.strip() == line]
    assert len(lines) == 1, lines
    return f"debugged.py:{lines[0]}"


def pid_in(header: str) -> int:
    found = re.search(r"rank \d \(pid (\d+)\)", header)
    assert found, header
    return int(found[1])


# --------------------------------------------------------------------------- breakpoint()


@on("local", "ray", smoke=["local"])
@pytest.mark.usefixtures("only_story_on_ray")
def test_a_breakpoint_in_one_rank_opens_in_the_launching_terminal(desk: Desk) -> None:
    desk.play("rank_1_stops")
    desk.expect("rank 1 (pid ")
    header = desk.expect("h for help")
    at = int(place("number += 100").partition(":")[2]) - 1
    assert f"at debugged.py:{at} in rank_1_stops; the timeouts of the other rank are paused" in header
    talk = desk.expect(PROMPT)
    assert "-> number += 100" in talk
    desk.type("p number")
    assert desk.expect(PROMPT) == "p number\n41\n"
    for line in ("n", "n"):
        desk.type(line)
        talk += desk.expect(PROMPT)
    desk.type("c")
    outcome = desk.outcome()
    assert (outcome["raised"], outcome["state"], outcome["return_value"]) == ("", "finished", 40)
    assert "-> powertrain.collective.barrier()" in talk
    assert "rank 1 has made it 141" in talk + desk.shown


@HERE
def test_what_other_ranks_print_is_shown_when_the_debugger_is_left(desk: Desk) -> None:
    desk.play("rank_1_stops_and_rank_0_prints")
    desk.expect(PROMPT)
    desk.tell("rank 1 has stopped")
    desk.watch_until((desk.directory / "rank 0 has printed").exists, "print of rank 0")
    desk.type("p 6 * 7")
    assert desk.expect(PROMPT) == "p 6 * 7\n42\n"
    desk.type("c")
    assert desk.outcome()["state"] == "finished"
    assert "[rank 0] rank 0 is there\n" in desk.shown


@HERE
def test_ranks_that_stop_at_once_talk_one_after_the_other(desk: Desk) -> None:
    desk.play("both_stop")
    first = desk.expect("h for help")
    assert "waits at its breakpoint" not in first
    desk.expect_all(PROMPT, " waits at its breakpoint, debugged.py:")
    desk.type("c")
    second = desk.expect("h for help")
    ranks = [re.findall(r"rank (\d) \(pid", header) for header in (first, second)]
    assert sorted(ranks) == [["0"], ["1"]]
    desk.expect(PROMPT)
    desk.type("p number")
    assert f"4{ranks[1][0]}\n" in desk.expect(PROMPT)
    desk.type("c")
    assert desk.outcome()["state"] == "finished"


@HERE
def test_a_rank_that_runs_into_one_that_waits_to_talk_lets_it_talk(desk: Desk) -> None:
    """The first steps over a barrier to which the second cannot come before it has had the terminal."""
    desk.play("both_stop_before_they_meet")
    desk.expect_all(PROMPT, " waits at its breakpoint, ")
    desk.type("n")
    assert " is still running\n" in desk.expect("h for help")
    desk.expect(PROMPT)
    desk.type("c")
    assert '-> powertrain.report({"met": 1})' in desk.expect(PROMPT)
    desk.type("c")
    assert desk.outcome()["state"] == "finished"


@HERE
def test_set_trace_of_pdb_opens_it_too_and_an_end_of_input_goes_on(desk: Desk) -> None:
    desk.play("stops_in_another_way")
    desk.expect(PROMPT)
    desk.press("\x04")  # Ctrl-D
    assert desk.outcome()["state"] == "finished"


@HERE
def test_quitting_ends_the_run_and_names_the_rank(desk: Desk) -> None:
    desk.play("rank_1_stops")
    desk.expect(PROMPT)
    desk.type("q")
    outcome = desk.outcome()
    assert (outcome["raised"], outcome["state"]) == ("", "stopped")
    assert [fact.reason for fact in desk.facts() if isinstance(fact, ev.Ended)] == [
        f"rank 1 was quit in its debugger at {place('number += 100')}"
    ]
    assert "BdbQuit" not in desk.shown


@HERE
def test_ctrl_c_at_a_prompt_stops_the_run_as_always(desk: Desk) -> None:
    desk.play("rank_1_stops")
    desk.expect(PROMPT)
    desk.press("\x03")  # Ctrl-C
    desk.expect("the run is stopping: all debuggers are left")
    assert desk.outcome()["raised"] == "KeyboardInterrupt"
    assert [fact.cause for fact in desk.facts() if isinstance(fact, ev.Stopping)] == ["interrupt"]


@HERE
def test_no_rank_is_timed_out_while_a_debugger_is_open(desk: Desk) -> None:
    """Rank 0 waits at a barrier for longer than it may hang."""
    desk.play("rank_1_stops_for_long")
    desk.expect(PROMPT)
    until = time.monotonic() + 2.5
    desk.watch_until(lambda: time.monotonic() > until, "pause")
    desk.type("c")
    assert desk.outcome()["state"] == "finished"
    kinds = {type(fact) for fact in desk.facts()}
    assert not kinds & {ev.HangNoticed, ev.Failed, ev.RanksAbsent}


@HERE
def test_a_rank_that_is_killed_at_its_prompt_leaves_it_to_the_next(desk: Desk) -> None:
    desk.play("both_stop")
    desk.expect("rank ")
    pid = pid_in("rank " + desk.expect("h for help"))
    desk.expect_all(PROMPT, " waits at its breakpoint, ")
    os.kill(pid, signal.SIGKILL)
    desk.expect(" has ended, and its debugger with it\n")
    desk.expect(PROMPT)
    desk.type("p number")
    desk.expect(PROMPT)
    desk.type("c")
    outcome = desk.outcome()
    assert [failure["kind"] for failure in outcome["failures"]] == ["signal"]


def test_a_driver_that_is_killed_takes_ranks_at_their_prompt_along(tmp_path: Path) -> None:
    with Desk("local", tmp_path, {}) as desk:
        desk.play("rank_1_stops")
        desk.expect("rank 1 (pid ")
        rank = int(desk.expect(")"))
        desk.expect(PROMPT)
        desk.process.kill()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{rank}"):
        assert time.monotonic() < deadline, "the rank is still there"
        time.sleep(0.02)


@HERE
def test_what_a_debugger_prints_without_end_is_cut(desk: Desk) -> None:
    desk.play("rank_1_stops")
    desk.expect(PROMPT)
    desk.type("p 'x' * 3_000_000")
    shown = desk.expect(PROMPT)
    assert "[only the first 1,048,576 characters are shown]" in shown
    assert 2**20 <= shown.count("x") < 2**20 + 100
    desk.type("c")
    assert desk.outcome()["state"] == "finished"


# --------------------------------------------------------------------------- post mortem


@HERE
def test_a_post_mortem_opens_where_the_error_was_and_the_run_fails_with_it(desk: Desk) -> None:
    desk.play("rank_1_fails")
    header = desk.expect("h for help")
    line = place("return numerator / divisor")
    assert (
        f"rank 1 (pid {pid_in(header)}) raised ZeroDivisionError: division by zero at {line} in divide"
        in header
    )
    assert "-> return numerator / divisor" in desk.expect(PROMPT)
    desk.type("p numerator, divisor")
    assert "(7, 0)\n" in desk.expect(PROMPT)
    desk.type("up")
    assert "-> divide(7)" in desk.expect(PROMPT)
    desk.type("q")
    outcome = desk.outcome()
    assert outcome["raised"] == "TrainingFailedError"
    assert [failure["rank"] for failure in outcome["failures"] if not failure["secondary"]] == [1]
    assert outcome["message"].startswith("Rank 1 raised ZeroDivisionError")
    assert PROMPT not in desk.shown, "the other rank's error is only an echo"


# --------------------------------------------------------------------------- in this very process


@HERE
def test_a_run_without_workers_is_debugged_by_plain_pdb(desk: Desk) -> None:
    desk.play("stops_alone")
    assert "-> number += 1" in desk.expect(PROMPT)
    desk.type("p number")
    assert "40" in desk.expect(PROMPT)
    desk.type("n")
    desk.expect(PROMPT)
    desk.type("c")
    outcome = desk.outcome()
    assert (outcome["state"], outcome["metrics"]) == ("finished", {"number": 41})


@HERE
def test_ctrl_c_at_a_plain_prompt_leaves_it_and_stops_the_run(desk: Desk) -> None:
    desk.play("stops_and_repeats_alone")
    desk.expect(PROMPT)
    desk.await_reading()
    desk.press("\x03")
    assert desk.outcome()["raised"] == "KeyboardInterrupt"
    [ended] = [fact for fact in desk.facts() if isinstance(fact, ev.Ended)]
    assert ended.rows >= 1, "the loop went on from the prompt to its next report"


@HERE
def test_a_post_mortem_without_workers_is_plain_pdb(desk: Desk) -> None:
    desk.play("fails_alone")
    assert "-> return numerator / divisor" in desk.expect(PROMPT)
    desk.type("p divisor")
    assert "\n0\n" in desk.expect(PROMPT)
    desk.type("q")
    outcome = desk.outcome()
    assert (outcome["raised"], outcome["cause"]) == ("TrainingFailedError", "ZeroDivisionError")


def test_python_m_pdb_steps_into_the_function_of_a_run_without_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "POWERTRAIN_STORAGE": str(tmp_path / "runs")}
    with AtTerminal([sys.executable, "-m", "pdb", str(script)], env, tmp_path) as person:
        for line in ("b train_func", "c", "n", "n"):
            person.expect(PROMPT)
            person.type(line)
        assert "-> total = double(count)" in person.expect(PROMPT)
        person.type("p count")
        assert "\n3\n" in person.expect(PROMPT)
        person.type("s")
        assert "--Call--" in person.expect(PROMPT)
        person.type("r")
        assert "->6" in person.expect(PROMPT)
        person.type("c")
        person.expect("trained: finished {'total': 6}")
        person.expect(PROMPT)  # pdb begins again
        person.type("q")


SCRIPT = """
import powertrain

def double(count):
    return 2 * count

def train_func():
    count = 1
    count += 2
    total = double(count)
    powertrain.report({"total": total})

scaling = powertrain.ScalingConfig(num_workers=0)
result = powertrain.DataParallelTrainer(train_func, scaling_config=scaling).fit()
print("trained:", result.state, result.metrics)
"""


# --------------------------------------------------------------------------- without a terminal


def pass_a_breakpoint() -> None:
    for step in range(3):
        breakpoint()
        powertrain.report({"step": step})


def raise_at_once() -> None:
    raise ValueError("shard 7 is empty")


def test_without_a_terminal_a_breakpoint_is_passed_over_and_reported_once(fits: Fits) -> None:
    outcome = fits.outcome(pass_a_breakpoint)
    assert (outcome["state"], outcome["metrics"]) == ("finished", {"step": 2})
    told = [
        f.message
        for f in fits.facts("pass_a_breakpoint")
        if isinstance(f, ev.Warned) and f.message.startswith("breakpoint()")
    ]
    assert len(told) == 1
    line = pass_a_breakpoint.__code__.co_firstlineno + 2
    assert told[0].startswith(f"breakpoint() was passed over at test_debugging.py:{line}: standard ")


def test_without_a_terminal_an_error_fails_the_run_as_always(fits: Fits) -> None:
    outcome = fits.outcome(raise_at_once, workers=1, post_mortem=True)
    assert outcome["message"].startswith("Rank 0 raised ValueError: shard 7 is empty")
    told = [
        f.message
        for f in fits.facts("raise_at_once")
        if isinstance(f, ev.Warned) and f.message.startswith("No debugger")
    ]
    assert len(told) == 1
