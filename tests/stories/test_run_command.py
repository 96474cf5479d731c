"""``powertrain run``: scripts that were written for torchrun, and know nothing of Powertrain, are runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.stories.engines import on

from powertrain.result.result import Result
from powertrain.run import events as ev

SCRIPTS = Path(__file__).parent / "torchrun_scripts"
#: Set by torchrun for its own agent, and without a meaning for a script.
_OF_TORCHRUNS_AGENT = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}


@pytest.fixture
def start(stories: Any) -> Any:
    """Starts ``powertrain run`` on two ranks in the story's storage."""

    def run(*words: str, options: tuple[str, ...] = (), nproc: int = 2) -> Any:
        return stories.start_powertrain(
            "run", f"--nproc={nproc}", "--name=run", f"--storage-path={stories.storage}", *options, *words
        )

    return run


def script(name: str) -> str:
    return str(SCRIPTS / f"{name}.py")


def pids_of(driver: Any, attempt: int) -> dict[int, int]:
    return {fact.rank: fact.pid for fact in driver.await_facts("run", ev.WorkerStarted, 2, attempt=attempt)}


@pytest.mark.smoke
def test_a_killed_rank_of_a_torchrun_script_restarts_it_and_the_run_is_diagnosed(
    start: Any, stories: Any
) -> None:
    driver = start(
        script("ddp_classifier"), "--epochs=8", "--snapshot=snapshot.pt", "--pause-file=go",
        options=("--max-restarts=1",),
    )  # fmt: skip
    driver.await_told("snapshot.pt")
    os.kill(pids_of(driver, 0)[1], signal.SIGKILL)
    driver.await_facts("run", ev.TrainingStarted, attempt=1)
    (stories.root / "go").touch()

    assert driver.ended() == 0, driver.output
    (failed,) = (fact for fact in stories.facts("run") if isinstance(fact, ev.Failed))
    first = failed.failures[0]
    assert (first.rank, first.kind, first.exit_code) == (1, "signal", 137)
    result = Result.from_path(stories.storage / "run")
    assert result.state == "finished"
    for rank in (0, 1):
        assert f"[rank {rank}] rank {rank} of 2 begins at epoch 0" in driver.output
        assert f"[rank {rank}] rank {rank} of 2 begins at epoch 1" in driver.output
        assert f"rank {rank} is done after 8 epochs" in (
            stories.storage / "run" / "logs" / "attempt-1" / f"rank-{rank:05d}.log"
        ).read_text("utf-8")
    assert "diagnosis of run" in driver.output
    summary = json.loads((stories.storage / "run" / "final_summary.json").read_text("utf-8"))
    assert summary["steps"] > 0
    assert len(summary["ranks"]) == 2


def test_a_script_finds_what_torchrun_would_give_it(start: Any, stories: Any) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [script("describe"), "there", "--flag", "--", "-x", "two words"]
    with pytest.MonkeyPatch.context() as patch:  # undone before the check for what the test left
        patch.delenv("OMP_NUM_THREADS")  # each side sets its own default
        environment = {**os.environ, "TMPDIR": str(stories.root)}
        subprocess.run(
            [*torchrun, *words],
            cwd=stories.root,
            env=environment,
            check=True,
            capture_output=True,
            timeout=120,
        )
        words[1] = "here"
        driver = start(*words)
    assert driver.ended() == 0, driver.output

    drawn: list[float] = []
    for rank in (0, 1):
        here, there = (
            json.loads((stories.root / f"{name}-{rank}.json").read_text("utf-8"))
            for name in ("here", "there")
        )
        told, told_there = here.pop("environment"), there.pop("environment")
        assert told_there.keys() - told.keys() <= _OF_TORCHRUNS_AGENT
        differs = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", *_OF_TORCHRUNS_AGENT}
        assert {name: told.get(name) for name in told_there if name not in differs} == {
            name: value for name, value in told_there.items() if name not in differs
        }
        assert told["TORCHELASTIC_RUN_ID"] == "run"
        assert here.pop("argv") == [words[0], "here", *words[2:]]
        assert there.pop("argv") == [words[0], "there", *words[2:]]
        drawn += [*here.pop("random"), *there.pop("random")]
        assert here == there
    assert len(set(drawn)) == len(drawn), "every process draws its own numbers"


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise", 1, "Rank 1 raised ValueError: shard 7 is empty"),
        ("exit", 3, "Rank 1 raised SystemExit: 3"),
        ("message", 1, "no data today"),
        ("exit at once", 4, "Rank 1 exited with code 4"),
        ("kill", 137, "Rank 1 was killed by SIGKILL"),
        ("well", 0, "rank 1 ends well"),
        ("good exit at once", 0, "rank 1 ends well"),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(
    start: Any, stories: Any, how: str, code: int, said: str
) -> None:
    driver = start(script("ending"), how, options=("--no-trace",))
    assert driver.ended() == code, driver.output
    assert said in driver.output
    assert Result.from_path(stories.storage / "run").state == ("failed" if code else "finished")
    if how == "raise":
        (failed,) = (fact for fact in stories.facts("run") if isinstance(fact, ev.Failed))
        assert (failed.failures[0].file, failed.failures[0].function) == (script("ending"), "end")
        assert "diagnosis of run" not in driver.output


