"""What a rank's machine did beside it, as a table: one row for each look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from powertrain.diagnosis.tables.steps import Floats
from powertrain.trace.machine import samples

SAMPLE = np.dtype(list(samples.FIELDS))


@dataclass(frozen=True)
class Samples:
    """The looks of one rank, in the order of time, no two of the same moment."""

    rank: int
    host: str
    #: Of dtype :data:`SAMPLE`.
    table: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> Floats:
        """A field of every look, as it was recorded."""
        return np.asarray(self.table[name], np.float64)

    def known(self, name: str) -> Floats:
        """A field of every look, NaN where it says nothing: recorded as 0, or as no number."""
        values = self.column(name)
        return np.where(np.isfinite(values) & (values > 0), values, np.nan)

    def flags(self, name: str) -> NDArray[np.int64]:
        """A field of bits of every look."""
        return np.asarray(self.table[name], np.int64)

    def while_training(self) -> Samples:
        """The looks after the rank's first step; all of them where it has made none that was seen."""
        trained = self.table["step"] > 0
        return replace(self, table=self.table[trained]) if trained.any() else self


def samples_of(
    records: Mapping[int, NDArray[np.void]], hosts: Mapping[int, str] | None = None
) -> dict[int, Samples]:
    """Each rank's looks as a table, from its records (of dtype :data:`SAMPLE`, in any order, repeats allowed).

    Looks without a time are left out. ``hosts`` says where ranks ran, "" where it does not.
    """
    hosts = hosts or {}
    return {rank: Samples(rank, hosts.get(rank, ""), _in_order(records[rank])) for rank in sorted(records)}


def _in_order(records: NDArray[np.void]) -> NDArray[np.void]:
    timed: NDArray[np.void] = records[np.isfinite(records["time"])]
    _, first = np.unique(timed["time"], return_index=True)
    return timed[first]


def by_host(samples: Mapping[int, Samples]) -> dict[str, list[Samples]]:
    """The ranks of each host together. Ranks whose host is not known are taken to share one."""
    found: dict[str, list[Samples]] = {}
    for rank in sorted(samples):
        found.setdefault(samples[rank].host, []).append(samples[rank])
    return found
