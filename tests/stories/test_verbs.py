"""Whole runs, and commands from another terminal that follow their logs, show what ranks are doing, and stop them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loops
import psutil
import pytest
import story
from tests.stories.engines import on
from typer.testing import Result

from powertrain.result.result import Result as RunResult
from powertrain.run import events as ev

_COMMAND = [sys.executable, "-c", "from powertrain.cli.main import main; main()"]


@pytest.fixture
def reader(stories: Any) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts ``powertrain`` in a process of its own, whose output goes to files of the story."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with (stories.root / "read").open("wb") as out, (stories.root / "remarks").open("wb") as err:
            environment = {**os.environ, "XDG_RUNTIME_DIR": str(stories.runtime)}
            started.append(subprocess.Popen([*_COMMAND, *arguments], stdout=out, stderr=err, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def await_text(path: Path, *texts: str) -> None:
    deadline = time.monotonic() + story.PATIENCE
    while not all(text in path.read_text(errors="replace") for text in texts):
        assert time.monotonic() < deadline, f"{texts} did not come: {path.read_text(errors='replace')}"
        time.sleep(0.01)


def test_following_the_logs_reads_every_attempt_to_the_end_of_the_run(
    stories: Any, at_another_terminal: Callable[..., Result], reader: Callable[..., Any]
) -> None:
    driver = stories.start("talk")
    driver.await_told("rank 0 has spoken", "rank 1 has spoken")
    following = reader("logs", "talks", "--follow")
    await_text(stories.root / "read", "[rank 0] rank 0 is in attempt 0", "[rank 1] rank 1 is in attempt 0")

    listed = at_another_terminal("ls", str(stories.storage)).output.splitlines()[1]
    assert listed.split()[:2] == ["talks", "training"]
    assert listed.rstrip().endswith(f"pid {driver.process.pid}")
    shown = at_another_terminal("show", "talks").output
    assert re.search(r"^now       row 1, [\d.]+ m?s ago$", shown, re.MULTILINE), shown
    assert json.loads(at_another_terminal("show", "talks", "--json").output)["now"]["workers"] == 2
    (stories.root / "go on").touch()

    assert following.wait(story.PATIENCE) == 0
    driver.outcome()
    read = (stories.root / "read").read_text().splitlines()
    assert read[:2] == ["[rank 0] rank 0 is in attempt 0", "[rank 1] rank 1 is in attempt 0"]
    assert sorted(read[2:]) == [
        f"[rank {rank}] {text}"
        for rank in (0, 1)
        for text in (f"rank {rank} is in attempt 1", "the last word, without an end of its line")
    ]
    remarks = (stories.root / "remarks").read_text().splitlines()
    assert remarks[0] == "--- attempt 1 ---"
    assert remarks[1].startswith("The run 'talks' has finished after ")
    alone = at_another_terminal(
        "logs", "talks", "--storage", str(stories.storage), "-r", "1", "--attempt", "0"
    )
    assert alone.stdout == "rank 1 is in attempt 0\n"


def test_following_the_logs_of_a_killed_driver_says_so_and_ends(
    stories: Any, reader: Callable[..., Any]
) -> None:
    driver = stories.start("talk")
    driver.await_told("rank 0 has spoken", "rank 1 has spoken")
    following = reader("logs", "talks", "--follow", "--grep", "rank 1")
    await_text(stories.root / "read", "rank 1 is in attempt 0")
    driver.kill()
    assert following.wait(story.PATIENCE) == 0
    assert (stories.root / "read").read_text() == "[rank 1] rank 1 is in attempt 0\n"
    assert f"its process ({driver.process.pid}) is gone" in (stories.root / "remarks").read_text()


@on("local", "torchrun", smoke=["local"])
def test_a_run_that_is_stopped_saves_at_its_boundary_and_fit_returns(
    stories: Any, engine: str, at_another_terminal: Callable[..., Result]
) -> None:
    driver = stories.start("save_when_asked")
    driver.await_told("rank 0 trains", "rank 1 trains")
    stopped = at_another_terminal("stop", "interrupted")

    assert stopped.exit_code == 0, stopped.output
    assert stopped.output.startswith("The run 'interrupted' stops at its next boundary, and saves there")
    for rank in (0, 1) if engine == "torchrun" else (0,):
        outcome = driver.outcome(rank)
        assert (outcome["raised"], outcome["state"]) == ("", "stopped")
    (stopping,) = (fact for fact in stories.facts("interrupted") if isinstance(fact, ev.Stopping))
    assert stopping.cause == "asked"
    result = RunResult.from_path(stories.storage / "interrupted")
    assert re.fullmatch(rf"powertrain stop, asked by .+@.+ pid {os.getpid()}", result.reason)
    assert result.checkpoint is not None
    assert f"Start the same script again to resume from {Path(result.checkpoint.path).name}" in stopped.output
    stories.assert_nothing_left()

    again = at_another_terminal("stop", str(stories.storage / "interrupted"))
    assert again.exit_code == 1
    assert again.output.startswith("The run 'interrupted' was stopped after ")


@on("local", "ray", smoke=["local"])
def test_stacks_name_the_line_and_stop_now_ends_a_loop_that_never_comes_to_a_boundary(
    stories: Any, at_another_terminal: Callable[..., Result]
) -> None:
    driver = stories.start("never_at_a_boundary")
    driver.await_told("rank 0 trains", "rank 1 trains")
    deadline = time.monotonic() + story.PATIENCE
    together = "waiting for the run"  # which takes the checkpoint of the first row meanwhile
    while "waiting for the run" in together:
        assert time.monotonic() < deadline, together
        output = at_another_terminal("stacks", "killed").output
        # Two lines, one for each rank, while only one of them has gone on.
        together = next((line for line in output.splitlines() if "ranks 0" in line), together)
    assert together.startswith(f"ranks 0, 1: at {loops.__file__}:")
    assert together.endswith("in never_at_a_boundary: time.sleep(0.05)")

    pid = int((stories.root / "rank 1 trains").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + story.PATIENCE
        while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline, "it was not stopped"
            time.sleep(0.01)
        seen = json.loads(at_another_terminal("stacks", "killed", "--json").output)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert [(rank["rank"], rank["processes"][0]["state"]) for rank in seen["ranks"]][1] == (1, "stopped")
    assert seen["missing"] == ""

    asked = at_another_terminal("stop", "killed", "--no-wait")
    assert (asked.exit_code, driver.process.poll()) == (0, None)
    ended = at_another_terminal("stop", "killed", "--now")
    assert ended.exit_code == 0, ended.output
    assert ended.output.startswith("The run 'killed' ends at once, wherever its ranks are.")
    assert driver.outcome()["state"] == "stopped"
    kept = at_another_terminal("stacks", str(stories.storage / "killed"))
    assert kept.exit_code == 1
    assert "It has no saved stacks" in kept.output