def test_a_module_is_run_with_m(start: Any, stories: Any) -> None:
    (stories.root / "module_package").symlink_to(SCRIPTS / "module_package")
    driver = start("module_package", "--lr", "1", options=("-m",))
    assert driver.ended() == 0, driver.output
    assert "the module runs as rank 1 ['--lr', '1'] __main__ __main__.py" in driver.output


def test_a_module_that_is_not_there_is_named(start: Any) -> None:
    driver = start("no_such_module", options=("-m",))
    assert driver.ended() == 1
    assert "no module 'no_such_module'" in driver.output


def test_ctrl_c_reaches_the_script_as_keyboard_interrupt(start: Any, stories: Any) -> None:
    driver = start(script("endless"), str(stories.root))
    driver.await_told("trains-0", "trains-1")
    driver.interrupt()

    assert driver.ended() == 130, driver.output
    assert "by KeyboardInterrupt" in {(stories.root / f"saved-{r}").read_text() for r in saved(stories)}
    assert stories.facts("run")[-1].state == "stopped"


def saved(stories: Any) -> list[int]:
    """Ranks that came to save: one whose collective breaks, because another has ended first, has nothing to save."""
    return [rank for rank in (0, 1) if (stories.root / f"saved-{rank}").exists()]


def test_sigterm_reaches_the_scripts_own_handler(start: Any, stories: Any) -> None:
    driver = start(script("endless"), str(stories.root), "sigterm")
    driver.await_told("trains-0", "trains-1")
    driver.process.terminate()

    assert driver.ended() == 143, driver.output
    assert [(stories.root / f"saved-{rank}").read_text() for rank in saved(stories)] != []
    assert stories.facts("run")[-1].state == "preempted"


def test_powertrain_stop_ends_it(start: Any, stories: Any) -> None:
    driver = start(script("endless"), str(stories.root))
    driver.await_told("trains-0", "trains-1")
    stopping = stories.start_powertrain("stop", "run")

    assert stopping.ended() == 0, stopping.output
    assert driver.ended() == 0, driver.output
    assert stories.facts("run")[-1].state == "stopped"


def test_a_hanging_script_is_recognized_and_started_again(start: Any, stories: Any) -> None:
    driver = start(script("hanging"), options=("--hang-timeout=6", "--max-restarts=1"))
    assert driver.ended() == 0, driver.output
    (failed,) = (fact for fact in stories.facts("run") if isinstance(fact, ev.Failed))
    assert {(failure.rank, failure.kind) for failure in failed.failures} == {(1, "hung")}
    assert failed.failures[0].source == "time.sleep(3600)"


@on("ray")
def test_a_script_runs_on_the_nodes_of_a_cluster(start: Any, stories: Any) -> None:
    driver = start(script("ddp_classifier"), "--epochs=1", f"--snapshot={stories.root}/snapshot.pt")
    assert driver.ended() == 0, driver.output
    assert "rank 1 is done after 1 epochs" in driver.output
    assert stories.facts("run")[0].engine == "ray"
