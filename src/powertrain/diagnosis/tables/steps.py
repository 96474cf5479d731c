"""The steps of a run as tables: steps x ranks x phases, aligned by their number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from powertrain.trace.recording import phases

RECORD = np.dtype(list(phases.FIELDS))
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepTable:
    """The steps that every rank of one attempt has recorded, aligned by their number.

    Durations are seconds and were taken on each rank's own clock: they are compared across ranks, the times at which
    something happened are not.
    """

    #: Of each rank, in the order of the columns below.
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    #: Numbers of the steps, ascending; thinned runs have gaps.
    numbers: NDArray[np.int64]
    #: (steps, ranks, phases), on the ranks' own threads.
    phases: Floats
    #: (steps, ranks, phases), on devices; zeros where there are none.
    device: Floats
    #: (steps, ranks): when each began, MiB of device memory, seconds of fetching, flags, samples.
    start: Floats
    memory: Floats
    peak_memory: Floats
    fetch: Floats
    flags: NDArray[np.int64]
    samples: Floats
    tokens: Floats
    #: Number of steps that each row represents: 1 unless older steps were thinned.
    weight: Floats = field(default_factory=lambda: np.zeros(0))

    @property
    def total(self) -> Floats:
        """(steps, ranks): from the end of the step before to the end of this one."""
        return np.asarray(self.phases.sum(axis=2), np.float64)

    def __len__(self) -> int:
        return len(self.numbers)


def aligned(records: Mapping[int, NDArray[np.void]], hosts: Mapping[int, str]) -> StepTable:
    """The steps that all ranks have, from each rank's records (of dtype :data:`RECORD`, in any order, repeats allowed).

    Steps that only some ranks have recorded are left out: they were cut off, or are still to come.
    """
    ranks = tuple(sorted(records))
    by_rank = [_ascending(records[rank]) for rank in ranks]
    common = _common([part["step"] for part in by_rank])
    rows = [part[np.searchsorted(part["step"], common)] for part in by_rank]

    def column(name: str, dtype: type = np.float64) -> NDArray[np.generic]:
        if not rows:
            return np.zeros((0, 0), dtype)
        return np.stack([row[name].astype(dtype) for row in rows], axis=1)

    def floats(name: str) -> Floats:
        return np.asarray(column(name), np.float64)

    shape = (len(common), len(ranks), phases.COUNT)
    return StepTable(
        ranks=ranks,
        hosts=tuple(hosts.get(rank, "") for rank in ranks),
        numbers=common.astype(np.int64),
        phases=floats("phases").reshape(shape),
        device=floats("device").reshape(shape),
        start=floats("start"),
        memory=floats("memory"),
        peak_memory=floats("peak_memory"),
        fetch=floats("fetch"),
        flags=np.asarray(column("flags", np.int64), np.int64),
        samples=floats("samples"),
        tokens=floats("tokens"),
        weight=np.ones(len(common)),
    )


def _ascending(records: NDArray[np.void]) -> NDArray[np.void]:
    """Return records by step, the last of each duplicate."""
    backwards = records[::-1]
    _, first = np.unique(backwards["step"], return_index=True)
    return backwards[first]


def _common(columns: Sequence[NDArray[np.uint32]]) -> NDArray[np.uint32]:
    if not columns:
        return np.zeros(0, np.uint32)
    common = columns[0]
    for column in columns[1:]:
        common = np.intersect1d(common, column, assume_unique=True)
    return common
