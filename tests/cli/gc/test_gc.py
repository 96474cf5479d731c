"""``powertrain gc``: checkpoints beyond retention and files of dead processes are found; live runs are left alone."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.other_user import OtherUser
from tests.recorded_run import write
from tests.s3_server import S3Server
from typer.testing import CliRunner

from powertrain.checkpoint.committed import committed
from powertrain.cli.gc.leftovers import delete_leftovers, find_leftovers, why_in_use
from powertrain.cli.gc.machine import delete_on_machine, find_on_machine
from powertrain.cli.main import app
from powertrain.data.loading import scratch
from powertrain.engine.local.runtime_directories import make_runtime_directory, remove_runtime_directory
from powertrain.run.record.lease import Lease, LeaseHolder
from powertrain.storage import Storage, open_storage
from powertrain.storage.base import TEMPORARY_PREFIX, host_in_names
from powertrain.storage.files import private_roots

LOSSES = {1: {"loss": 3.0}, 2: {"loss": 1.0}, 3: {"loss": 2.0}, 4: {"loss": 4.0}}
_TAKE = "import os, sys; from powertrain.run.record.lease import Lease; from powertrain.storage import open_storage; "
OLD = time.time() - 7200


@pytest.fixture(autouse=True)
def _own_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Directories for scratch files and shared memory that no other test uses."""
    place = tmp_path_factory.mktemp("machine")
    (place / "shm").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(place))
        patch.setattr(private_roots, "_SHARED_MEMORY", str(place / "shm"))
        yield


def set_retention(storage: Storage, **config: Any) -> None:
    storage.put("run.json", json.dumps({"run_config": {"checkpoint_config": config}}).encode())


def ended_run(directory: Path, losses: Mapping[int, Mapping[str, Any]] = LOSSES, **config: Any) -> Storage:
    """A run that gave its lease back."""
    storage = write(directory, checkpoints=losses)
    set_retention(storage, **config)
    Lease.take(storage).release()
    return storage


def killed_run(directory: Path) -> Storage:
    """A run whose process ended without giving the lease back."""
    storage = write(directory, checkpoints=LOSSES)
    set_retention(storage, num_to_keep=None)
    code = f"{_TAKE}kept = Lease.take(open_storage(sys.argv[1])); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True, timeout=60)
    return storage


def items(storage: Storage, **options: Any) -> list[tuple[str, str]]:
    return [(item.kind, item.path) for item in find_leftovers("run", storage, **options).items]


def names(storage: Storage) -> list[str]:
    return [manifest.name for manifest in committed(storage)]


def age(path: Path) -> None:
    for one in (path, *path.rglob("*")):
        os.utime(one, (OLD, OLD))


def test_checkpoints_beyond_retention_are_found_and_no_others_deleted(tmp_path: Path) -> None:
    storage = ended_run(
        tmp_path / "run", num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    assert items(storage) == [("checkpoint", "checkpoints/c1"), ("checkpoint", "checkpoints/c3")]
    assert names(storage) == ["c1", "c2", "c3", "c4"]
    _, errors = delete_leftovers("run", storage)
    assert (errors, names(storage)) == ([], ["c2", "c4"])
    assert {entry.key.split("/")[1] for entry in storage.list("checkpoints")} == {"c2", "c4"}
    assert items(storage) == []


@pytest.mark.parametrize(
    "config", [{}, {"num_to_keep": None}, {"num_to_keep": 9}], ids=["absent", "all", "many"]
)
def test_nothing_is_found_where_retention_keeps_all(tmp_path: Path, config: dict[str, Any]) -> None:
    assert items(ended_run(tmp_path / "run", **config)) == []


@pytest.mark.parametrize(
    "record", [b"", b"[]", b'{"run_config": 1}', b"\xff"], ids=["empty", "list", "number", "bytes"]
)
def test_a_damaged_record_keeps_all_checkpoints(tmp_path: Path, record: bytes) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=1)
    storage.put("run.json", record)
    found = find_leftovers("run", storage)
    assert (found.items, len(found.notes)) == ([], 1)


def test_a_damaged_manifest_keeps_all_checkpoints(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=1)
    (manifest,) = (e.key for e in storage.list("checkpoints/c2") if "manifest" in e.key)
    storage.put(manifest, b"{")
    found = find_leftovers("run", storage)
    assert (found.items, "cannot be read" in found.notes[0]) == ([], True)


