"""Datasets of Ray's that ranks are fed from: split anew for each attempt, which may have another number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from powertrain.engine.base import ProcessSpec, Slot
from powertrain.engine.ray.feed import end, iterators_of


@dataclass(frozen=True)
class RankStream:
    """A dataset of Ray's by its name; each rank gets a part of it, or all of it."""

    name: str
    dataset: Any
    is_split: bool = True


@dataclass(frozen=True)
class FedProcess:
    """A rank's process that waits for its feeds."""

    id: str
    slot: Slot
    spec: ProcessSpec


class Streams:
    """The streams of a run, for one attempt at a time. The engine's thread only, but for :meth:`gather`."""

    def __init__(self, streams: Sequence[RankStream]) -> None:
        self._streams = tuple(streams)
        self._gathered: list[FedProcess] = []
        self._iterators: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._streams)

    def gather(self, process: FedProcess) -> list[FedProcess]:
        """Keep a process until all ranks of its attempt are there; returns them all then, by rank."""
        self._gathered = [one for one in self._gathered if one.spec.attempt == process.spec.attempt]
        self._gathered.append(process)
        if len(self._gathered) < process.spec.world_size:
            return []
        together, self._gathered = self._gathered, []
        return sorted(together, key=lambda one: one.spec.rank)

    def drop(self, id: str) -> None:
        """Drop a process that waits for the others and will not be started. Guarded as ``gather``."""
        self._gathered = [one for one in self._gathered if one.id != id]

    def begin(self, ranks: Sequence[FedProcess]) -> list[dict[str, Any]]:
        """Return each rank's iterators, by the path of the socket from which it will read them."""
        self.end()
        nodes = [one.slot.node_id for one in ranks]
        feeds: list[dict[str, Any]] = [{} for _ in ranks]
        for stream in self._streams:
            iterators = iterators_of(stream.dataset, nodes, split=stream.is_split)
            self._iterators += iterators
            for feed, one, iterator in zip(feeds, ranks, iterators, strict=True):
                feed[one.spec.feeds[stream.name]] = iterator
        return feeds

    def end(self) -> None:
        """End the attempt's streams and wake readers that still wait for Ray's rows."""
        iterators, self._iterators = self._iterators, []
        end(iterators)
