"""A fit on a thread of its own, for stories in which the test does something to a run while it goes on.

The training function must be one that ends when it is told "enough", such as those of ``drivers/clustered.py``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import story

from powertrain.run import events as ev


class Going:
    """A fit on a thread, and what becomes of it."""

    def __init__(self, trainer: Any) -> None:
        self.outcome: dict[str, Any] = {}
        self.thread = threading.Thread(target=self._fit, args=(trainer,))

    def _fit(self, trainer: Any) -> None:
        self.outcome = story.outcome_of(trainer.fit)

    def fact(self, fits: Any, name: str, kind: type[Any], **fields: Any) -> Any:
        """Wait for a fact of the run; fails when the run has ended without it."""
        return self._wait(
            fits,
            name,
            lambda fact: isinstance(fact, kind) and all(getattr(fact, n) == v for n, v in fields.items()),
            f"{kind.__name__} {fields}",
        )

    def trains_on(self, fits: Any, name: str, workers: int, *, after: int) -> None:
        """Wait until an attempt later than ``after`` trains with that many workers."""
        started = self._wait(
            fits,
            name,
            lambda fact: (
                isinstance(fact, ev.AttemptStarted) and fact.attempt > after and fact.world_size == workers
            ),
            f"attempt after {after} with {workers} workers",
        )
        self.fact(fits, name, ev.TrainingStarted, attempt=started.attempt)

    def _wait(self, fits: Any, name: str, is_wanted: Callable[[Any], bool], wanted: str) -> Any:
        deadline = time.monotonic() + story.PATIENCE
        while True:
            over = not self.thread.is_alive()
            for fact in fits.facts(name):
                if is_wanted(fact):
                    return fact
            assert not over, f"the run ended before {wanted}: {self.outcome}"
            assert time.monotonic() < deadline, f"there was no {wanted}: {fits.facts(name)}"
            time.sleep(0.05)


@contextlib.contextmanager
def going(trainer: Any) -> Iterator[Going]:
    """Fit while the block runs; at its end the training function is asked to finish."""
    run = Going(trainer)
    run.thread.start()
    try:
        yield run
    finally:
        story.tell("enough")
        run.thread.join(story.PATIENCE)
    assert not run.thread.is_alive(), "the run does not end"


def all_of(fits: Any, name: str, kind: type[Any]) -> list[Any]:
    return [fact for fact in fits.facts(name) if isinstance(fact, kind)]


def sizes(fits: Any, name: str) -> list[int]:
    """World size of each attempt."""
    return [fact.world_size for fact in all_of(fits, name, ev.AttemptStarted)]


def changes_of_size(fits: Any, name: str) -> list[int]:
    """World sizes in turn, an attempt with the size of the one before left out.

    A node may come late: whether the run restarts with what it has before is the cluster's speed, not the run's
    behaviour.
    """
    return [size for size, _ in itertools.groupby(sizes(fits, name))]


def places(directory: Path, attempt: int, workers: int) -> list[dict[str, Any]]:
    """What each rank of an attempt recorded of itself."""
    names = [f"place-{attempt}-{rank}" for rank in range(workers)]
    story.await_told(*names)
    return [json.loads((directory / name).read_text()) for name in names]
