"""Whether a run is still its controller's, after its directory was removed, replaced or copied."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from powertrain.run.record import lease as leases
from powertrain.run.record import lease_watch
from powertrain.run.record.lease import Lease, LeaseHolder
from powertrain.storage import Storage, open_storage

OTHER = LeaseHolder(number=1, host="elsewhere", pid=7, user="ada", started=0.0, token="other")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "storage" / "run"


@pytest.fixture
def storage(run: Path) -> Storage:
    return open_storage(run)


@pytest.mark.parametrize(
    ("seen", "other", "expected"),
    [
        ("held", None, ""),
        ("held", OTHER, ""),
        ("unknown", None, ""),
        ("unknown", OTHER, ""),
        ("replaced", None, ""),
        ("replaced", OTHER, "process 7 on host 'elsewhere' has taken over this run (lease 1)"),
        ("removed", OTHER, "process 7 on host 'elsewhere' has taken over this run (lease 1)"),
        ("removed", None, "the directory '/run', or the lock in it, was removed while the run was going on"),
    ],
)
def test_what_follows_from_a_look(seen: Any, other: LeaseHolder | None, expected: str) -> None:
    assert lease_watch.verdict(seen, other, "/run") == expected


def test_a_held_lock_has_its_name(storage: Storage) -> None:
    with Lease.take(storage) as lease:
        assert lease_watch.check(lease) == "held"
        assert not lease_watch.is_displaced(lease)
    assert lease_watch.check(lease) == "held", "given back, it lies in the storage"


def test_a_removed_directory_is_seen_and_nothing_is_made_there_again(run: Path, storage: Storage) -> None:
    with Lease.take(storage) as lease:
        shutil.rmtree(run)
        assert lease_watch.check(lease) == "removed"
        assert "was removed" in lease_watch.why_lost(lease, "removed")
        assert lease_watch.is_displaced(lease)
    assert not run.exists()


def test_a_second_start_in_a_new_directory_is_seen_and_its_lease_is_not_given_back(
    run: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lease.take(storage, host="first", pid=1) as first:
        shutil.rmtree(run)
        monkeypatch.setattr(leases, "_held", {})  # as in another process
        with Lease.take(storage, host="second", pid=2) as second:
            assert first.number == second.number == 1
            seen = lease_watch.check(first)
            assert seen == "replaced"
            assert lease_watch.why_lost(first, seen) == (
                "process 2 on host 'second' has taken over this run (lease 1)"
            )
            assert lease_watch.is_displaced(first)
            assert not lease_watch.is_displaced(second)
            first.release()
            holder = leases.current_holder(storage)
            assert holder is not None
            assert (holder.token, holder.released) == (second.token, False)


def test_a_copy_in_the_place_of_the_directory_is_still_the_holders(run: Path, storage: Storage) -> None:
    with Lease.take(storage) as lease:
        run.rename(run.with_name("moved"))
        shutil.copytree(run.with_name("moved"), run)
        seen = lease_watch.check(lease)
        assert seen == "replaced"
        assert lease_watch.why_lost(lease, seen) == ""
        assert not lease_watch.is_displaced(lease)


def test_without_locks_the_lease_itself_is_looked_at(
    run: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lease.take(storage) as lease:
        monkeypatch.setattr(Lease, "lock", None)
        assert lease_watch.check(lease) == "held"
        shutil.rmtree(run / "lease")
        assert lease_watch.check(lease) == "removed"
        monkeypatch.setattr(leases, "_held", {})  # as in another process
        (run / "lease" / "lock").unlink(missing_ok=True)
        with Lease.take(open_storage(run), host="second", pid=2):
            assert lease_watch.check(lease) == "replaced"


def test_storage_that_does_not_answer_costs_no_lease(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(116, "Stale file handle")

    with Lease.take(storage) as lease:
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fail)
            assert lease_watch.check(lease) == "unknown"
        assert lease_watch.why_lost(lease, "unknown") == ""


def test_the_watch_reports_a_loss_once(run: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "BEAT_INTERVAL_S", 0.01)
    told: list[str] = []
    heard = threading.Event()

    def lost(reason: str) -> None:
        told.append(reason)
        heard.set()

    taken_by: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with Lease.take(storage) as lease, lease_watch.watching(lease, lost, taken_by):
        shutil.rmtree(run)
        assert heard.wait(30)
    assert len(told) == 1
    assert repr(str(run)) in told[0]


def test_the_watch_passes_on_what_a_heartbeat_has_found(storage: Storage) -> None:
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    taken_by: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with Lease.take(storage) as lease, lease_watch.watching(lease, heard.put, taken_by):
        taken_by.put(OTHER)
        assert "process 7 on host 'elsewhere' has taken over" in heard.get(timeout=30)
