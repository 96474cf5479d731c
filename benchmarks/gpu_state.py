"""State on a GPU: how long its first and its later saves keep the training thread, and how fast a killed rank is back.

A GPT in bf16 with AdamW trains on one GPU. Saves are of 4 GiB, also with FSDP2, every 60 steps from the 60th on, and
once from the 5th on, when the memory for it cannot be ready. Their limit is a copy of the same tensors to pinned memory
in one process. For the recovery a rank with 0.55 GB of state kills itself after a committed save; counted is the time
to the end of its successor's first step, without the user's own set-up (making model and optimizer, as long as in the
first attempt). Its limit, on an H200, is 0.35 s for the CUDA context of a forked process and 0.5 s for NCCL.

    python benchmarks/gpu_state.py [--json FILE] [--check] [--quick]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from harness import Bound, Outcome, Row, conclude, parse_options

sys.path.append(str(Path(__file__).resolve().parent / "gpu_state_scripts"))

from training import train_and_die, train_and_save

from powertrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from powertrain.run.events import StartupMeasured
from powertrain.run.record import journal
from powertrain.storage import open_storage
from powertrain.torch import TorchTrainer

LARGE = {"width": 1024, "layers": 26, "batch": 24}
SMALL = {"width": 512, "layers": 12, "batch": 24}
#: Name, strategy of prepare_model, steps between saves, and saves.
WAYS = (
    ("replicated", "ddp", 60, 4),
    ("FSDP2", "fsdp", 60, 4),
    ("replicated, saved at once", "ddp", 5, 2),
)
REPETITIONS, QUICK_REPETITIONS = 3, 1
RECOVERIES, QUICK_RECOVERIES = 5, 2
FIRST_AT_MOST_SECONDS, RECOVERY_AT_MOST_SECONDS = 0.35, 1.2


def fit(function: Any, name: str, storage: str, **config: Any) -> Any:
    trainer = TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
        run_config=RunConfig(
            name=name,
            storage_path=storage,
            verbose=0,
            report=False,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    return trainer.fit()


def saves_of(strategy: str, every: int, saves: int) -> dict[str, list[float]]:
    """Return the seconds of the saves of one run."""
    with tempfile.TemporaryDirectory(prefix="ptb-", dir="/tmp") as storage:
        result = fit(train_and_save, "saves", storage, strategy=strategy, every=every, saves=saves, **LARGE)
    seconds: dict[str, list[float]] = result.return_value
    return seconds


def recovery() -> dict[str, Any]:
    """Return the seconds of one recovery by part, and the start of the second attempt by phase."""
    with tempfile.TemporaryDirectory(prefix="ptb-", dir="/tmp") as storage:
        config = {"strategy": "ddp", "steps": 60, "saved_at": 30, "dies_at": 50, "diary": f"{storage}/diary"}
        times = fit(train_and_die, "recovery", storage, **config, **SMALL).return_value
        facts = list(journal.read(open_storage(Path(storage, "recovery"))))
    starts = [fact for fact in facts if isinstance(fact, StartupMeasured)]
    set_up = times["made"] - times["entered"]
    return {
        "whole": times["stepped"] - times["killed"],
        "to the function": times["entered"] - times["killed"],
        "set-up": set_up,
        "load": times["loaded"] - times["made"],
        "first step": times["stepped"] - times["loaded"],
        "without set-up": times["stepped"] - times["killed"] - set_up,
        "resumed at": times["resumed_at"],
        "phases": starts[-1].path if starts else {},
    }


def main() -> int:
    options = parse_options(f"{__doc__}")
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    saves: dict[str, list[dict[str, list[float]]]] = {name: [] for name, *_ in WAYS}
    for _ in range(repetitions):
        for name, *way in WAYS:
            saves[name].append(saves_of(*way))
            print(name, [f"{one:.3f}" for one in saves[name][-1]["saves"]], flush=True)
    recoveries = []
    for _ in range(QUICK_RECOVERIES if options.quick else RECOVERIES):
        recoveries.append(recovery())
        print(recoveries[-1], flush=True)
    rows, bounds = [], []
    for name, runs in saves.items():
        size = f"{runs[0]['bytes'][0] / 2**30:.1f} GiB, {name}"
        copies = [median(run["copies"]) for run in runs]
        first = [run["saves"][0] for run in runs]
        rows.append(Row(f"{size}: first save", "Powertrain", "s", first))
        rows.append(
            Row(f"{size}: later saves", "Powertrain", "s", [median(run["saves"][1:]) for run in runs])
        )
        rows.append(Row(f"{size}: copies to pinned memory", "torch", "s", copies, limit="is the limit"))
        rows.append(Row(f"{size}: step, median", "Powertrain", "s", [median(run["steps"]) for run in runs]))
        if "at once" not in name:
            bounds.append(Bound(f"{size}: first save, seconds", max(first), at_most=FIRST_AT_MOST_SECONDS))
    for part in ("whole", "to the function", "set-up", "load", "first step", "without set-up"):
        rows.append(
            Row(f"SIGKILL to the next step: {part}", "Powertrain", "s", [one[part] for one in recoveries])
        )
    took = median(one["without set-up"] for one in recoveries)
    bounds.append(Bound("recovery without set-up, seconds", took, at_most=RECOVERY_AT_MOST_SECONDS))
    samples = {"saves": saves, "recoveries": recoveries}
    outcome = Outcome("State on a GPU", repetitions, rows, bounds, samples=samples)
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
