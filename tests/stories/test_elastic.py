"""Runs whose number of workers changes: the same samples in each step, the same losses, nothing redone.

Resizes that are asked for play on the cluster too. How runs share this machine, and what is left of a run whose warm
server was killed, are the ledger's and the local server's; nodes that come and go are told in ``test_ray_nodes.py``.
"""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import elastic
import pytest
import registering
import story
from tests.stories.engines import ON_BOTH, on, on_cases
from tests.stories.going import changes_of_size, going
from typer.testing import CliRunner

from powertrain import FailureConfig, ScalingConfig
from powertrain.cli.main import app
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.torch import TorchTrainer

STEPS = 160


def resize_when(steps_and_sizes: list[tuple[int, int]], storage: Path, name: str) -> threading.Thread:
    """Ask for another number of workers once the run has come to a step."""

    def ask() -> None:
        for step, workers in steps_and_sizes:
            story.await_told(f"step-{step}")
            done = CliRunner().invoke(app, ["resize", name, str(workers), "--storage", str(storage)])
            story.tell(f"answer-{workers}", done.output)

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


@on_cases(
    ("engine", "saves", "micro"),
    [
        ("local", "registered", None),
        ("local", "by hand", None),
        ("local", "by hand", 1),
        ("ray", "registered", None),
    ],
)
def test_four_two_three_workers_with_kills_between_train_as_one_process_does(
    fits: Any, saves: str, micro: int | None
) -> None:
    config = {
        "steps": STEPS,
        "every": 5,
        "pace": 0.01,
        "saves": saves,
        "micro": micro,
        "kills": [62, 112],
        # However slow the command is, each size is asked for before the kill that is to happen in it.
        "waits": {"30": ["answer-2"], "85": ["answer-3"]},
        "until_size": (100, 3),
    }
    trainer = fits.trainer(
        elastic.linear_regression,
        kind=TorchTrainer,
        workers=(2, 4),
        train_loop_config=config,
        failure_config=FailureConfig(max_failures=2),
    )
    asking = resize_when([(20, 2), (75, 3)], fits.directory / "storage", "linear_regression")
    outcome = story.outcome_of(trainer.fit)
    asking.join()

    assert outcome["raised"] == "", outcome
    facts = fits.facts("linear_regression")
    assert changes_of_size(fits, "linear_regression") == [4, 2, 3]
    assert len([fact for fact in facts if isinstance(fact, ev.Failed)]) == 2, "both kills were failures"
    if fits.engine == "local":  # a cluster may be slow to hand over the third slot
        sizes = [fact.world_size for fact in facts if isinstance(fact, ev.AttemptStarted)]
        assert sizes == [4, 2, 2, 3, 3]
        assert [fact.world_size for fact in facts if isinstance(fact, ev.Resized)] == [2, 3]
    frame = Result.from_path(outcome["path"]).dataframe(ranks="all")
    samples = frame.groupby("step")["samples"].sum()
    assert samples.tolist() == [elastic.GLOBAL_BATCH] * STEPS, "each step had the same number of samples"
    losses = frame[frame["rank"] == 0].sort_values("step")["loss"].tolist()
    assert losses == pytest.approx(elastic.losses_of_one_process(STEPS), rel=1e-9)


@on("local", "ray", smoke=["local"])
def test_a_resize_redoes_nothing(fits: Any) -> None:
    config = {
        "steps": 60, "every": 10, "pace": 0.01, "saves": "by hand", "kills": [], "waits": {"25": ["answer-1"]},
    }  # fmt: skip
    trainer = fits.trainer(
        elastic.linear_regression, kind=TorchTrainer, workers=(1, 2), train_loop_config=config
    )
    asking = resize_when([(15, 1)], fits.directory / "storage", "linear_regression")
    outcome = story.outcome_of(trainer.fit)
    asking.join()
    assert outcome["raised"] == "", outcome
    done = [row for rank, _, row in outcome["points"] if rank == 0]
    assert sorted(done) == list(range(1, 61))
    assert (fits.directory / "answer-1").read_text() == (
        "It goes on with 1 worker instead of 2 after its next checkpoint.\n"
    )


