"""The most frequent line of the user's code in each phase, sampled a few times a second by another thread."""

from __future__ import annotations

import os
from collections import Counter

from powertrain.trace.stacks import stacks
from powertrain.wire.values import Where

#: Places remembered for a phase; those seen once and never again go first.
_MOST = 200


class PlaceCounts:
    """Counts the places at which the training thread was found. One thread only."""

    def __init__(self) -> None:
        self._found: dict[str, Counter[str]] = {}
        #: Samples since the newest step ended; those after the last step are not part of the training.
        self._since: list[tuple[str, str]] = []
        self._steps = 0
        self._told: dict[str, str] = {}

    def look(self, phase: str, steps: int) -> None:
        """Note where the training thread is at this moment; its time belongs to ``phase`` now, and it has made so many
        steps. Before the first and after the last of them nothing counts."""
        where = stacks.own_where(stacks.main_frame())
        if where is not None:
            self.note(phase, in_words(where), steps)

    def note(self, phase: str, place: str, steps: int) -> None:
        """It was found there."""
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
        """For each phase the place most often seen in it, if any of them has changed since it was last asked for;
        nothing otherwise."""
        now = {phase: places.most_common(1)[0][0] for phase, places in self._found.items()}
        if now == self._told:
            return {}
        self._told = now
        return dict(now)


def in_words(where: Where) -> str:
    """ "train.py:31 in evaluate", with what it has called, if that is a library's."""
    frame = where.frame
    place = f"{os.path.basename(frame.file)}:{frame.line} in {frame.function}"
    return f"{place}, which calls {where.call}" if where.call else place
