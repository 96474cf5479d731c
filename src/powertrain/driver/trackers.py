"""Trackers of a run: chosen, started as a process of their own, given time at the end."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from powertrain.driver.messages import warn

if TYPE_CHECKING:
    from powertrain.driver.request import TrainRequest
    from powertrain.driver.resume import EarlierStarts
    from powertrain.run.controller import Controller
    from powertrain.run.outcome import RunOutcome
    from powertrain.storage import Storage
    from powertrain.trackers.base import Tracker
    from powertrain.trackers.following import TrackerProcess


def choose_trackers(request: TrainRequest, name: str) -> list[Tracker]:
    """Return the run's trackers; raises :class:`ConfigError` for one whose package or setting is missing."""
    if not request.run.trackers:
        return []
    from powertrain.storage import open_storage
    from powertrain.trackers.choosing import chosen

    run = request.run
    root = open_storage(run.storage_root, filesystem=run.storage_filesystem)
    inside = root.child(name).local_path("x")
    return chosen(run.trackers, str(inside.parent) if inside is not None else "")


def start_trackers(
    request: TrainRequest,
    storage: Storage,
    record: Mapping[str, Any],
    earlier: EarlierStarts,
    controller: Controller,
    stack: ExitStack,
) -> TrackerProcess | None:
    """Start the process that sends the run's points to its trackers; None without trackers."""
    chosen = choose_trackers(request, record["name"])
    if not chosen:
        return None
    from powertrain.trackers import following
    from powertrain.trackers.choosing import keep

    run = following.describe_run(
        storage, record, earlier.record.get("started", record["started"]), request.config
    )
    if not_stored := keep(storage, chosen, run):
        controller.post_warning(
            f"'powertrain track' will need --tracker: the trackers could not be kept ({not_stored})."
        )
    try:
        process = following.start(storage, chosen, run, controller.post_warning)
    except OSError as error:
        controller.post_warning(
            f"Points are not sent to trackers: their process cannot be started ({error})."
        )
        return None
    stack.callback(process.close)
    return process


def finish_trackers(
    request: TrainRequest,
    process: TrackerProcess | None,
    outcome: RunOutcome,
    storage: Storage,
    terminal: Any,
) -> None:
    """Wait for trackers to finish, and name those that have not received all points."""
    if process is None:
        return
    from powertrain.trackers import following

    is_restarted = (
        outcome.state == "failed" and not request.traits.restarts
    )  # the launcher waits for us to end
    is_to_leave = outcome.is_to_leave or outcome.state == "preempted" or is_restarted
    ending = following.ending_of(storage, outcome.state, outcome.reason)
    for sentence in process.finish(ending, following.patience(request.run, is_to_leave)):
        warn(terminal, sentence)
