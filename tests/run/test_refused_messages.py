"""A rank whose message the run cannot read fails with the reason; the run neither hangs nor goes on without it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

#: What a rank sends, past the checks of the public functions, and then waits for.
SENDS = {
    "a report": (
        "session.service.post(Point(row=1, at=0.0, metrics={}, barrier=None))\n"
        "    session.service.wait_for_row(1)",
        ("Expected `bool`, got `None`", "barrier"),
    ),
    "a report before the first": (
        "session.service.post(Point(row=-3, at=0.0, metrics={}, barrier=True))\n"
        "    session.service.wait_for_row(1)",
        ("Expected `int` >= 0", "row"),
    ),
    "a question": (
        'session.service.query_checkpoints(0, False, "5")',
        ("Expected `float`, got `str`", "timeout"),
    ),
    "an arrival": (
        "session.service.meet(Arrived(sync=-1, kind='barrier'))",
        ("Expected `int` >= 0", "sync"),
    ),
    "a report after which it does not wait": (
        "session.service.post(Point(row=1, at='now', metrics={}))\n"
        "    while True:\n"
        "        time.sleep(0.01)\n"
        "        powertrain.report({'loss': 1.0})",
        ("Expected `float`, got `str`", "at"),
    ),
}

DRIVER = """
import sys, time
import powertrain
from powertrain import RunConfig, ScalingConfig, TrainingFailedError
from powertrain.trainer import DataParallelTrainer
from powertrain.wire.from_worker import Arrived
from powertrain.wire.values import Point
from powertrain.worker import session as worker_session

def loop():
    session = worker_session.current("loop")
    if session.place.rank != session.place.world_size - 1:
        powertrain.collective.barrier()
    {sends}

if __name__ == "__main__":
    trainer = DataParallelTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers={workers}),
        run_config=RunConfig(name="refused", storage_path=sys.argv[1]),
    )
    try:
        trainer.fit()
    except TrainingFailedError as error:
        (failure,) = error.worker_failures.values()
        print("FAILED", failure.failure.rank, failure.failure.error_type, failure.failure.message)
"""


@pytest.mark.parametrize(
    ("sends", "workers"),
    [*((sends, 0) for sends in SENDS), ("a report", 2), ("a report after which it does not wait", 2)],
)
def test_a_rank_whose_message_cannot_be_read_fails_with_the_reason(
    tmp_path: Path, sends: str, workers: int
) -> None:
    statements, reason = SENDS[sends]
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.replace("{sends}", statements).replace("{workers}", str(workers)))
    ended = subprocess.run(
        [sys.executable, str(driver), str(tmp_path / "runs")], capture_output=True, text=True, timeout=60
    )
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    rank = max(0, workers - 1)
    assert line.startswith(f"FAILED {rank} WireError A message of rank {rank} of attempt 0 cannot be read")
    expected, field = reason
    assert re.search(rf"{re.escape(expected)} - at `\$\.messages\[\d+\]\.{field}`", line)
