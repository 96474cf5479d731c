from __future__ import annotations

import errno
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from tests.other_user import OtherUser
from tests.s3_server import S3Server

from powertrain.errors import RunInUseError, StorageError
from powertrain.run.record import lease as lease_module
from powertrain.run.record.lease import Lease, current_holder
from powertrain.storage import Storage, open_storage
from powertrain.storage.adapter import FilesystemStorage


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


_HOLDER = """
import sys
from powertrain.run.record.lease import Lease
from powertrain.storage import open_storage
lease = Lease.take(open_storage(sys.argv[1]))
print(lease.number, flush=True)
sys.stdin.read()
"""


@contextmanager
def other_process_holds(storage: Storage, script: str = "") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", script or _HOLDER, storage.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdin
    try:
        assert int(process.stdout.readline()) > 0
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def test_a_lease_names_its_holder_and_numbers_grow(storage: Storage) -> None:
    assert current_holder(storage) is None
    before = time.time()
    with Lease.take(storage) as first:
        holder = current_holder(storage)
        assert holder == first.holder
        assert (holder.number, holder.host, holder.pid) == (1, socket.gethostname(), os.getpid())
        assert before <= holder.started <= time.time()
        assert len(holder.token) >= 16
        assert holder.user
    with Lease.take(storage, host="elsewhere", pid=7) as second:
        assert second.number == 2
        assert second.token != first.token
        assert (second.holder.host, second.holder.pid) == ("elsewhere", 7)
    released = current_holder(storage)
    assert released is not None
    assert released.number == 2
    assert released.released


def test_a_second_taker_in_the_same_process_is_refused_until_release(storage: Storage) -> None:
    lease = Lease.take(storage)
    with pytest.raises(RunInUseError):
        Lease.take(open_storage(storage.uri))
    lease.release()
    lease.release()
    Lease.take(storage).release()


def test_a_second_taker_through_a_symbolic_link_is_refused(storage: Storage, tmp_path: Path) -> None:
    with Lease.take(storage):
        (tmp_path / "alias").symlink_to(storage.uri)
        with pytest.raises(RunInUseError):
            Lease.take(open_storage(tmp_path / "alias"))


def test_a_live_holder_in_another_process_is_named_with_what_to_do(storage: Storage) -> None:
    with other_process_holds(storage) as process, pytest.raises(RunInUseError) as caught:
        Lease.take(storage)
    message = str(caught.value)
    for part in (storage.uri, str(process.pid), socket.gethostname(), "since 20", "choose another name"):
        assert part in message