def test_trials_keep_their_checkpoints_for_the_sweep(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "sweep" / "trial", num_to_keep=1)
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    (tmp_path / "sweep" / "journal").mkdir()
    (tmp_path / "sweep" / "journal" / "0001-000001.jsonl").write_text("{}\n")
    for path in (tmp_path, tmp_path / "sweep", tmp_path / "sweep" / "trial"):
        assert CliRunner().invoke(app, ["gc", str(path), "--delete"]).exit_code == 0
    assert names(storage) == ["c1", "c2", "c3", "c4"]


def test_unfinished_files_of_an_ended_run_are_deleted(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=None)
    storage.put("checkpoints/c5/model", b"half")
    staged = tmp_path / "run" / ".staging" / "abc"
    staged.mkdir(parents=True)
    (staged / "file").write_bytes(b"12345")
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / "run" / f"{TEMPORARY_PREFIX}{host_in_names()}.{dead.pid}.ab").write_bytes(b"1")
    (tmp_path / "run" / f"{TEMPORARY_PREFIX}{host_in_names()}.{os.getpid()}.ab").write_bytes(b"1")
    found, errors = delete_leftovers("run", storage)
    assert errors == []
    assert [(item.kind, item.bytes) for item in found.items] == [
        ("unfinished checkpoint", 4), ("staging", 5), ("temporary file", 1)
    ]  # fmt: skip
    assert names(storage) == ["c1", "c2", "c3", "c4"]
    assert items(storage) == []
    assert not staged.parent.exists()
    assert [path.name for path in (tmp_path / "run").glob(f"{TEMPORARY_PREFIX}*")] == [
        f"{TEMPORARY_PREFIX}{host_in_names()}.{os.getpid()}.ab"
    ]


def test_shares_that_were_kept_for_the_user_stay(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run")
    staged = tmp_path / "run" / ".staging" / "abc"
    staged.mkdir(parents=True)
    (staged / "KEPT").touch()
    found, _ = delete_leftovers("run", storage)
    assert (found.items, staged.exists()) == ([], True)
    assert "did not reach the storage" in find_leftovers("run", storage).notes[0]


def test_fresh_files_of_a_killed_run_stay_for_an_hour(tmp_path: Path) -> None:
    storage = killed_run(tmp_path / "run")
    storage.put("checkpoints/c5/model", b"half")
    assert items(storage) == []
    age(tmp_path / "run" / "checkpoints" / "c5")
    assert items(storage) == [("unfinished checkpoint", "checkpoints/c5")]
    found, errors = delete_leftovers("run", storage)
    assert (len(found.items), errors, names(storage)) == (1, [], ["c1", "c2", "c3", "c4"])


def test_a_live_run_is_left_alone(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=1)
    storage.put("checkpoints/c5/model", b"half")
    with Lease.take(storage):
        found, _ = delete_leftovers("run", storage)
        assert (found.items, found.in_use) == ([], f"process {os.getpid()} runs it")
    assert names(storage) == ["c1", "c2", "c3", "c4"]


def test_a_run_that_starts_between_looking_and_deleting_is_left_alone(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=1)
    started = []

    def look_then_start(*arguments: Any, **options: Any) -> Any:
        found = find_leftovers(*arguments, **options)
        started.append(Lease.take(storage))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("powertrain.cli.gc.leftovers.find_leftovers", look_then_start)
        found, errors = delete_leftovers("run", storage)
    started[0].release()
    assert (found.items, errors, len(names(storage))) == ([], [], 4)
    assert "is in use by process" in found.in_use


def test_the_last_holder_decides_whether_a_run_may_be_alive() -> None:
    def holder(host: str, pid: int, released: bool = False) -> LeaseHolder:
        return LeaseHolder(number=1, host=host, pid=pid, user="u", started=0.0, token="", released=released)

    here = socket.gethostname()
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert why_in_use(holder(here, os.getpid()), here)
    assert why_in_use(holder("elsewhere", 1), here)
    assert why_in_use(holder(here, dead.pid), here) == ""
    assert why_in_use(holder("elsewhere", 1, released=True), here) == ""


def test_a_run_of_another_user_is_left_alone(tmp_path: Path, other_user: OtherUser) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=1)
    os.chown(tmp_path / "run", other_user.uid, other_user.uid)
    found, _ = delete_leftovers("run", storage)
    assert (found.items, found.in_use) == ([], f"it belongs to another user (uid {other_user.uid})")
    assert len(names(storage)) == 4