@ON_BOTH
def test_a_size_asked_for_before_the_loop_can_save_is_taken_soon_after(fits: Any) -> None:
    """Before anything was committed, and when a restart has just begun: no rank commits but for the resize itself."""
    trainer = fits.trainer(
        registering.registers_when_told, kind=TorchTrainer, workers=(1, 2), train_loop_config={"waits": 2}
    )
    name = "registers_when_told"
    with going(trainer) as run:
        for attempt, workers in enumerate((1, 2)):
            story.await_told(f"begun-{attempt}")
            storage = str(fits.directory / "storage")
            done = CliRunner().invoke(app, ["resize", name, str(workers), "--storage", storage])
            assert done.exit_code == 0, done.output
            story.tell(f"asked-{attempt}")
            run.fact(fits, name, ev.Resized, attempt=attempt)
        run.trains_on(fits, name, 2, after=1)
    assert run.outcome["raised"] == "", run.outcome
    assert changes_of_size(fits, name) == [2, 1, 2]
    steps = Result.from_path(run.outcome["path"]).dataframe(ranks="all").query("rank == 0")["step"].tolist()
    assert steps == list(range(1, len(steps) + 1)), "nothing is redone"


@pytest.mark.parametrize(
    ("workers", "expected"), [((1, 4), 2), ((3, 4), 3), (4, 4)], ids=["elastic", "minimum above", "fixed"]
)
def test_an_elastic_run_takes_one_worker_per_core_and_a_fixed_one_what_it_names(
    fits: Any, monkeypatch: pytest.MonkeyPatch, workers: int | tuple[int, int], expected: int
) -> None:
    from powertrain.engine import resources

    monkeypatch.setattr(resources, "_cores", lambda: frozenset((0, 1)))
    trainer = fits.trainer(elastic.count_workers)
    trainer.scaling_config = ScalingConfig(num_workers=workers, engine="local")
    outcome = story.outcome_of(trainer.fit)
    assert (outcome["raised"], outcome["return_value"]) == ("", expected)


def test_resize_of_a_run_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["resize", "nothing", "2", "--storage", str(tmp_path)])
    assert done.exit_code == 1
    assert "There is no run 'nothing'" in str(done.exception or done.output)


def test_two_runs_share_what_the_machine_has(fits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An elastic run starts with what another one leaves, and grows when that one is over."""
    from powertrain import tasks
    from powertrain.run.scaling import policy

    monkeypatch.setattr(policy, "GROW_DELAY_S", 0.2)
    tasks.init("local", resources={"seat": 3})
    try:
        need = {"CPU": 0, "seat": 1}
        first = fits.trainer(
            elastic.until_told,
            kind=TorchTrainer,
            name="first",
            train_loop_config={"saves": "no", "until": "second trains"},
        )
        first.scaling_config = ScalingConfig(num_workers=2, resources_per_worker=need, engine="local")
        config = {"steps": 600, "every": 5, "pace": 0.05, "saves": "registered", "kills": []}
        second = fits.trainer(elastic.linear_regression, kind=TorchTrainer, train_loop_config=config)
        second.scaling_config = ScalingConfig(num_workers=(1, 3), resources_per_worker=need, engine="local")
        thread = threading.Thread(target=first.fit)
        thread.start()
        story.await_told("steps-1")
        with going(second) as run:
            try:
                run.fact(fits, "linear_regression", ev.TrainingStarted, attempt=0)
            finally:
                story.tell("second trains")
            run.trains_on(fits, "linear_regression", 3, after=0)
        thread.join()
    finally:
        tasks.shutdown()
    assert run.outcome["raised"] == "", run.outcome
    # The first run gives its two places back one after the other.
    assert changes_of_size(fits, "linear_regression") in ([1, 3], [1, 2, 3])


def test_a_run_that_loses_the_warm_server_does_not_wait_for_what_it_held_itself(fits: Any) -> None:
    from powertrain import tasks
    from powertrain.engine.local.warm_server import server_pids

    tasks.init("local", resources={"seat": 2})
    try:
        trainer = fits.trainer(
            elastic.until_told, kind=TorchTrainer, train_loop_config={"saves": "no", "until": "pid-1-1"}
        )
        need = {"CPU": 0, "seat": 1}
        trainer.scaling_config = ScalingConfig(num_workers=2, resources_per_worker=need, engine="local")

        def kill_server() -> None:
            story.await_told("steps-1")
            for server in server_pids():  # another may be left by runs without torch
                os.kill(server, signal.SIGKILL)

        killing = threading.Thread(target=kill_server)
        killing.start()
        outcome = story.outcome_of(trainer.fit)
        killing.join()
    finally:
        tasks.shutdown()
    assert outcome["raised"] == "", outcome
    assert [type(fact).__name__ for fact in fits.facts("until_told")].count("Lost") == 1
