"""The periodic check of a live controller that the run is still its own.

A lock on a file system says nothing when the file was removed: the holder keeps it on a file without a name, and a
second start makes and locks a new one. So the holder compares, every few seconds, the file that it has open with the
one at its path, and where there is no lock its lease with the one in the storage. :func:`verdict`, which is pure,
decides on the result of a check; :func:`watching` has the thread.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Literal

from powertrain.errors import StorageError
from powertrain.run.record import lease as leases
from powertrain.run.record.lease import Lease, LeaseHolder
from powertrain.storage.addresses import without_secrets

#: Results of a check of the lock file (or, without locks, of the lease): still ours; another one at its place; nothing
#: there; or no answer.
Seen = Literal["held", "replaced", "removed", "unknown"]


def verdict(seen: Seen, other: LeaseHolder | None, place: str) -> str:
    """Return why the run is not this controller's any more, as a clause; "" while it is.

    Args:
        seen: What the look found.
        other: The holder of the newest lease in the storage, where it is not this controller.
        place: The run's directory, for the text.
    """
    if seen in ("held", "unknown"):
        return ""
    if other is not None:
        return f"process {other.pid} on host {other.host!r} has taken over this run (lease {other.number})"
    if seen == "removed":
        return f"the directory {place!r}, or the lock in it, was removed while the run was going on"
    return ""  # a copy of the directory was put in its place: no other controller holds the run


def check(lease: Lease) -> Seen:
    """Check the lock file, or the lease where there is no lock."""
    if lease.lock is None:
        return _check_lease(lease)
    path, descriptor = lease.lock
    try:
        there, held = os.stat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return "removed"
    except OSError:  # storage in trouble, or given back meanwhile
        return "unknown"
    return "held" if os.path.samestat(there, held) else "replaced"


def why_lost(lease: Lease, seen: Seen) -> str:
    """Return :func:`verdict` of a check, with the newest holder read from the storage where it matters."""
    place, other = lease.storage.within(leases.BEAT_INTERVAL_S), None
    if seen in ("replaced", "removed"):
        with contextlib.suppress(OSError, StorageError):
            newest = leases.current_holder(place)
            other = newest if newest is not None and newest.token != lease.token else None
    return verdict(seen, other, without_secrets(lease.storage.uri))


def is_displaced(lease: Lease) -> bool:
    """Return True when the run's directory was removed, and where there is one again it is another start's.

    Without a lock the last heartbeat decides: the end must not wait for storage that does not answer.
    """
    if lease.lock is None:
        return lease.was_displaced
    try:
        return check(lease) in ("removed", "replaced") and not leases.is_in_storage(
            lease.storage.within(leases.BEAT_INTERVAL_S), lease.holder
        )
    except (OSError, StorageError):
        return False


@contextlib.contextmanager
def watching(
    lease: Lease, lost: Callable[[str], None], taken_by: queue.SimpleQueue[LeaseHolder | None]
) -> Iterator[None]:
    """While the block runs, call ``lost`` once, on another thread, when the run is not ``lease``'s any more.

    ``taken_by`` delivers the holder that a heartbeat without locks has found.
    """

    def watch() -> None:
        before: Seen = "held"
        while True:
            try:
                holder = taken_by.get(timeout=leases.BEAT_INTERVAL_S)
            except queue.Empty:
                seen = check(lease)
                # A mount that comes and goes is missing for a moment: only a directory missing twice is removed.
                reason = why_lost(lease, seen) if seen != "removed" or before == "removed" else ""
                before = seen
                lease.was_displaced = seen in ("removed", "replaced")
            else:
                if holder is None:
                    return
                reason = verdict("replaced", holder, "")
            if reason:
                lost(reason)
                return

    thread = threading.Thread(target=watch, name="powertrain-takeover", daemon=True)
    thread.start()
    try:
        yield
    finally:
        taken_by.put(None)
        thread.join(2 * leases.BEAT_INTERVAL_S)  # it may be waiting for storage that does not answer


def _check_lease(lease: Lease) -> Seen:
    place = lease.storage.within(leases.BEAT_INTERVAL_S)
    try:
        if leases.is_in_storage(place, lease.holder):
            return "held"
        return "removed" if leases.current_holder(place) is None else "replaced"
    except (OSError, StorageError):
        return "unknown"
