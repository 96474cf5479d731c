"""Samples of a rank's machine as a table, one row for each sample."""

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
    """The samples of one rank, in the order of time, no two of the same moment."""

    rank: int
    host: str
    #: An array of dtype :data:`SAMPLE`.
    table: NDArray[np.void]

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> Floats:
        """Return a field of every sample, as recorded."""
        return np.asarray(self.table[name], np.float64)

    def known(self, name: str) -> Floats:
        """Return a field of every sample, with NaN for unknown values: recorded as 0, or not finite."""
        values = self.column(name)
        return np.where(np.isfinite(values) & (values > 0), values, np.nan)

    def flags(self, name: str) -> NDArray[np.int64]:
        """Return a field of bits of every sample."""
        return np.asarray(self.table[name], np.int64)

    def while_training(self) -> Samples:
        """Return the samples after the rank's first step; all of them if it has no step."""
        trained = self.table["step"] > 0
        return replace(self, table=self.table[trained]) if trained.any() else self


def samples_of(
    records: Mapping[int, NDArray[np.void]], hosts: Mapping[int, str] | None = None
) -> dict[int, Samples]:
    """Return each rank's samples as a table, from its records (of dtype :data:`SAMPLE`, in any order, repeats allowed).

    Samples without a time are left out. ``hosts`` has the hosts of ranks, if known.
    """
    hosts = hosts or {}
    return {rank: Samples(rank, hosts.get(rank, ""), _in_order(records[rank])) for rank in sorted(records)}


def _in_order(records: NDArray[np.void]) -> NDArray[np.void]:
    timed: NDArray[np.void] = records[np.isfinite(records["time"])]
    _, first = np.unique(timed["time"], return_index=True)
    return timed[first]


def by_host(samples: Mapping[int, Samples]) -> dict[str, list[Samples]]:
    """Return the ranks by host. Ranks of unknown hosts share one."""
    found: dict[str, list[Samples]] = {}
    for rank in sorted(samples):
        found.setdefault(samples[rank].host, []).append(samples[rank])
    return found
