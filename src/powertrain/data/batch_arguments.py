"""Checks of the arguments that define how rows are cut into batches."""

from __future__ import annotations

from typing import Any

from powertrain.data.arguments import flag, one_of, seed_number, whole
from powertrain.errors import DataError

TAILS = ("partial", "drop", "carry")
#: Larger batches, or more prefetched ones, have the same effect as this many.
LARGEST_BATCH = 2**40


def checked_tail(tail: str | None, drop_last: bool) -> str:
    """Return the handling of rows that do not fill the last step: one of ``TAILS``."""
    drop_last = flag("drop_last", drop_last)
    if tail is None:
        tail = "drop" if drop_last else "partial"
    tail = one_of("tail", tail, TAILS)
    if drop_last and tail != "drop":
        raise DataError(f"drop_last=True and tail={tail!r} contradict each other. Leave one of them out.")
    return tail


def rows_of_rank(batch_size: Any) -> int:
    """Return the rows of one rank's batch."""
    if batch_size is None:
        raise DataError(
            "batch_size=None gives batches of whatever size blocks have, which differs from rank to rank. Give the "
            "rows of one rank as batch_size, or those of all ranks as global_batch_size."
        )
    return whole("batch_size", batch_size, 1)


def one_seed(seed: int | None, local_shuffle_seed: int | None) -> int | None:
    """Return the seed of the order: ``seed``, or Ray Data's ``local_shuffle_seed`` in its place."""
    chosen, local = seed_number("seed", seed), seed_number("local_shuffle_seed", local_shuffle_seed)
    return chosen if chosen is not None else local