def test_a_holder_is_named_only_while_it_holds(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_HOLDER_TIMEOUT_S", 0.05)
    Lease.take(storage, host="first-host").release()
    path = storage.local_path("lease/lock")
    assert path is not None
    descriptor = os.open(path, os.O_RDWR)  # a process that has the lock and has not written its lease yet
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with pytest.raises(RunInUseError, match="in use by another process") as refused:
            Lease.take(storage)
        assert "first-host" not in str(refused.value)
    finally:
        os.close(descriptor)


def test_a_rerun_after_sigkill_starts_at_once(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_process_holds(storage) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        monkeypatch.setattr(lease_module, "SILENCE_TIMEOUT_S", 3600.0)
        with Lease.take(storage) as lease:
            assert lease.number == 2


_RACER = """
import sys
from powertrain.errors import RunInUseError
from powertrain.run.record.lease import Lease
from powertrain.storage import open_storage
sys.stdin.readline()
try:
    lease = Lease.take(open_storage(sys.argv[1]))
    print("took", lease.number, flush=True)
except RunInUseError as error:
    print("refused", error, flush=True)
sys.stdin.readline()
"""


def test_of_racing_processes_exactly_one_takes_the_run_and_the_others_name_it(storage: Storage) -> None:
    command = [sys.executable, "-c", _RACER, storage.uri]
    racers = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    try:
        for racer in racers:
            assert racer.stdin
            racer.stdin.write("go\n")
            racer.stdin.flush()
        answers = [racer.stdout.readline() for racer in racers if racer.stdout]
    finally:
        for racer in racers:
            racer.communicate("end\n", timeout=30)
    winners = [racer.pid for racer, answer in zip(racers, answers, strict=False) if answer == "took 1\n"]
    assert len(winners) == 1
    assert sum(answer.startswith("refused") and f"process {winners[0]} " in answer for answer in answers) == 3


def test_a_forked_child_does_not_keep_the_run_locked(storage: Storage) -> None:
    lease = Lease.take(storage)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        lease.release()  # must neither unlock nor mark the parent's lease as given back
        os.write(ready[1], b"x")
        os.read(done[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        holder = current_holder(storage)
        assert holder is not None
        assert not holder.released
        with pytest.raises(RunInUseError):
            Lease.take(storage)
        lease.release()
        Lease.take(storage).release()
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        for descriptor in (*ready, *done):
            os.close(descriptor)


def test_an_executed_child_does_not_inherit_the_lock(storage: Storage) -> None:
    lease = Lease.take(storage)
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, close_fds=False)
    try:
        lease.release()
        Lease.take(storage).release()
    finally:
        child.communicate()


def test_a_lease_cut_short_by_a_crash_is_passed_over(storage: Storage) -> None:
    Lease.take(storage).release()
    storage.put("lease/0002", b'{"host": "h')
    storage.put("lease/0003", b"[1]")
    holder = current_holder(storage)
    assert holder is not None
    assert holder.number == 1
    with Lease.take(storage) as lease:
        assert lease.number == 4


def test_a_failed_claim_leaves_the_run_free(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(storage), "put_if_absent", full)
        with pytest.raises(OSError, match="No space"):
            Lease.take(storage)
    Lease.take(storage).release()


class TestWithoutFileLocks:
    @pytest.fixture(autouse=True)
    def _no_locks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", refuse)

    def test_a_released_lease_is_free_and_a_held_one_is_not(self, storage: Storage) -> None:
        Lease.take(storage).release()
        with Lease.take(storage), pytest.raises(RunInUseError):
            Lease.take(storage)

    def test_a_dead_holder_of_this_host_is_passed_over(self, storage: Storage) -> None:
        with other_process_holds(storage) as process:
            with pytest.raises(RunInUseError, match="no file locks"):
                Lease.take(storage)
            process.kill()
            process.wait()
            Lease.take(storage).release()

    def test_an_unreleased_holder_of_another_host_is_refused_with_the_file_to_delete(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease_module._claim_next(storage, "elsewhere", 1)
        with pytest.raises(RunInUseError, match=r"delete .*lease/0001"):
            Lease.take(storage)
        storage.delete("lease/0001")
        Lease.take(storage).release()


def test_a_second_taker_is_refused_where_locks_belong_to_whole_processes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, Lease.take(storage):
        patch.setattr(fcntl, "flock", lambda *_: None)  # as some network file systems answer the same process
        with pytest.raises(RunInUseError):
            Lease.take(storage)


def test_a_lease_knows_whether_the_one_before_was_given_back(storage: Storage) -> None:
    with Lease.take(storage) as first:
        assert first.previous_released
    with Lease.take(storage) as second:
        assert second.previous_released
    with other_process_holds(storage) as process:
        process.kill()
        process.wait()
        with Lease.take(storage) as third:
            assert not third.previous_released
    with Lease.take(storage) as fourth:
        assert fourth.previous_released


def test_a_lease_sees_that_it_was_superseded(storage: Storage) -> None:
    with Lease.take(storage) as lease:
        assert lease.superseded() is None
        lease_module._claim_next(storage, "elsewhere", 7)
        newer = lease.superseded()
        assert newer is not None
        assert (newer.number, newer.host, newer.pid) == (2, "elsewhere", 7)


# --------------------------------------------------------------------------- without files: beats


_QUICK_HOLDER = """
import sys
from powertrain.run.record import lease
from powertrain.storage import open_storage
lease.BEAT_INTERVAL_S = 0.2
held = lease.Lease.take(open_storage(sys.argv[1]), on_lost=lambda by: print("lost to", by.number, flush=True))
print(held.number, flush=True)
sys.stdin.readline()
print("superseded by", getattr(held.superseded(), "number", None), flush=True)
sys.stdin.readline()
"""


class TestOnObjectStores:
    @pytest.fixture
    def storage(self, s3: S3Server) -> Storage:
        return open_storage(s3.uri(f"runs/{secrets.token_hex(4)}"), timeout=20)

    @pytest.fixture(autouse=True)
    def _quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease_module, "BEAT_INTERVAL_S", 0.2)
        monkeypatch.setattr(lease_module, "_POLL_INTERVAL_S", 0.1)
        monkeypatch.setattr(lease_module, "SILENCE_TIMEOUT_S", 3.0)

    def test_leases_are_given_back_and_taken_again_at_once(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lease_module, "SILENCE_TIMEOUT_S", 3600.0)
        for number in (1, 2, 3):
            with Lease.take(storage) as lease:
                assert (lease.number, lease.previous_released) == (number, True)
        assert {entry.key for entry in storage.list("lease")} == {
            f"lease/000{number}{suffix}" for number in (1, 2, 3) for suffix in ("", ".released")
        }

    def test_a_second_controller_is_refused_while_the_first_beats_and_the_error_names_it(
        self, storage: Storage
    ) -> None:
        with other_process_holds(storage, _QUICK_HOLDER) as process, pytest.raises(RunInUseError) as caught:
            Lease.take(storage)
        for part in (f"process {process.pid} ", socket.gethostname(), "runs/", "choose another name"):
            assert part in str(caught.value)
        assert "secret_key=testing" not in str(caught.value)

    def test_the_same_process_is_refused_too(self, storage: Storage) -> None:
        with Lease.take(storage), pytest.raises(RunInUseError):
            Lease.take(storage)

    def test_a_killed_holder_of_this_machine_is_passed_over_at_once(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with other_process_holds(storage, _QUICK_HOLDER) as process:
            process.kill()
            process.wait()
            monkeypatch.setattr(
                lease_module, "SILENCE_TIMEOUT_S", 3600.0
            )  # whose end no test would live to see
            with Lease.take(storage) as lease:
                assert (lease.number, lease.previous_released) == (2, False)

    def test_a_silent_holder_of_another_machine_is_waited_for_and_then_passed_over(
        self, storage: Storage
    ) -> None:
        lease_module._claim(storage, 1, "elsewhere", 1)
        began = time.monotonic()
        with Lease.take(storage) as lease:
            assert (lease.number, lease.previous_released) == (2, False)
        assert time.monotonic() - began >= lease_module.SILENCE_TIMEOUT_S - 1.1  # S3 tells whole seconds

    def test_a_holder_that_was_silent_for_long_is_passed_over_at_once(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease_module._claim(storage, 1, "elsewhere", 1)
        monkeypatch.setattr(lease_module, "SILENCE_TIMEOUT_S", 3600.0)
        monkeypatch.setattr(lease_module, "_age_of_beat", lambda storage, holder: 7200.0)
        Lease.take(storage).release()

    def test_a_lease_given_back_while_it_is_watched_is_free(
        self, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lease_module, "SILENCE_TIMEOUT_S", 15.0)
        first = Lease.take(storage)
        first._heart.stop()  # type: ignore[union-attr]
        timer = threading.Timer(0.5, first.release)
        timer.start()
        with Lease.take(storage) as second:
            assert (second.number, second.previous_released) == (2, True)
        timer.join()

    def test_a_frozen_holder_is_taken_over_and_notified_when_it_thaws(self, storage: Storage) -> None:
        with other_process_holds(storage, _QUICK_HOLDER) as process:
            assert process.stdout
            assert process.stdin
            process.send_signal(signal.SIGSTOP)
            with Lease.take(storage) as lease:
                assert lease.number == 2
                process.send_signal(signal.SIGCONT)
                assert process.stdout.readline() == "lost to 2\n"
                process.stdin.write("go\n")
                process.stdin.flush()
                assert process.stdout.readline() == "superseded by 2\n"
                with pytest.raises(RunInUseError):
                    Lease.take(storage)

    def test_of_racing_takers_exactly_one_gets_a_silent_run(self, storage: Storage) -> None:
        lease_module._claim(storage, 1, "elsewhere", 1)
        with ThreadPoolExecutor(4) as pool:
            outcomes = list(pool.map(lambda _: self.attempt(storage), range(4)))
        taken = [outcome for outcome in outcomes if isinstance(outcome, Lease)]
        assert [lease.number for lease in taken] == [2]
        assert sum(isinstance(outcome, RunInUseError) for outcome in outcomes) == 3
        taken[0].release()

    @staticmethod
    def attempt(storage: Storage) -> Lease | RunInUseError:
        try:
            return Lease.take(storage)
        except RunInUseError as error:
            return error

    def test_a_file_system_without_real_files_beats_as_well(self) -> None:
        storage = FilesystemStorage(fsspec.filesystem("memory"), f"/{secrets.token_hex(4)}")
        with Lease.take(storage), pytest.raises(RunInUseError):
            Lease.take(storage)
        Lease.take(storage).release()


@pytest.mark.parametrize("name", ["1" * 25, "\u0663" * 4, "12"])
def test_a_file_with_a_name_that_no_lease_has_is_passed_over(storage: Storage, name: str) -> None:
    storage.put(f"lease/{name}", b"stray")
    with Lease.take(storage) as lease:
        assert lease.number == 1


def test_leases_that_a_stray_file_has_brought_to_their_last_number_are_refused(storage: Storage) -> None:
    storage.put("lease/999999999", b"stray")
    with pytest.raises(StorageError, match=r"lease/999999999.*Remove that file"):
        Lease.take(storage)


def hold_and_release(path: str) -> int:
    with Lease.take(open_storage(path), shared=True) as lease:
        return lease.number


def test_in_shared_storage_another_user_can_take_the_next_lease(
    shared_directory: Path, other_user: OtherUser
) -> None:
    """Whatever the umask of the first user was, and also where an earlier start did not share it."""
    run = shared_directory / "run"
    with Lease.take(open_storage(run)):
        pass
    for directory in (run, run / "lease"):
        directory.chmod(0o777)
    assert hold_and_release(str(run)) == 2
    assert other_user.run(hold_and_release, str(run)) == 3
