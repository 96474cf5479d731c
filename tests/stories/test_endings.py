"""Runs in which something hangs or fails that is no rank: they end when they are asked twice, with an error that names
the cause, and leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import loops
import psutil
import pytest
from tests.stories.engines import ON_ALL, ON_BOTH, ON_ONE_MACHINE, on, ranks

from powertrain import UserCallback, checkpoint_dir, get_context, report
from powertrain.checkpoint import Checkpoint
from powertrain.run import events as ev

# --------------------------------------------------------------------------- a server that does not answer


@pytest.fixture
def freeze() -> Iterator[Callable[[list[int]], None]]:
    """Freezes the warm servers that ranks were forked from; one that the story has not ended is thawed."""
    servers: list[psutil.Process] = []

    def suspend(ranks_pids: list[int]) -> None:
        for parent in {psutil.Process(pid).parent() for pid in ranks_pids}:
            assert parent is not None
            assert parent.name() == "powertrain-warm"
            servers.append(parent)
            parent.suspend()

    yield suspend
    for server in servers:
        if server.is_running():
            server.resume()


@ON_BOTH
@pytest.mark.parametrize("asked_by", ["SIGINT", "SIGTERM"])
def test_the_second_signal_ends_a_run_whose_warm_server_is_frozen(
    stories: Any, engine: str, freeze: Callable[[list[int]], None], asked_by: str
) -> None:
    driver = stories.start("freeze", engine)
    driver.await_told("rank 0 trains", "rank 1 trains")
    freeze([int((stories.root / f"rank {rank} trains").read_text()) for rank in ranks(engine)])

    number = signal.Signals[asked_by]
    driver.process.send_signal(number)
    driver.await_fact("killed", "Stopping")
    driver.process.send_signal(number)

    outcome = driver.outcome(within=40)
    assert outcome["raised"] == {"SIGINT": "KeyboardInterrupt", "SIGTERM": "PreemptedError"}[asked_by]
    assert "can be resumed" in outcome["message"]
    assert stories.facts("killed")[-1].state == {"SIGINT": "stopped", "SIGTERM": "preempted"}[asked_by]


def test_the_second_ctrl_c_ends_a_run_whose_warm_server_never_ends_its_imports(stories: Any) -> None:
    driver = stories.start("import_for_ever")
    driver.await_told("the server imports")
    driver.await_fact("stuck", "AttemptStarted")
    driver.interrupt()
    driver.await_fact("stuck", "Stopping")
    driver.interrupt()

    assert driver.outcome(within=40)["raised"] == "KeyboardInterrupt"
    assert stories.facts("stuck")[-1].state == "stopped"


# --------------------------------------------------------------------------- a callback


@ON_ALL
def test_the_second_ctrl_c_ends_a_run_that_hangs_in_a_callback(stories: Any, engine: str) -> None:
    driver = stories.start("hang_in_a_callback", engine)
    driver.await_told("the callback hangs")
    driver.interrupt()
    driver.await_told("SIGINT 1")
    driver.interrupt()

    assert driver.outcome(within=40)["raised"] == "KeyboardInterrupt"
    if engine != "inline":  # where the controller has a thread of its own, that is what hangs
        assert stories.facts("stuck")[-1].state == "stopped"


class Unprintable(Exception):
    """An error whose own text is an error."""

    def __str__(self) -> str:
        raise SystemExit(5)

    __repr__ = __str__


#: What the user's code may raise, and how it is reported.
RAISED = {
    "exit": (SystemExit(3), "raised SystemExit: 3"),
    "interrupt": (KeyboardInterrupt("no"), "raised KeyboardInterrupt: no"),
    "unprintable": (Unprintable(), "raised Unprintable: <its message cannot be shown: SystemExit>"),
}
KINDS = pytest.mark.parametrize("kind", RAISED)


class Raises(UserCallback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def after_report(self, *_: Any) -> None:
        raise self.error

    def on_event(self, *_: Any) -> None:
        raise self.error


@ON_ONE_MACHINE
@KINDS
def test_a_callback_that_raises_anything_is_reported_and_the_run_goes_on(
    fits: Any, engine: str, kind: str
) -> None:
    error, words = RAISED[kind]
    outcome = fits.outcome(loops.meet_the_others, callbacks=[Raises(error)])

    assert (outcome["raised"], outcome.get("state")) == ("", "finished"), outcome
    warned = [fact.message for fact in fits.facts("meet_the_others") if isinstance(fact, ev.Warned)]
    for method in ("after_report", "on_event"):
        assert len([text for text in warned if f"Raises.{method} {words}." in text]) == 1, warned


@ON_ONE_MACHINE
@KINDS
def test_a_stop_criterion_that_raises_anything_is_reported_and_the_run_goes_on(
    fits: Any, engine: str, kind: str
) -> None:
    error, words = RAISED[kind]

    def criterion(*_: Any) -> bool:
        raise error

    outcome = fits.outcome(loops.meet_the_others, stop=criterion)
    assert (outcome["raised"], outcome.get("state")) == ("", "finished"), outcome
    warned = [fact.message for fact in fits.facts("meet_the_others") if isinstance(fact, ev.Warned)]
    assert any(text.startswith(f"RunConfig(stop=...) {words}.") for text in warned), warned


# --------------------------------------------------------------------------- uploads and errors of the loop


def upload_and_raise(config: dict[str, Any]) -> str:
    error, _ = RAISED[config["kind"]]

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise error

    with checkpoint_dir() as directory:
        Path(directory, f"rank-{get_context().get_world_rank()}").write_text("state")
        report({"x": 1}, Checkpoint.from_directory(directory), checkpoint_upload_fn=upload)
    return "trained"


@ON_ALL
@KINDS
def test_an_upload_function_that_raises_anything_costs_the_checkpoint_and_not_the_run(
    fits: Any, engine: str, kind: str
) -> None:
    outcome = fits.outcome(upload_and_raise, train_loop_config={"kind": kind})

    assert (outcome["raised"], outcome.get("return_value")) == ("CheckpointError", "trained"), outcome
    (failed,) = [fact for fact in fits.facts("upload_and_raise") if isinstance(fact, ev.CheckpointFailed)]
    assert f"checkpoint_upload_fn {RAISED[kind][1]}" in failed.reason


def raise_unprintable() -> None:
    raise Unprintable


@ON_ALL
def test_an_error_whose_text_is_an_error_is_named_by_its_type(fits: Any, engine: str) -> None:
    outcome = fits.outcome(raise_unprintable)

    assert outcome["raised"] == "TrainingFailedError"
    assert {failure["rank"] for failure in outcome["failures"]} <= set(ranks(engine))
    assert "Unprintable: <its message cannot be shown: SystemExit>" in outcome["message"]


# --------------------------------------------------------------------------- a part of the controller


@on("local", "inline", "ray")
@pytest.mark.parametrize(
    ("part", "name"),
    [("telemetry", "TelemetryWriter"), ("uploaders", "Uploaders"), ("steering", "Steering")],
    ids=["telemetry", "uploaders", "steering"],
)
def test_a_controller_that_cannot_be_made_is_an_error_and_leaves_nothing(
    stories: Any, engine: str, part: str, name: str
) -> None:
    outcome = stories.start(f"without_{part}", engine).outcome(within=40)

    assert (outcome["raised"], outcome["message"]) == ("RuntimeError", f"no {name}")
    assert outcome["threads"] == []


# --------------------------------------------------------------------------- a directory that is gone


def remove_own_directory(config: dict[str, Any]) -> str:
    report({"x": 1}, barrier=True)
    if get_context().get_world_rank() == 0:
        while os.path.exists(os.path.join(config["directory"], "lease")):  # while the run writes to it
            shutil.rmtree(config["directory"], ignore_errors=True)
    return "trained"


@ON_ALL
def test_a_run_that_ended_well_returns_its_result_though_its_directory_is_gone(
    fits: Any, engine: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = directory / "storage" / "remove_own_directory"
    trainer = fits.trainer(remove_own_directory, train_loop_config={"directory": str(run)})
    result = trainer.fit()

    assert (result.state, result.metrics, result.return_value) == ("finished", {"x": 1}, "trained")
    assert f"The run's directory {str(run)!r} is gone" in "".join(capsys.readouterr())
    assert not list(run.glob("lease/*")), "nothing is put into what may be another start's"
