"""Iterations over a dataset that are given up before their end: which of them count, and when to warn."""

from __future__ import annotations

from collections.abc import Callable, Hashable


def is_look(requested: int) -> bool:
    """True for an iteration given up before its second batch was requested.

    It was a look at the data, such as ``next(iter(batches))``, and not an epoch: the next iteration begins where this
    one began.
    """
    return requested < 2


class EarlyEnds:
    """Remembers the iterations over one dataset that were given up, and warns once of each kind that loses rows."""

    def __init__(self, name: str, warn: Callable[[str], None], how_to_look: str) -> None:
        """``how_to_look`` is what to write in order to look at one batch."""
        self._name, self._warn, self._how_to_look = name, warn, how_to_look
        #: Where the newest look began.
        self._looked_at: Hashable = None
        self._unread = ""
        self._has_warned_of_looks = self._has_warned_of_rest = False

    def note_look(self, start: Hashable) -> None:
        """An iteration that began at ``start`` was given up before its second batch was requested."""
        is_repeated, self._looked_at = start == self._looked_at, start
        if is_repeated and not self._has_warned_of_looks:
            self._has_warned_of_looks = True
            self._warn(
                f"Two iterations in a row over the dataset {self._name!r} were given up before their second batch, so "
                "both gave the same first batch: such a look does not move on. Keep one iterator to get one batch "
                f"after the other (batches = iter(...), then next(batches)); to look at a batch, {self._how_to_look}."
            )

    def note_rest(self, epoch: int, read: str) -> None:
        """An iteration was given up in ``epoch`` with batches left. ``read`` says how far it came."""
        self._unread = f"in epoch {epoch} after {read}"

    def forget(self) -> None:
        """The caller has set the position: what was given up before is as it was meant."""
        self._unread, self._looked_at = "", None

    def begin(self, epoch: int) -> None:
        """Another iteration begins: warn where the one before it left rows unread."""
        unread, self._unread = self._unread, ""
        if unread and not self._has_warned_of_rest:
            self._has_warned_of_rest = True
            self._warn(
                f"An iteration over the dataset {self._name!r} was given up {unread}, and the next one begins epoch "
                f"{epoch}: the rows between are not read. Read each epoch to its end, and look at a batch with "
                f"{self._how_to_look}. This warning comes once."
            )
