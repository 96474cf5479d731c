"""4 -> 3 -> 8 ranks with Hugging Face datasets: python restart_hugging_face.py REQUEST KIND

KIND is "sampler": torchdata's StatefulDataLoader with its StatefulDistributedSampler; or "stream": an iterable dataset,
shuffled, split by node, whose own state_dict() is saved.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from restarting import BATCH_SIZE, Ids, Rank, Request, restart, write_restarts
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

# Before anything of datasets: it says where datasets may write.
import with_hugging_face  # isort: skip  # noqa: F401

import datasets
from datasets.distributed import split_dataset_by_node

#: With several, a state of one number of ranks cannot be loaded at another: an IndexError. With one, each rank takes
#: every n-th row.
SHARDS = 1
SHUFFLE_BUFFER = 1000


class SamplerRank:
    """A StatefulDataLoader with a distributed sampler."""

    def __init__(self, rows: Any, rank: int, world_size: int, state: Any) -> None:
        sampler = StatefulDistributedSampler(rows, num_replicas=world_size, rank=rank, shuffle=True, seed=0)
        self._loader = StatefulDataLoader(rows, batch_size=BATCH_SIZE, sampler=sampler)
        if state is not None:
            self._loader.load_state_dict(state)

    def take(self, batches: int | None) -> Sequence[Ids]:
        return [batch["id"].numpy() for batch in itertools.islice(self._loader, batches)]

    def state(self) -> Any:
        return self._loader.state_dict()


class StreamRank:
    """This node's part of an iterable dataset."""

    def __init__(self, rows: Any, rank: int, world_size: int, state: Any) -> None:
        stream = rows.to_iterable_dataset(num_shards=SHARDS).shuffle(seed=0, buffer_size=SHUFFLE_BUFFER)
        self._part = split_dataset_by_node(stream, rank, world_size)
        if state is not None:
            self._part.load_state_dict(state)

    def take(self, batches: int | None) -> Sequence[Ids]:
        rows = itertools.islice(self._part, None if batches is None else batches * BATCH_SIZE)
        return [np.array([int(row["id"]) for row in rows], np.int64)]

    def state(self) -> Any:
        return self._part.state_dict()


KINDS: dict[str, Callable[[Any, int, int, Any], Rank]] = {"sampler": SamplerRank, "stream": StreamRank}


def main() -> None:
    request = Request.from_command_line()
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_dir=request.directory, split="train", columns=["id"])
    rows = rows.with_format("torch")
    kind = KINDS[sys.argv[2]]
    write_restarts(request, restart(lambda rank, size, state: kind(rows, rank, size, state)))


if __name__ == "__main__":
    main()
