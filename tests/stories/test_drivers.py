"""Stories in which the driver itself is the victim, or must be fresh: each is a process of its own.

Those in which it ends, or what its workers are forked from, play on the cluster too: there all of it is on nodes that
outlive the driver. Terminals, and what a driver did before that makes forking unsafe, are matters of the local server.
"""

from __future__ import annotations

import importlib.util
import os
import pty
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import loops
import pytest
import story as stage
from tests.stories.engines import ON_ALL, ON_BOTH, on, ranks

from powertrain import DataParallelTrainer
from powertrain.errors import RunInUseError
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.text.tracebacks import OURS


def trains(engine: str) -> list[str]:
    return [f"rank {rank} trains" for rank in ranks(engine)]


def ended(stories: Any, name: str) -> ev.Ended:
    last = stories.facts(name)[-1]
    assert isinstance(last, ev.Ended)
    return last


# --------------------------------------------------------------------------- Ctrl-C


@ON_ALL
def test_ctrl_c_lets_the_loop_save_and_the_run_can_be_resumed(stories: Any, engine: str) -> None:
    driver = stories.start("save_when_asked", engine)
    driver.await_told(*trains(engine))
    driver.interrupt()

    outcome = driver.outcome()
    assert outcome["raised"] == "KeyboardInterrupt"
    assert "can be resumed" in outcome["message"]
    assert ended(stories, "interrupted").state == "stopped"
    result = Result.from_path(stories.storage / "interrupted")
    assert result.metrics is not None
    assert result.metrics["saved"] is True
    assert result.checkpoint is not None
    saved = {path.name: path.read_text() for path in Path(result.checkpoint.path).glob("rank-*")}
    assert saved == {f"rank-{rank}": str(result.metrics["epoch"]) for rank in ranks(engine)}
    stories.assert_nothing_left()

    again = stories.start("save_when_asked", engine).outcome()
    assert (again["raised"], again["return_value"]) == ("", "resumed")
    assert again["metrics"] == {"resumed": result.metrics["epoch"] + 1}


@ON_ALL
def test_a_second_ctrl_c_ends_a_loop_that_never_comes_to_a_boundary(stories: Any, engine: str) -> None:
    driver = stories.start("never_at_a_boundary", engine)
    driver.await_told(*trains(engine))
    driver.interrupt()
    driver.await_fact("killed", "Stopping")
    driver.interrupt()

    outcome = driver.outcome()
    assert outcome["raised"] == "KeyboardInterrupt"
    assert ended(stories, "killed").state == "stopped"


# --------------------------------------------------------------------------- the driver is killed


