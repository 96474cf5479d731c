"""A fit on a thread of its own, for stories in which the test does something to a run while it goes on.

The training function must be one that ends when it is told "enough", such as those of ``drivers/clustered.py``.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
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
        deadline = time.monotonic() + story.PATIENCE
        while True:
            over = not self.thread.is_alive()
            for fact in fits.facts(name):
                if isinstance(fact, kind) and all(getattr(fact, n) == v for n, v in fields.items()):
                    return fact
            assert not over, f"the run ended before {kind.__name__} {fields}: {self.outcome}"
            assert time.monotonic() < deadline, f"there was no {kind.__name__} {fields}: {fits.facts(name)}"
            time.sleep(0.05)


@contextlib.contextmanager
def going(trainer: Any) -> Iterator[Going]:
    """Fit while the block runs; at its end the training function is told that it is enough."""
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
    return [fact.world_size for fact in all_of(fits, name, ev.AttemptStarted)]


def places(directory: Path, attempt: int, workers: int) -> list[dict[str, Any]]:
    """What each rank of an attempt told of itself."""
    names = [f"place-{attempt}-{rank}" for rank in range(workers)]
    story.await_told(*names)
    return [json.loads((directory / name).read_text()) for name in names]
