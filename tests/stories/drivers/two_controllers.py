"""``python two_controllers.py SETTINGS``: a driver whose run another driver may try to take.

SETTINGS is a JSON object: "storage" and "name" of the run, "who" this driver is, "marks" the directory in which it
tells every fact and how it ended and in which it is told to stop, "lease" the seconds of
:mod:`powertrain.run.record.lease`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import powertrain
from powertrain import Checkpoint, DataParallelTrainer, RunConfig, ScalingConfig, UserCallback
from powertrain.run import events
from powertrain.run.record import lease

# As where it is not installed: loading it would take each driver's server four seconds.
sys.modules["torch"] = None  # type: ignore[assignment]


def save_until_told(config: dict[str, Any]) -> int:
    """A checkpoint every moment, each with the number of the one before it plus one."""
    number, checkpoint = 0, powertrain.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            number = int(Path(directory, "number").read_text())
    while not Path(config["marks"], f"stop-{config['who']}").exists():
        number += 1
        with powertrain.checkpoint_dir() as directory:
            Path(directory, "number").write_text(str(number))
            Path(directory, "state").write_bytes(number.to_bytes(4, "big") * 10_000)
            powertrain.report({"number": number}, checkpoint=Checkpoint(directory))
        time.sleep(0.1)
    return number


class Teller(UserCallback):
    """Puts every fact into a file of this driver's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_event(self, run_context: Any, event: Any) -> None:
        with self._path.open("ab") as file:
            file.write(events.encode(event) + b"\n")


def outcome_of_fit(settings: dict[str, Any]) -> dict[str, str]:
    marks = Path(settings["marks"])
    trainer = DataParallelTrainer(
        save_until_told,
        train_loop_config={"marks": str(marks), "who": settings["who"]},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name=settings["name"],
            storage_path=settings["storage"],
            callbacks=[Teller(marks / f"facts-{settings['who']}")],
        ),
    )
    try:
        trainer.fit()
    except Exception as error:
        return {"raised": type(error).__name__, "message": str(error)}
    return {"raised": "", "message": ""}


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    for constant, seconds in settings["lease"].items():
        setattr(lease, constant, seconds)
    outcome = outcome_of_fit(settings)
    Path(settings["marks"], f"outcome-{settings['who']}").write_text(json.dumps(outcome))
