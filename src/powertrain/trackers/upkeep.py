"""Trackers of a run that is over, or was cut off, brought up to date from its directory alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from powertrain.errors import PowertrainError, StorageError
from powertrain.run import events as ev
from powertrain.run.lifecycle import ENDED
from powertrain.run.record import journal
from powertrain.run.record import run_json as run_record
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.trackers import cursor
from powertrain.trackers.base import RunEnding, TrackedRun, Tracker
from powertrain.trackers.choosing import chosen, kept
from powertrain.trackers.following import describe_run, ending_of
from powertrain.trackers.process import sending_alone
from powertrain.trackers.sending import Sender


def bring_up_to_date(storage: Storage, names: Sequence[str], command: str) -> Iterator[tuple[str, bool]]:
    """Send missing points to trackers; yield a line for each, and whether it is complete now.

    Args:
        storage: That of the run.
        names: Trackers in place of those that the run was started with; they take settings from the environment.
        command: What is to be used again for a tracker that refuses.

    Raises:
        StorageError: The run has no trackers, or another process is sending its points.
        ConfigError: A tracker cannot be used.
    """
    with sending_alone(storage, wait=False) as is_alone:
        if not is_alone:
            raise StorageError(
                f"Another process is sending the points of the run at {without_secrets(storage.uri)!r} to its "
                "trackers. Wait until it has ended."
            )
        trackers, run = _trackers_of(storage, names)
        ending = _ending(storage)
        for tracker in trackers:
            yield _send_all(tracker, storage, run, ending, command)


def _send_all(
    tracker: Tracker, storage: Storage, run: TrackedRun, ending: RunEnding | None, command: str
) -> tuple[str, bool]:
    sender = Sender(tracker, storage, run, lambda _: None)
    sender.end(ending, float("inf"))
    unsent = sender.follow()
    if unsent is not None:
        return unsent.sentence(command), False
    row = (cursor.read(storage, tracker.name) or cursor.new()).row
    return f"{tracker.name}: up to date, at row {row:,}", True


def _trackers_of(storage: Storage, names: Sequence[str]) -> tuple[list[Tracker], TrackedRun]:
    if not names:
        return kept(storage)
    inside = storage.local_path("x")
    trackers = chosen(names, str(inside.parent) if inside is not None else "")
    try:
        return trackers, kept(storage)[1]
    except StorageError:  # started without trackers, or by another user: its config is not known then
        return trackers, _described(storage)


def _described(storage: Storage) -> TrackedRun:
    try:
        record = run_record.read(storage)
    except (OSError, PowertrainError):
        record = {}
    starts = [fact for fact in journal.read(storage) if isinstance(fact, ev.RunStarted)]
    record = {"name": starts[0].name if starts else "", **record}
    return describe_run(storage, record, starts[0].time if starts else 0.0, None)


def _ending(storage: Storage) -> RunEnding | None:
    """Return how the run ended; None for one that was cut off, and may be continued."""
    state = journal.replay(journal.read(storage))
    return ending_of(storage, state.state, state.reason) if state.state in ENDED else None
