"""Runs in which a rank fails: what is said of it, how fast it ends, how it is begun again.

On the cluster the deaths come by way of a node's agent, so all kinds of them play there too, and the restarts; what is
made of a failure afterwards is the controller's work, and told on one machine.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import loops
import pytest
from tests.stories.engines import ON_BOTH, ON_ONE_MACHINE, on, on_cases, ranks

from powertrain import FailureConfig
from powertrain.result.result import Result
from powertrain.run import events as ev
from powertrain.testing import faults
from powertrain.torch import TorchTrainer

#: A collective's own timeout is 30 minutes; a failure beside one must end the run long before, on a busy machine too.
SECONDS = 60.0


def line_of(function: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


@on("local", "inline", "ray", smoke=["local", "inline"])
def test_an_exception_names_the_users_line(fits: Any, engine: str) -> None:
    outcome = fits.outcome(loops.raise_beside_a_collective, engine, kind=TorchTrainer)

    culprit = ranks(engine)[-1]
    assert outcome["raised"] == "TrainingFailedError"
    first = outcome["failures"][0]
    assert (first["rank"], first["kind"], first["error_type"]) == (culprit, "raised", "ValueError")
    assert first["file"] == loops.__file__
    assert first["line"] == line_of(loops.raise_beside_a_collective, "raise ValueError")
    assert first["source"].startswith('raise ValueError("shard 7 is empty")')
    assert outcome["message"].splitlines()[0] == f"Rank {culprit} raised ValueError: shard 7 is empty"
    assert f"{loops.__file__}:{first['line']}" in outcome["message"]
    assert (outcome["state"], outcome["metrics"]) == ("failed", {"step": 1}), "the partial result is carried"
    assert outcome["seconds"] < SECONDS


def test_the_echo_in_a_rank_inside_a_collective_is_folded(fits: Any) -> None:
    outcome = fits.outcome(loops.raise_beside_a_collective, kind=TorchTrainer)

    others = outcome["failures"][1:]
    assert all(failure["secondary"] for failure in others)
    assert outcome["message"].count("raised") == 1
    assert "Traceback" not in outcome["message"]


ENDS = {
    "SIGKILL": (
        "signal",
        "Rank 1 was killed by SIGKILL (sent by another process or the system; it cannot be caught).",
    ),
    "segfault": ("signal", "Rank 1 was killed by SIGSEGV (segmentation fault"),
    "sys.exit(3)": ("exit", "Rank 1 raised SystemExit: 3"),
    "MemoryError": ("raised", "Rank 1 raised MemoryError"),
}


@on_cases(("engine", "how"), [*(("local", how) for how in ENDS), ("ray", "SIGKILL"), ("ray", "segfault")])
def test_the_end_of_a_rank_is_decoded(fits: Any, engine: str, how: str) -> None:
    kind, words = ENDS[how]
    outcome = fits.outcome(loops.die, train_loop_config={"how": how})

    assert outcome["raised"] == "TrainingFailedError"
    assert [(f["rank"], f["kind"]) for f in outcome["failures"]] == [(1, kind)]
    assert outcome["message"].startswith(words)
    assert "after row 1" in outcome["message"]
    assert outcome["seconds"] < SECONDS


def test_sys_exit_inline_is_a_failure_of_the_run_and_not_of_the_process(fits: Any) -> None:
    outcome = fits.outcome(loops.die, "inline", train_loop_config={"how": "sys.exit(3)"})
    assert (outcome["raised"], outcome["cause"]) == ("TrainingFailedError", "SystemExit")
    assert outcome["failures"][0]["kind"] == "exit"


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of this test's own that allows 64 MiB."""
    name = f"powertrain-story-{uuid.uuid4().hex[:8]}"
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, name)
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(64 << 20))
        except OSError:
            group.rmdir()
            continue
        yield group
        group.rmdir()
        return
    pytest.skip("no memory cgroup can be made here: it needs root and a memory controller")


@ON_BOTH
def test_an_oom_kill_is_distinguished_from_other_kills(fits: Any, small_cgroup: Path) -> None:
    outcome = fits.outcome(loops.fill_memory, train_loop_config={"cgroup": str(small_cgroup)})

    assert [(f["rank"], f["kind"]) for f in outcome["failures"]] == [(1, "oom")]
    assert "Rank 1 was killed by the kernel because memory ran out" in outcome["message"]


# --------------------------------------------------------------------------- beginning again


