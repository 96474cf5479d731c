"""Iterations over a dataset that are abandoned before their end: which of them count, and when to warn."""

from __future__ import annotations

from collections.abc import Callable, Hashable


def is_peek(requested: int) -> bool:
    """Return True for an iteration abandoned before its second batch was requested.

    It only inspected the data, as ``next(iter(batches))`` does, and is not an epoch: the next iteration begins where
    this one began.
    """
    return requested < 2


class EarlyEnds:
    """Tracks the abandoned iterations over one dataset, and warns once of each kind that loses rows."""

    def __init__(self, name: str, warn: Callable[[str], None], how_to_peek: str) -> None:
        """``how_to_peek`` is the code that shows one batch, for the warning."""
        self._name, self._warn, self._how_to_look = name, warn, how_to_peek
        #: Position at which the newest look began.
        self._peeked_at: Hashable = None
        self._unread = ""
        self._has_warned_of_looks = self._has_warned_of_rest = False

    def note_peek(self, start: Hashable) -> None:
        """Record an iteration from ``start`` that was abandoned before its second batch was requested."""
        is_repeated, self._peeked_at = start == self._peeked_at, start
        if is_repeated and not self._has_warned_of_looks:
            self._has_warned_of_looks = True
            self._warn(
                f"Two iterations in a row over the dataset {self._name!r} were given up before their second batch, so "
                "both gave the same first batch: such a look does not move on. Keep one iterator to get one batch "
                f"after the other (batches = iter(...), then next(batches)); to look at a batch, {self._how_to_look}."
            )

    def note_rest(self, epoch: int, read: str) -> None:
        """Record an iteration abandoned in ``epoch`` with batches left. ``read`` says how far it came."""
        self._unread = f"in epoch {epoch} after {read}"

    def forget(self) -> None:
        """Forget abandoned iterations: the caller has set the position, so they were intended."""
        self._unread, self._peeked_at = "", None

    def begin(self, epoch: int) -> None:
        """Record that another iteration begins, and warn where the one before it left rows unread."""
        unread, self._unread = self._unread, ""
        if unread and not self._has_warned_of_rest:
            self._has_warned_of_rest = True
            self._warn(
                f"An iteration over the dataset {self._name!r} was given up {unread}, and the next one begins epoch "
                f"{epoch}: the rows between are not read. Read each epoch to its end, and look at a batch with "
                f"{self._how_to_look}. This warning comes once."
            )