@on("local", "inline", "ray", smoke=["local"])
def test_a_killed_driver_leaves_nothing_and_its_run_goes_on_by_name(
    stories: Any, engine: str, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = stories.start("never_at_a_boundary", engine)
    driver.await_told(*trains(engine))
    second_start_is_refused(stories, engine, driver.process.pid, monkeypatch)
    if cluster is not None:
        there = [line.split()[0] for line in cluster.left()]
        assert {"process", "actor", "placement"} <= set(there), "what must be gone later is seen now"
    driver.kill()
    stories.assert_nothing_left()

    again = stories.start("never_at_a_boundary", engine).outcome()
    assert again["raised"] == ""
    assert again["metrics"] == {"resumed": 1}
    assert again["points"] == [
        [rank, attempt, row] for attempt, row in ((0, 1), (1, 2)) for rank in ranks(engine)
    ]


def second_start_is_refused(stories: Any, engine: str, holder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the run lives, another start of it names who holds it, and starts no worker."""
    facts = starts_of(stories.facts("killed"))
    with monkeypatch.context() as patch:
        patch.setenv("STORY_DIRECTORY", str(stories.root))
        trainer = DataParallelTrainer(
            loops.never_at_a_boundary,
            scaling_config=stage.scaling("local" if engine == "inline" else engine),
            run_config=stage.run_config("killed"),
        )
        with pytest.raises(RunInUseError) as refusal:
            trainer.fit()
    assert f"process {holder} " in str(refusal.value)
    assert repr(socket.gethostname()) in str(refusal.value)
    assert starts_of(stories.facts("killed")) == facts


def starts_of(facts: list[Any]) -> list[Any]:
    return [fact for fact in facts if isinstance(fact, (ev.RunStarted, ev.AttemptStarted))]


def test_a_closed_terminal_ends_the_driver_and_all_its_processes(stories: Any) -> None:
    ours, theirs = pty.openpty()
    try:
        driver = stories.start("never_at_a_boundary", terminal=theirs)
    finally:
        os.close(theirs)
    driver.await_told(*trains("local"))
    os.close(ours)
    outcome = driver.outcome()
    assert outcome["raised"] == "PreemptedError", outcome
    assert driver.ended() == 0
    stories.assert_nothing_left()


@ON_BOTH
def test_a_killed_server_takes_its_workers_along_and_the_run_begins_again(stories: Any, engine: str) -> None:
    driver = stories.start("never_at_a_boundary")
    driver.await_told(*trains(engine))
    worker = int((stories.root / "rank 0 trains").read_text())
    server = int(Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(server, signal.SIGKILL)

    outcome = driver.outcome()
    assert (outcome["raised"], outcome["metrics"]) == ("", {"resumed": 1})
    lost = [fact for fact in stories.facts("killed") if isinstance(fact, ev.Lost)]
    assert [(fact.ranks, fact.decision) for fact in lost] == [((0, 1), "retry")]
    said = [fact.message for fact in stories.facts("killed") if isinstance(fact, ev.Warned)]
    expected = engine == "local"  # on a cluster workers have imported modules from their files all along
    assert any("import modules anew from their files" in message for message in said) is expected, said


# --------------------------------------------------------------------------- how the driver ends


@on("local", "ray", smoke=["local"])
def test_an_uncaught_failure_is_the_scripts_exit_code_and_last_words(stories: Any) -> None:
    driver = stories.start("raise_beside_a_collective")
    assert driver.ended() == 1
    assert "powertrain.errors.WorkerGroupError: Rank 1 raised ValueError: shard 7 is empty" in driver.output
    line = next(n for n, t in enumerate(Path(loops.__file__).read_text().splitlines(), 1) if "shard 7" in t)
    assert f"{loops.__file__}:{line}" in driver.output


@on("local", "ray", smoke=["local"])
def test_a_failing_rank_prints_the_users_frames_and_its_log_has_all(stories: Any) -> None:
    driver = stories.start("raise_beside_a_collective")
    assert driver.ended() == 1
    printed = [line for line in driver.output.splitlines() if line.startswith("[rank 1]")]
    assert "[rank 1]   ... 1 frame of powertrain" in printed
    assert any(f'File "{loops.__file__}"' in line for line in printed)
    assert not any(OURS in line for line in printed), printed
    log = (stories.storage / "raises" / "logs" / "attempt-0" / "rank-00001.log").read_text()
    assert f'File "{OURS}worker/main.py"' in log
    assert "frame of powertrain" not in log


# --------------------------------------------------------------------------- what the driver did before


def test_a_driver_that_used_torch_threads_before(stories: Any) -> None:
    outcome = stories.start("after_torch_threads").outcome()
    assert (outcome["raised"], outcome["return_value"]) == ("", 512.0**3)
    assert "native thread" in outcome["why_not_forked"]


@pytest.mark.skipif(importlib.util.find_spec("obstore") is None, reason="obstore is not installed")
def test_a_driver_that_used_obstore_before(stories: Any) -> None:
    outcome = stories.start("after_obstore").outcome()
    assert (outcome["raised"], outcome["return_value"]) == ("", 512.0**3)
    assert "native thread" in outcome["why_not_forked"]


def test_fit_in_a_thread_of_a_fresh_driver_then_two_at_once(stories: Any) -> None:
    outcomes = stories.start("threads").outcome()
    assert {name: outcome["raised"] for name, outcome in outcomes.items()} == {
        "alone": "",
        "left": "",
        "right": "",
    }
    for name, outcome in outcomes.items():
        assert outcome["path"].endswith(name)
        assert outcome["points"] == [[rank, 0, row] for row in (1, 2, 3) for rank in (0, 1)]


def test_a_child_process_of_the_driver_does_not_keep_workers_alive(stories: Any) -> None:
    """Something the driver started may outlive it and hold its descriptors; the workers must not wait for it."""
    driver = stories.start("with_a_child_of_its_own")
    driver.await_told(*trains("local"))
    child = int((stories.root / "child").read_text())
    driver.kill()
    try:
        for rank in (0, 1):
            worker = int((stories.root / f"rank {rank} trains").read_text())
            until_gone = ["tail", "--sleep-interval=0.1", f"--pid={worker}", "-f", "/dev/null"]
            subprocess.run(until_gone, timeout=5, check=True)
    finally:
        os.kill(child, signal.SIGKILL)
