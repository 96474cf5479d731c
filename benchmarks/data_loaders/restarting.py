"""Common parts of the restart programs: an epoch begun by 4 ranks, continued by 3, and ended by 8.

Each rank saves its state when it stops. If the numbers of states and new ranks differ, a new rank takes the state of
its own rank modulo their number, like a script that loads the checkpoint file of its rank.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

WORLD_SIZES = (4, 3, 8)
#: Batches of each rank before it is stopped; the last world continues to the end of the epoch.
BATCHES_BEFORE_A_STOP = 40
BATCH_SIZE = 100
#: Number of rows: a third is consumed at the first stop, more than half at the second; divisible by 3, 4 and 8.
ROWS = 48_000

Ids = npt.NDArray[np.int64]


class Rank(Protocol):
    """One rank's loader."""

    def take(self, batches: int | None) -> Sequence[Ids]:
        """Return the ids of the next batches, or of all remaining ones."""

    def state(self) -> Any:
        """Return the state for a restart."""


#: Opens the loader of a rank in a world of a size, from a state of an earlier world or from the beginning.
OpenRank = Callable[[int, int, Any], Rank]


@dataclass(frozen=True)
class Request:
    """The directory of the rows, and the output path of the :class:`Restarts`."""

    directory: str
    output: str

    def as_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_command_line(cls) -> Request:
        return cls(**json.loads(sys.argv[1]))


@dataclass(frozen=True)
class Restarts:
    """Missing rows, and the number of duplicated ones."""

    lost: int
    twice: int


def state_of(rank: int, states: Sequence[Any]) -> Any:
    """Return the saved state for a new rank."""
    return states[rank % len(states)] if states else None


def restart(open_rank: OpenRank) -> list[Ids]:
    """Return the ids of all batches of all worlds."""
    seen: list[Ids] = []
    states: list[Any] = []
    for world_size in WORLD_SIZES:
        ranks = [open_rank(rank, world_size, state_of(rank, states)) for rank in range(world_size)]
        batches = None if world_size == WORLD_SIZES[-1] else BATCHES_BEFORE_A_STOP
        for rank in ranks:
            seen += rank.take(batches)
        states = [rank.state() for rank in ranks]
    return seen


def write_restarts(request: Request, seen: Sequence[Ids]) -> None:
    """Count the rows and write the :class:`Restarts`."""
    came = np.bincount(np.concatenate(seen), minlength=ROWS)
    restarts = Restarts(int((came == 0).sum()), int((came - 1).clip(min=0).sum()))
    Path(request.output).write_text(json.dumps(asdict(restarts)))
