"""A trial of a sweep: one configuration, and the reports of its run so far.

Values without effects; only :attr:`Trial.checkpoint` looks into the storage.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.errors import TrialFailedError

PENDING = "PENDING"
RUNNING = "RUNNING"
PAUSED = "PAUSED"
TERMINATED = "TERMINATED"
ERROR = "ERROR"
#: Final states of a trial.
ENDED = frozenset({TERMINATED, ERROR})


@dataclass
class MetricHistory:
    """The extremes and averages of one metric, in constant memory."""

    last: float
    maximum: float
    minimum: float
    total: float = 0.0
    count: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    @classmethod
    def of(cls, value: float) -> MetricHistory:
        """Return a history with a first value."""
        history = cls(value, value, value)
        history.add(value)
        return history

    def add(self, value: float) -> None:
        """Add a value. NaN becomes the last value and changes nothing else."""
        self.last = value
        if math.isnan(value):
            return
        self.maximum = value if math.isnan(self.maximum) else max(self.maximum, value)
        self.minimum = value if math.isnan(self.minimum) else min(self.minimum, value)
        self.total += value
        self.count += 1
        self.recent.append(value)

    def value(self, scope: str, mode: str) -> float:
        """Return the number that a scope of ``get_best_result`` compares; NaN if there is none."""
        if scope == "all":
            return self.maximum if mode == "max" else self.minimum
        if scope == "avg":
            return self.total / self.count if self.count else math.nan
        if scope in ("last-5-avg", "last-10-avg"):
            recent = list(self.recent)[-int(scope.split("-")[1]) :]
            return sum(recent) / len(recent) if recent else math.nan
        return self.last


@dataclass
class Trial:
    """One configuration of a sweep.

    Attributes:
        trial_id: Its id, unique in the sweep: "7f3a2_00012".
        number: Its index in order of creation, from 0.
        name: The name of its run, which is the directory below the sweep's.
        config: The configuration that it runs with; PBT may replace it.
        path: The address of its run.
        trainable_name: The name of the function or trainer.
        evaluated_params: Its drawn values, by path: {"a/b": 0.1}.
        status: PENDING, RUNNING, PAUSED, TERMINATED or ERROR.
        iteration: The newest row that it has reported.
        last_result: Its newest report, with "training_iteration", "time_total_s", "trial_id" and "config".
        metrics: The history of each number that it has reported; nested ones as "a/b".
        reason: The reason of its end; "" if it finished by itself.
        was_stopped_early: Whether a scheduler or a stopper ended it.
        starts: Number of starts of its run.
        seconds: Its runtime over all starts.
        num_failures: Number of failures of its run, including those followed by a restart.
    """

    trial_id: str
    number: int
    name: str
    config: dict[str, Any]
    path: str = ""
    trainable_name: str = ""
    evaluated_params: dict[str, Any] = field(default_factory=dict)
    status: str = PENDING
    iteration: int = 0
    last_result: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, MetricHistory] = field(default_factory=dict)
    reason: str = ""
    was_stopped_early: bool = False
    starts: int = 0
    seconds: float = 0.0
    num_failures: int = 0

    @property
    def local_path(self) -> str:
        """The directory of its run."""
        return self.path

    @property
    def logdir(self) -> str:
        """The directory of its run, under Ray's older name."""
        return self.local_path

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint of its run, read from the storage; None if there is none, or its path is unknown."""
        from powertrain.result.result import Result

        return Result(path=self.path, state="running").checkpoint if self.path else None

    @property
    def metric_analysis(self) -> dict[str, dict[str, float]]:
        """The "max", "min", "avg" and "last" value of each metric, and the averages of the last 5 and 10 reports."""
        return {
            name: {
                "max": history.maximum,
                "min": history.minimum,
                **{
                    scope: history.value(scope, "min")
                    for scope in ("avg", "last", "last-5-avg", "last-10-avg")
                },
            }
            for name, history in self.metrics.items()
        }

    def get_error(self) -> TrialFailedError | None:
        """Return the reason of its failure; None if it has not failed."""
        from powertrain.errors import TrialFailedError

        return TrialFailedError(self.reason or f"{self} has failed") if self.status == ERROR else None

    def is_finished(self) -> bool:
        """Return whether it has ended, with success or failure."""
        return self.is_ended

    @property
    def experiment_tag(self) -> str:
        """Its number and drawn values, such as "3_lr=0.1"."""
        drawn = ",".join(
            f"{key.rsplit('/', 1)[-1]}={_short(value)}" for key, value in self.evaluated_params.items()
        )
        return f"{self.number}_{drawn}" if drawn else str(self.number)

    @property
    def is_ended(self) -> bool:
        """True where it has nothing left to do."""
        return self.status in ENDED

    def add_report(self, result: Mapping[str, Any]) -> bool:
        """Add a report. Return False, without a change, for an iteration that was reported before."""
        iteration = int(result["training_iteration"])
        if iteration <= self.iteration:
            return False
        self.iteration, self.last_result = iteration, dict(result)
        for key, value in flat_numbers(result):
            if key in self.metrics:
                self.metrics[key].add(value)
            else:
                self.metrics[key] = MetricHistory.of(value)
        return True

    def __str__(self) -> str:
        return self.name or self.trial_id

    def __hash__(self) -> int:
        return hash(self.trial_id)


#: Entries of a result that identify the trial, and are not metrics.
NOT_METRICS = frozenset(
    {"trial_id", "config", "done", "should_checkpoint", "date", "timestamp", "hostname", "pid"}
)


def flat_numbers(result: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Return the numbers of a report by path, "a/b" for nested ones. True is 1."""
    found = []
    for key, value in result.items():
        if not prefix and key in NOT_METRICS:
            continue
        if isinstance(value, Mapping):
            found += flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, (int, float)):  # also a bool: a metric such as {"solved": True}
            found.append((f"{prefix}{key}", float(value)))
    return found


def flat_values(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return values by path, "a/b" for nested ones, as the columns of ``Result.metrics_dataframe`` are named."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= flat_values(value, f"{prefix}{key}/")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)[:20]
