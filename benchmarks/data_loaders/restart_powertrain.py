"""4 -> 3 -> 8 ranks with powertrain.data: python restart_powertrain.py REQUEST"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from typing import Any

from restarting import BATCH_SIZE, Ids, Request, restart, write_restarts

import powertrain.data
from powertrain.config.data import DataConfig
from powertrain.data.plan.prepare import prepare
from powertrain.data.plan.prepared import Prepared
from powertrain.data.shard import DataShard

DISK_BYTES = MEMORY_BYTES = 256 * 2**20


class ShardRank:
    """A rank's shard, as returned by get_dataset_shard()."""

    def __init__(self, prepared: Prepared, cache: str, rank: int, world_size: int, state: Any) -> None:
        self._shard = DataShard(
            prepared,
            rank=rank,
            world_size=world_size,
            local_world_size=world_size,
            cache_directory=cache,
            disk_bytes=DISK_BYTES,
            memory_bytes=MEMORY_BYTES,
            resume=lambda: state,
        )
        self._batches = iter(self._shard.iter_torch_batches(batch_size=BATCH_SIZE))

    def take(self, batches: int | None) -> Sequence[Ids]:
        taken = itertools.islice(self._batches, batches)
        # A rank without rows gets one of weight 0 that only keeps it in step: not a row of the epoch.
        return [batch["id"].numpy() for batch in taken if self._shard.weight > 0]

    def state(self) -> Any:
        """Return the state; this rank ends afterwards."""
        state = self._shard.state_dict()
        self._shard.close()
        return state


def main() -> None:
    request = Request.from_command_line()
    rows = powertrain.data.read_parquet(request.directory, columns=["id"]).random_shuffle(seed=0)
    with tempfile.TemporaryDirectory() as cache:
        prepared = prepare({"train": rows}, DataConfig(), 0, cache)["train"]
        seen = restart(lambda rank, size, state: ShardRank(prepared, cache, rank, size, state))
    write_restarts(request, seen)


if __name__ == "__main__":
    main()
