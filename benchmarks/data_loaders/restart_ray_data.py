"""4 -> 3 -> 8 ranks with Ray Data's streaming_split: python restart_ray_data.py REQUEST

It has no state to save: after each restart the epoch starts over. Each world is a separate Ray, and its ranks are
threads, because streaming_split returns no rows before all of its ranks request them.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from restarting import BATCH_SIZE, BATCHES_BEFORE_A_STOP, WORLD_SIZES, Ids, Request, write_restarts


def ids_of_rank(part: Any, batches: int | None) -> list[Ids]:
    taken = itertools.islice(part.iter_torch_batches(batch_size=BATCH_SIZE), batches)
    return [batch["id"].numpy() for batch in taken]


def ids_of_world(directory: str, world_size: int) -> list[Ids]:
    """Return the ids of one world; equal=True as in Ray Train."""
    batches = None if world_size == WORLD_SIZES[-1] else BATCHES_BEFORE_A_STOP
    rows = ray.data.read_parquet(directory, columns=["id"]).random_shuffle(seed=0)
    parts = rows.streaming_split(world_size, equal=True)
    with ThreadPoolExecutor(world_size) as pool:
        taken = list(pool.map(lambda part: ids_of_rank(part, batches), parts))
    return [ids for rank in taken for ids in rank]


def main() -> None:
    request = Request.from_command_line()
    seen: list[Ids] = []
    for world_size in WORLD_SIZES:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            logging_level=logging.WARNING,
            _temp_dir=tempfile.gettempdir(),
        )
        ray.data.DataContext.get_current().enable_progress_bars = False
        seen += ids_of_world(request.directory, world_size)
        ray.shutdown()
    write_restarts(request, seen)


if __name__ == "__main__":
    main()