def test_the_lock_of_a_shared_run_stays_open_to_its_group(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=1)
    storage.put(
        "run.json",
        json.dumps(
            {"run_config": {"checkpoint_config": {"num_to_keep": 1}, "shared_storage": True}}
        ).encode(),
    )
    lock = tmp_path / "run" / "lease" / "lock"
    lock.parent.chmod(0o775)
    lock.chmod(0o660)
    assert len(delete_leftovers("run", storage)[0].items) == 3
    assert stat.S_IMODE(lock.stat().st_mode) == 0o660


def test_a_directory_without_a_lease_is_left_alone(tmp_path: Path) -> None:
    storage = write(tmp_path / "run", checkpoints=LOSSES)
    storage.put("checkpoints/c5/model", b"half")
    assert find_leftovers("run", storage).in_use.startswith("it has no lease")


# --------------------------------------------------------------------------- this machine


def test_directories_of_dead_processes_are_found_and_those_of_live_ones_stay() -> None:
    mine, data = make_runtime_directory("mine"), scratch.Scratch()
    code = (
        "import os, sys; from powertrain.data.loading.scratch import Scratch; kept = Scratch(); "
        "open(os.path.join(kept.path, 'block'), 'wb').write(b'123'); print(kept.path, flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    dead = done.stdout.strip()
    try:
        assert [(item.kind, item.path, item.bytes) for item in find_on_machine()] == [("data cache", dead, 3)]
        delete_on_machine()
        assert find_on_machine() == []
        assert mine.is_dir()
        assert os.path.isdir(data.path)
        assert not os.path.exists(dead)
    finally:
        remove_runtime_directory(mine)
        data.close()


def test_shared_memory_of_a_dead_run_is_found_and_deleted() -> None:
    memory = private_roots.shared_memory_root()
    assert memory is not None
    code = (
        "import os, sys; from pathlib import Path; "
        "from powertrain.engine.local.runtime_directories import make_runtime_directory as make; "
        "made = make('dead', Path(sys.argv[1])); (made / 'segment').write_bytes(b'12'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(memory)], check=True, timeout=60)
    assert [(item.kind, item.bytes) for item in find_on_machine()] == [("shared memory", 2)]
    delete_on_machine()
    assert list(memory.iterdir()) == []


def test_a_dead_socket_is_found_and_deleted() -> None:
    code = (
        "import os; from powertrain.engine.local.runtime_directories import make_runtime_directory as make; "
        "print(make('dead'), flush=True); os._exit(0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    path = Path(done.stdout.strip())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "socket"))
    assert [(item.kind, item.path) for item in find_on_machine()] == [("runtime directory", str(path))]
    delete_on_machine()
    assert not path.exists()


# --------------------------------------------------------------------------- the verb


def test_the_list_has_sizes_and_nothing_is_deleted_without_the_option(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=1)
    done = CliRunner().invoke(app, ["gc", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (
        "checkpoint             run/checkpoints/c1: CheckpointConfig(num_to_keep=1) does not keep it"
        in done.output
    )
    assert "3 leftovers" in done.output
    assert "could be deleted (--delete does it)" in done.output
    assert len(names(storage)) == 4
    found = json.loads(CliRunner().invoke(app, ["gc", str(tmp_path / "run"), "--delete", "--json"]).output)
    assert (found["deleted"], len(found["runs"][0]["items"]), found["errors"]) == (True, 3, [])
    assert names(storage) == ["c4"]
    assert "There is nothing to delete." in CliRunner().invoke(app, ["gc", str(tmp_path)]).output


def test_a_deletion_that_fails_is_reported_with_exit_code_1(tmp_path: Path) -> None:
    storage = ended_run(tmp_path / "run", num_to_keep=3)

    def refuse(*_: Any) -> None:
        raise OSError(13, "Permission denied")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("powertrain.cli.gc.leftovers.cleanup.discard", refuse)
        done = CliRunner().invoke(app, ["gc", str(tmp_path), "--delete"])
    assert (done.exit_code, len(names(storage))) == (1, 4)
    assert "checkpoints/c1 of 'run' could not be deleted: [Errno 13] Permission denied" in done.output


def test_runs_in_an_object_store(s3: S3Server, tmp_path: Path) -> None:
    local = write(tmp_path / "run", checkpoints=LOSSES)
    storage = open_storage(s3.uri("runs/run"))
    for entry in local.list():
        storage.put(entry.key, local.get(entry.key))
    set_retention(storage, num_to_keep=1)
    Lease.take(storage).release()
    assert [path for _, path in items(storage)] == ["checkpoints/c1", "checkpoints/c2", "checkpoints/c3"]
    done = CliRunner().invoke(app, ["gc", s3.uri("runs"), "--delete"])
    assert (done.exit_code, names(storage)) == (0, ["c4"]), done.output
