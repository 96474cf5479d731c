"""What a story's driver and its training functions use to talk to the test that watches them.

``STORY_DIRECTORY`` is the story's own directory: the runs lie in ``storage`` below it, and files by agreed names in
it say how far the story has come. The same functions serve a driver process and the test process itself, so that one
story reads the same on every engine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from powertrain import RunConfig, ScalingConfig
from powertrain.errors import CheckpointError, TrainingFailedError
from powertrain.result.result import Result

#: A story that does not get on within this time has hung.
PATIENCE = 150.0
#: Scenarios of the driver that run, on one machine, as where torch is not installed: a server that has loaded it is no
#: part of them, and takes four seconds to.
WITHOUT_TORCH = (
    "save_when_asked",
    "never_at_a_boundary",
    "validate_asleep",
    "with_a_child_of_its_own",
    "trace_until_killed",
    "track_until_killed",
    "share_the_machine",
    "talk",
    "freeze",
    "hang_in_a_callback",
    "without_telemetry",
    "without_uploaders",
    "without_steering",
)
#: Scenarios about imports, and about how the interpreter itself ends a script: a fresh one runs them.
ABOUT_THE_INTERPRETER = ("import_for_ever", "threads", "raise_beside_a_collective")


def directory() -> Path:
    return Path(os.environ["STORY_DIRECTORY"])


def tell(name: str, content: str = "") -> None:
    """Make a fact visible to everybody in the story, whole or not at all."""
    unfinished = directory() / f".{name}.{os.getpid()}"
    unfinished.write_text(content)
    unfinished.rename(directory() / name)


def told(name: str) -> bool:
    return (directory() / name).exists()


def await_told(*names: str) -> None:
    """Wait until all of these words were sent."""
    deadline = time.monotonic() + PATIENCE
    while not all(map(told, names)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"of {names} not all were told within {PATIENCE:g} s")
        time.sleep(0.005)


def scaling(engine: str, workers: int | tuple[int, int] = 2) -> ScalingConfig:
    """Two workers; under torchrun as many as it started, inline this very process."""
    if engine in ("inline", "torchrun"):
        return ScalingConfig(num_workers=0)
    if engine == "local" and isinstance(workers, tuple):
        # So that the size of an elastic story does not depend on the cores of the machine it plays on.
        return ScalingConfig(num_workers=workers, engine=engine, resources_per_worker={"CPU": 0.01})
    return ScalingConfig(num_workers=workers, engine=engine)


def run_config(name: str | None, **options: Any) -> RunConfig:
    """A run of the story. Its workers get the story's directory, and the variables in ``worker_runtime_env``: what they
    are forked from may be older than the story, or on a node of a cluster."""
    given = options.pop("worker_runtime_env", {})
    variables = {"STORY_DIRECTORY": str(directory()), **given.get("env_vars", {})}
    return RunConfig(
        name=name,
        storage_path=str(directory() / "storage"),
        worker_runtime_env={**given, "env_vars": variables},
        **options,
    )


def outcome_of(fit: Callable[[], Result]) -> dict[str, Any]:
    """What came out of ``fit``, as plain values."""
    began = time.monotonic()
    try:
        result = fit()
    except TrainingFailedError as error:
        failures = [msgspec.to_builtins(failed.failure) for failed in error.worker_failures.values()]
        about = {
            "raised": "TrainingFailedError",
            "class": type(error).__name__,
            "message": str(error),
            "failures": failures,
        }
        about["cause"] = type(error.__cause__).__name__
        about.update(_about(error.result))
    except CheckpointError as error:
        about = {"raised": "CheckpointError", "message": str(error)}
        about.update(_about(error.result) if error.result is not None else {})
    except BaseException as error:
        about = {"raised": type(error).__name__, "message": str(error)}
    else:
        about = {"raised": "", **_about(result)}
    return {**about, "seconds": time.monotonic() - began}


def _about(result: Result) -> dict[str, Any]:
    frame = result.dataframe(ranks="all")
    points = frame[["rank", "attempt", "training_iteration"]].values.tolist() if len(frame) else []
    return {
        "state": result.state,
        "path": result.path,
        "metrics": result.metrics,
        "return_value": result.return_value,
        "checkpoint": result.checkpoint.path if result.checkpoint else "",
        "points": points,
        "unsaved": [vars(lost) for lost in result.unsaved_checkpoints],
    }


def conclude(outcome: dict[str, Any]) -> None:
    """Leave the outcome for the test; under torchrun each rank leaves its own."""
    tell(f"outcome-{os.environ.get('RANK', '0')}.json", json.dumps(outcome))
