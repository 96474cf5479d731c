"""Pure: reported checkpoints that could not be saved, folded from the facts of a run, and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from powertrain.run import events as ev


@dataclass(frozen=True)
class UnsavedCheckpoint:
    """A checkpoint that was reported and is not in storage.

    Attributes:
        row: The number of the report, from 1; the same on every rank.
        name: The name that it was to have; "" where it had none yet.
        reason: Why it could not be saved.
        place: The file system, directory or address that did not take it, or the function that failed.
        attempt: The attempt of the run that reported it.
    """

    row: int
    name: str
    reason: str
    place: str = ""
    attempt: int = 0


def fold(unsaved: tuple[UnsavedCheckpoint, ...], event: ev.Fact) -> tuple[UnsavedCheckpoint, ...]:
    """Return the list after ``event``. An attempt that trains the same rows again reports their checkpoints again."""
    if isinstance(event, ev.CheckpointFailed):
        return (
            *unsaved,
            UnsavedCheckpoint(event.row, event.checkpoint, event.reason, event.place, event.attempt),
        )
    if isinstance(event, ev.AttemptStarted) and unsaved:
        return tuple(one for one in unsaved if one.row < event.first_row)
    return unsaved


def find_newest(unsaved: Sequence[UnsavedCheckpoint]) -> UnsavedCheckpoint | None:
    """Return the one that was reported last; None for an empty list."""
    return max(unsaved, key=lambda one: (one.attempt, one.row), default=None)


def summarize(unsaved: Sequence[UnsavedCheckpoint]) -> str:
    """Return how many were not saved, which, and why; "" for none.

    Where the reasons differ, the one of the newest is given.
    """
    newest = find_newest(unsaved)
    if newest is None:
        return ""
    rows = sorted({one.row for one in unsaved})
    if len(unsaved) == 1:
        return f"1 checkpoint was NOT saved (row {rows[0]}): {newest.reason}"
    shown = ", ".join(map(str, rows[:5])) + (f" to {rows[-1]}" if len(rows) > 5 else "")
    same = len({one.reason for one in unsaved}) == 1
    why = newest.reason if same else f"row {newest.row}: {newest.reason}"
    return f"{len(unsaved)} checkpoints were NOT saved (rows {shown}): {why}"


def error_text(unsaved: Sequence[UnsavedCheckpoint], newest_saved: int) -> str:
    """Return the message of the error for a run whose last reported checkpoint is lost.

    Args:
        unsaved: All that were lost, at least one.
        newest_saved: The row of the newest committed checkpoint; 0 for none.
    """
    newest = find_newest(unsaved)
    assert newest is not None
    kept = (
        f"The newest saved checkpoint is of row {newest_saved}."
        if newest_saved
        else "The run has no saved checkpoint."
    )
    place = f" Place: {newest.place}." if newest.place and newest.place not in newest.reason else ""
    count = len(unsaved) - 1
    earlier = "1 earlier one was" if count == 1 else f"{count} earlier ones were"
    more = f" {earlier} lost, too: see result.unsaved_checkpoints." if count else ""
    return (
        f"Training ended, but its last checkpoint (row {newest.row}) was not saved: {newest.reason.rstrip('.')}."
        f"{place}{more} {kept} Make room or repair the storage and run the same script again: it trains the lost rows "
        'once more. Use CheckpointConfig(on_lost="warn") to get the Result instead of this error.'
    )
