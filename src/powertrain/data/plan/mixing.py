"""The order of a mixture: rows of several components interleaved by weight. Pure.

Row j of component i has the time (j + 1/2) / weight; the mixture is the rows of all components in the order of their
times. So in every stretch of the mixture each component has its share, as long as it has rows, and the component and
row of a slot follow from weights and numbers of rows alone: positions, world sizes and readers play no part. Within a
component rows come in its own order, shuffled anew for each epoch or not.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from powertrain.data.plan.order import LANES, EpochOrder, Ints, Located, Shuffle

#: Slots that are resolved together, and the number of such windows kept.
_WINDOW = 4096
_KEPT_WINDOWS = 8
#: Ends of a mixture: when the shortest component is exhausted, or the longest.
SHORTEST, LONGEST = "stop_on_shortest", "stop_on_longest_drop"


@dataclass(frozen=True)
class Mixture:
    """How the parts of a plan are mixed."""

    #: The component of each part of the plan.
    component_of_part: tuple[int, ...]
    #: One for each component, above 0.
    weights: tuple[float, ...]
    #: SHORTEST or LONGEST.
    stop: str = LONGEST
    #: Whether the rows of each component are shuffled, and its own seed.
    shuffled: tuple[bool, ...] = ()
    seeds: tuple[int | None, ...] = ()

    def describe(self) -> str:
        """Return everything that the order of rows depends on, for the fingerprint."""
        return f"{self.component_of_part}/{self.weights!r}/{self.stop}/{self.shuffled}/{self.seeds}"

    def rows(self, rows_of_part: Sequence[int]) -> tuple[int, ...]:
        """Return the rows of each component in the mixture, given those of the parts."""
        counts = [0] * len(self.weights)
        for part, rows in enumerate(rows_of_part):
            counts[self.component_of_part[part]] += rows
        return shortened_counts(counts, self.weights) if self.stop == SHORTEST else tuple(counts)


def shortened_counts(counts: Sequence[int], weights: Sequence[float]) -> tuple[int, ...]:
    """Return the rows of each component up to the last row of the one that is exhausted first."""
    if not all(counts):
        return (0,) * len(counts)
    ends = [
        ((count - 0.5) / weight, number)
        for number, (count, weight) in enumerate(zip(counts, weights, strict=True))
    ]
    end, first = min(ends)
    found = [
        int(_rows_until(np.array([end]), weight, count, number <= first)[0])
        for number, (count, weight) in enumerate(zip(counts, weights, strict=True))
    ]
    return tuple(found)


def _times(rows: npt.NDArray[np.int64], weight: float) -> npt.NDArray[np.float64]:
    return ((rows + 0.5) / weight).astype(np.float64, copy=False)


def _rows_until(times: npt.NDArray[np.float64], weight: float, count: int, inclusive: bool) -> Ints:
    """Return how many rows of a component come before each time, and at it where ``inclusive``."""
    found = np.clip(np.floor(times * weight + 0.5), 0, count).astype(np.int64)
    for _ in range(3):  # the estimate is off by at most one row, by rounding
        here = _times(found, weight)
        later = (found < count) & ((here <= times) if inclusive else (here < times))
        before = _times(found - 1, weight)
        earlier = (found > 0) & ((before > times) if inclusive else (before >= times))
        found = found + later - earlier
    return found


class Interleaving:
    """The mapping between slots of a mixture and rows of its components."""

    def __init__(self, counts: Sequence[int], weights: Sequence[float]) -> None:
        self.counts, self.weights = tuple(counts), tuple(weights)
        self.rows = sum(self.counts)
        self._windows: OrderedDict[int, tuple[Ints, Ints]] = OrderedDict()
        self._looking_up = threading.Lock()
        ends = sorted(range(len(counts)), key=lambda number: self.counts[number] / self.weights[number])
        #: Time at which each component ends, in order, and the slots up to there; linear in between.
        self._breaks = [0.0]
        self._slots_at_breaks = [0.0]
        # Added up from the last one: subtracting from their sum would leave nothing of a small weight.
        rates = np.cumsum([self.weights[number] for number in reversed(ends)])[::-1].tolist()
        for number, rate in zip(ends, rates, strict=True):
            end = self.counts[number] / self.weights[number]
            self._slots_at_breaks.append(self._slots_at_breaks[-1] + (end - self._breaks[-1]) * rate)
            self._breaks.append(end)

    def components(self, slots: Ints) -> tuple[Ints, Ints]:
        """Return the component of each slot, and the number of the row within its component."""
        component, row = np.empty_like(slots), np.empty_like(slots)
        windows = slots // _WINDOW
        for window in np.unique(windows).tolist():
            mine = windows == window
            found = self._window(window)
            at = slots[mine] - window * _WINDOW
            component[mine], row[mine] = found[0][at], found[1][at]
        return component, row

    def slots(self, component: int, rows: Ints) -> Ints:
        """Return the slots of some rows of a component."""
        times = _times(rows, self.weights[component])
        found = rows.copy()
        for other, (count, weight) in enumerate(zip(self.counts, self.weights, strict=True)):
            if other != component:
                found += _rows_until(times, weight, count, other < component)
        return found

    def _window(self, window: int) -> tuple[Ints, Ints]:
        with self._looking_up:
            found = self._windows.get(window)
            if found is None:
                found = self._resolved(window * _WINDOW, min((window + 1) * _WINDOW, self.rows))
                self._windows[window] = found
                while len(self._windows) > _KEPT_WINDOWS:
                    self._windows.popitem(last=False)
            else:
                self._windows.move_to_end(window)
            return found

    def _resolved(self, start: int, stop: int) -> tuple[Ints, Ints]:
        """Return component and row of each slot from ``start`` to ``stop``: they are among the rows around that
        time."""
        margin = (
            len(self.counts) + 2
        )  # slots and times agree but for a row of each component, and for rounding
        while True:
            component, row = np.full(stop - start, -1, np.int64), np.zeros(stop - start, np.int64)
            low, high = np.interp(
                [start - margin, stop + margin], self._slots_at_breaks, self._breaks
            ).tolist()
            for number, (count, weight) in enumerate(zip(self.counts, self.weights, strict=True)):
                mine = np.arange(
                    max(0, int(low * weight) - 2), min(count, int(high * weight) + 3), dtype=np.int64
                )
                at = self.slots(number, mine) - start
                inside = (at >= 0) & (at < stop - start)
                component[at[inside]], row[at[inside]] = number, mine[inside]
            if (component >= 0).all():
                return component, row
            assert margin <= self.rows, (
                f"slots {start} to {stop} of {self.counts} by {self.weights} have no rows"
            )
            margin *= 8


class MixedOrder(EpochOrder):
    """The mapping from the slots of one epoch of a mixture to rows."""

    def __init__(
        self,
        mixture: Mixture,
        parts: Ints,
        block_rows: Ints,
        shuffles: Sequence[Shuffle],
        *,
        seed: int,
        epoch: int,
        lanes: int = LANES,
    ) -> None:
        """``parts`` is the part of each block, ``shuffles`` the shuffle of each component."""
        self.seed, self.epoch, self.shuffle = seed, epoch, "mix"
        owners = np.asarray(mixture.component_of_part, np.int64)[parts] if len(parts) else parts
        rows_of_part = [
            int(block_rows[parts == part].sum()) for part in range(len(mixture.component_of_part))
        ]
        counts = mixture.rows(rows_of_part)
        self.rows = sum(counts)
        self._interleaving = Interleaving(counts, mixture.weights)
        #: Blocks of each component, and its own order.
        self._numbers = [np.flatnonzero(owners == number) for number in range(len(counts))]
        self._orders = [
            EpochOrder(
                block_rows[numbers],
                seed=_seed_of(seed, number, mixture.seeds[number]),
                epoch=epoch,
                shuffle=shuffle,
                lanes=max(1, lanes // len(counts)),
            )
            for number, (numbers, shuffle) in enumerate(zip(self._numbers, shuffles, strict=True))
        ]
        self.lanes = sum(order.lanes for order in self._orders)

    def locate(self, slots: Ints) -> Located:
        """Return the location of the rows of these slots; any slots, in any order. Any thread."""
        found = Located(np.empty_like(slots), np.empty_like(slots))
        components, rows = self._interleaving.components(slots)
        for number in np.unique(components).tolist():
            mine = components == number
            located = self._orders[number].locate(rows[mine])
            found.blocks[mine] = self._numbers[number][located.blocks]
            found.offsets[mine] = located.offsets
        return found

    def chunks(self, slots: Ints, size: int) -> Ints:
        """Return the first slot of the chunk of each slot: neighbours within one component."""
        found = np.empty_like(slots)
        components, rows = self._interleaving.components(slots)
        for number in np.unique(components).tolist():
            mine = components == number
            found[mine] = self._interleaving.slots(number, self._orders[number].chunks(rows[mine], size))
        return found

    def chunk(self, slot: int, size: int) -> Ints:
        """Return all slots of the chunk of ``slot`` that belong to the mixture, in order."""
        components, rows = self._interleaving.components(np.array([slot], np.int64))
        number = int(components[0])
        members = self._orders[number].chunk(int(rows[0]), size)
        inside = members[members < self._interleaving.counts[number]]
        return self._interleaving.slots(number, inside)

    def step(self, start: int, stop: int) -> Ints:
        """Return the slots from ``start`` to ``stop``: in order, so that every rank gets a mixture."""
        return np.arange(start, min(stop, self.rows), dtype=np.int64)


def _seed_of(seed: int, component: int, own: int | None) -> int:
    """Return the seed of a component: two components of the same data are shuffled differently."""
    digest = hashlib.blake2b(
        f"{seed}/{component}/{own}".encode(), digest_size=8, person=b"powertrain.mix"
    ).digest()
    return int.from_bytes(digest, "little") >> 11
