"""How many workers to start. Pure."""

from __future__ import annotations

from collections.abc import Iterator


def sizes_to_try(min_workers: int, max_workers: int) -> Iterator[int]:
    """World sizes in the order of preference: as many as allowed, down to the fewest."""
    return iter(range(max_workers, min_workers - 1, -1))