@on_cases(
    ("engine", "how"),
    [
        pytest.param("local", "SIGKILL", marks=pytest.mark.smoke),
        ("local", "raise"),
        pytest.param("inline", "raise", marks=pytest.mark.smoke),
        pytest.param("ray", "SIGKILL", marks=pytest.mark.smoke),
        ("ray", "raise"),
    ],
)
def test_a_restart_goes_on_from_the_newest_commit(fits: Any, engine: str, how: str) -> None:
    outcome = fits.outcome(
        loops.recover,
        engine,
        kind=TorchTrainer,
        train_loop_config={"how": how},
        failure_config=FailureConfig(max_failures=1),
    )

    assert outcome["raised"] == "", outcome
    assert outcome["return_value"] == "attempt 1 began at epoch 2"
    before = [[rank, 0, row] for row in (1, 2) for rank in ranks(engine)]
    after = [[rank, 1, row] for row in (3, 4, 5) for rank in ranks(engine)]
    assert outcome["points"] == before + after, "each row once per rank, the abandoned ones left out"
    failed = [f for f in fits.facts("recover") if isinstance(f, ev.Failed)]
    assert [(f.attempt, f.decision) for f in failed] == [(0, "retry")]
    logs = sorted(path.name for path in Path(outcome["path"], "logs").glob("attempt-*"))
    assert logs == ([] if engine == "inline" else ["attempt-0", "attempt-1"])


@ON_ONE_MACHINE
def test_a_run_that_fails_too_often_is_given_up(fits: Any, engine: str) -> None:
    outcome = fits.outcome(
        loops.raise_beside_a_collective,
        engine,
        kind=TorchTrainer,
        name="often",
        failure_config=FailureConfig(max_failures=1),
    )
    assert outcome["raised"] == "TrainingFailedError"
    assert "max_failures=1" in outcome["message"]
    failed = [f for f in fits.facts("often") if isinstance(f, ev.Failed)]
    assert [(f.attempt, f.decision) for f in failed] == [(0, "retry"), (1, "give_up")]


@ON_BOTH
def test_a_fault_by_script_reaches_its_rank_at_its_step(fits: Any) -> None:
    death = faults.Fault(faults.Step(rank=1, step=2), faults.Kill())
    chronicle = fits.directory / "chronicle"
    outcome = fits.outcome(
        loops.improve,
        kind=TorchTrainer,
        worker_runtime_env={"env_vars": faults.environment(death, directory=chronicle)},
        failure_config=FailureConfig(max_failures=1),
    )

    assert (outcome["raised"], outcome["metrics"]) == ("", {"epoch": 2, "rank_plus_epoch": 2}), outcome
    # Whether row 2 is made again is open: rank 1 dies with its share of it staged, and rank 0 may have staged its own.
    assert [[rank, row] for rank, _, row in outcome["points"]] == [
        [r, row] for row in (1, 2, 3) for r in (0, 1)
    ]
    assert [fault.role for fault in faults.fired(chronicle)] == ["rank-1"]


def test_the_abandoned_points_stay_on_disk(fits: Any) -> None:
    from powertrain.run.metrics import reading
    from powertrain.run.record import journal
    from powertrain.storage import open_storage

    outcome = fits.outcome(
        loops.recover, train_loop_config={"how": "SIGKILL"}, failure_config=FailureConfig(max_failures=1)
    )
    storage = open_storage(outcome["path"])
    frame = reading.dataframe(storage, journal.replay(journal.read(storage)), abandoned=True)
    gone = frame[frame["abandoned"]]
    points = gone[["rank", "attempt", "training_iteration"]].values.tolist()
    # Rank 0 may have made its next report before it was ended.
    assert [point for point in points if point != [0, 0, 4]] == [[0, 0, 3], [1, 0, 3]]


@ON_BOTH
def test_without_restarts_left_the_run_fails_and_can_be_resumed_by_name_on_any_engine(fits: Any) -> None:
    first = fits.outcome(loops.recover, "local", train_loop_config={"how": "SIGKILL"})
    assert (first["raised"], first["state"]) == ("TrainingFailedError", "failed")
    assert Result.from_path(first["path"]).state == "failed"

    second = fits.outcome(loops.recover, train_loop_config={"how": "SIGKILL"})
    assert (second["raised"], second["state"]) == ("", "finished")
    assert second["return_value"] == "attempt 1 began at epoch 2"


@ON_BOTH
def test_a_process_that_a_rank_left_behind_goes_with_it(fits: Any) -> None:
    def leave_a_child() -> int:
        import subprocess

        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    pid = fits.outcome(leave_a_child)["return_value"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        pytest.fail(f"process {pid}, started by a rank, is still there")


def die_beside_a_spawned_process() -> None:
    import multiprocessing
    import signal
    import time

    import powertrain

    context = multiprocessing.get_context("spawn")
    kept = [context.Queue(), context.Lock()]
    child = context.Process(target=time.sleep, args=(60,))
    child.start()
    powertrain.report({"made": len(kept)})
    os.kill(os.getpid(), signal.SIGKILL)


def test_semaphores_that_a_killed_rank_shared_with_a_spawned_process_are_gone(fits: Any) -> None:
    before = set(os.listdir("/dev/shm"))
    outcome = fits.outcome(die_beside_a_spawned_process, workers=1)
    assert outcome["raised"] == "TrainingFailedError"
    assert {name for name in os.listdir("/dev/shm") if name.startswith("sem.")} <= before
