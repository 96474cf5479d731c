"""The most frequent line of the user's code in each phase, sampled a few times a second by another thread."""

from __future__ import annotations

import os
from collections import Counter

from powertrain.trace.stacks import stacks
from powertrain.wire.values import Where

#: Maximum number of places per phase; places seen only once are dropped first.
_MOST = 200


class PlaceCounts:
    """Count the places at which the training thread was sampled. One thread only."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[str]] = {}
        #: Samples since the newest step ended; those after the last step are not part of the training.
        self._since: list[tuple[str, str]] = []
        self._steps = 0
        self._last_sent: dict[str, str] = {}

    def look(self, phase: str, steps: int) -> None:
        """Sample the training thread's location, with its current ``phase`` and number of steps.

        Samples before the first and after the last step do not count.
        """
        where = stacks.own_where(stacks.main_frame())
        if where is not None:
            self.note(phase, in_words(where), steps)

    def note(self, phase: str, place: str, steps: int) -> None:
        """Count one sample at a place."""
        if steps > self._steps:
            self._steps = steps
            for seen in self._since:
                self._count(*seen)
            self._since.clear()
        if steps and len(self._since) < _MOST:
            self._since.append((phase, place))

    def _count(self, phase: str, place: str) -> None:
        places = self._found.setdefault(phase, Counter())
        places[place] += 1
        if len(places) > _MOST:
            self._found[phase] = Counter(dict(places.most_common(_MOST // 2)))

    def news(self) -> dict[str, str]:
        """Return the most frequent place of each phase if any has changed since the last call; else nothing."""
        now = {phase: places.most_common(1)[0][0] for phase, places in self._found.items()}
        if now == self._last_sent:
            return {}
        self._last_sent = now
        return dict(now)


def in_words(where: Where) -> str:
    """Format a place as "train.py:31 in evaluate", with the library function it has called, if any."""
    frame = where.frame
    place = f"{os.path.basename(frame.file)}:{frame.line} in {frame.function}"
    return f"{place}, which calls {where.call}" if where.call else place
