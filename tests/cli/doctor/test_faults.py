"""The doctor on a real machine: each fault is made, and its check finds it; nothing is left behind."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.other_user import OtherUser

from powertrain.cli.doctor import device_verdicts, machine, processes, stores, verdicts
from powertrain.cli.doctor.requirements import Requirement
from powertrain.storage import open_storage
from powertrain.storage.local import LocalStorage

_DOCTOR = (sys.executable, "-c", "from powertrain.cli.main import main; main()", "doctor")


#: Only ends a hang: each doctor imports torch three times.
_TIMEOUT_S = 280


def run_doctor(*arguments: str, **variables: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*_DOCTOR, "--json", *arguments],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        env={**os.environ, **variables},
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(300)
def test_a_sound_machine_has_no_failed_check_and_nothing_is_left(tmp_path: Path) -> None:
    storage = tmp_path / "not" / "there"
    code, found = run_doctor("--storage", str(storage))
    assert (code, [one for one in found["checks"] if one["verdict"] == "fail"]) == (0, [])
    names = {one["name"] for one in found["checks"]}
    assert {"versions", "gpu", "gloo", "shared_memory", "limits", "ports", "clock", "storage"} <= names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.timeout(300)
def test_a_failed_check_is_printed_with_its_fix_and_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = subprocess.run(
        [*_DOCTOR, "--storage", str(tmp_path / "file" / "below")],
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (failed,) = (number for number, line in enumerate(lines) if line.startswith("fail"))
    assert "storage" in lines[failed]
    assert "Fix: A part of the path is a file" in lines[failed + 1]
    assert lines[-1].endswith("1 failed")


@pytest.mark.timeout(300)
def test_an_interface_that_does_not_exist_fails_the_collective() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
        found = device_verdicts.check_collective(processes.gather_collective("gloo", 2))
    assert found.verdict == "fail"
    assert "nosuch0" in found.why


def test_a_torch_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        facts = processes.gather_torch()
    assert facts.failure == "ImportError: libcudart.so.12: cannot open shared object file"


def test_a_thread_that_every_process_starts_makes_forks_unsafe(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        facts = processes.gather_torch()
    assert (
        device_verdicts.check_start_method(device_verdicts.StartFacts("linux", facts.unsafe)).verdict
        == "warn"
    )


def test_small_full_and_missing_shared_memory_are_found(mount_small_disk: Callable[[str], Path]) -> None:
    place = mount_small_disk("32m")
    small = verdicts.check_shared_memory(machine.gather_shared_memory(str(place)))
    assert (small.verdict, "is small" in small.why) == ("warn", True)
    (place / "segment").write_bytes(b"\0" * (31 << 20))
    assert verdicts.check_shared_memory(machine.gather_shared_memory(str(place))).verdict == "fail"
    assert [path.name for path in place.iterdir()] == ["segment"]
    assert verdicts.check_shared_memory(machine.gather_shared_memory(str(place / "no"))).verdict == "fail"


def test_a_full_disk_is_found(mount_small_disk: Callable[[str], Path]) -> None:
    place = mount_small_disk("8m")
    found = verdicts.check_disk(machine.gather_disk("storage", place / "runs", with_remarks=True))
    assert (found.verdict, list(place.iterdir())) == ("fail", [])
    assert "has only" in found.why


def test_a_storage_in_memory_is_warned_about(mount_small_disk: Callable[[str], Path]) -> None:
    place = mount_small_disk("3g")
    found = verdicts.check_disk(machine.gather_disk("storage", place, with_remarks=True))
    assert (found.verdict, "is in memory" in found.why) == ("warn", True)


def test_a_low_limit_of_open_files_is_found() -> None:
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[1])))\n"
        "from powertrain.cli.doctor import machine, verdicts\n"
        "print(verdicts.check_limits(*machine.gather_limits(2), 2).verdict)\n"
    )
    for limit, verdict in ((20, "fail"), (512, "warn"), (min(4096, hard_limit()), "ok")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(limit)], capture_output=True, text=True, timeout=60
        )
        assert done.stdout.strip() == verdict, done.stderr


def hard_limit() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 4096 if hard == resource.RLIM_INFINITY else hard


def test_a_master_port_in_use_is_found() -> None:
    with socket.create_server(("", 0)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        assert verdicts.check_ports(machine.gather_ports()).verdict == "fail"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MASTER_PORT", raising=False)
        assert verdicts.check_ports(machine.gather_ports()).verdict == "ok"


def test_a_name_without_an_address_is_found() -> None:
    assert verdicts.check_hostname(machine.gather_host("no-such-machine.invalid")).verdict == "warn"
    assert verdicts.check_hostname(machine.gather_host("localhost")).verdict == "ok"


def test_an_address_of_another_machine_is_found() -> None:
    facts = machine.gather_host("192.0.2.1")  # reserved for documentation: no machine has it
    assert verdicts.check_hostname(facts).verdict == "warn"


def test_a_cluster_that_does_not_answer_is_found() -> None:
    needed = [Requirement("ray", ">=", "2.50", "ray")]
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        patch.setenv("RAY_ADDRESS", address)
        answering = machine.gather_ray(needed)
        server.close()
        refusing = machine.gather_ray(needed)
        patch.setenv("RAY_ADDRESS", "nonsense")
        malformed = machine.gather_ray(needed)
    assert [bool(one.error) for one in (answering, refusing, malformed)] == [False, True, True]
    assert verdicts.check_ray(refusing).verdict == "fail"


def test_auto_without_a_cluster_is_found(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", "auto")
        patch.setenv("RAY_TMPDIR", str(tmp_path))
        assert machine.gather_ray([]).error == "no cluster runs on this machine"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")
        assert machine.gather_ray([]).error == "Connection refused"


def test_a_storage_that_refuses_writes_is_found(shared_directory: Path, other_user: OtherUser) -> None:
    closed = shared_directory / "closed"
    closed.mkdir(mode=0o755)
    facts, skew = other_user.run(stores.gather_storage, str(closed))
    found = verdicts.check_storage(facts)
    assert (found.verdict, skew) == ("fail", None)
    assert "Permission denied" in found.why
    assert found.fix.startswith("Give this user write permission")


class Forgetful(LocalStorage):
    """A storage that does not list new values at once."""

    def list(self, prefix: str = "") -> list[Any]:
        return []


def test_a_storage_that_does_not_list_its_values_is_found(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "open_storage", lambda path, timeout: Forgetful(Path(path)))
        facts, _ = stores.gather_storage(str(tmp_path))
    assert "does not list" in verdicts.check_storage(facts).why
    assert list(tmp_path.iterdir()) == []


class Late(LocalStorage):
    """A storage whose clock is an hour behind."""

    def modified(self, key: str) -> float:
        return super().modified(key) - 3600


def test_a_storage_with_another_time_is_found(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "open_storage", lambda path, timeout: Late(Path(path)))
        _, skew = stores.gather_storage(str(tmp_path))
    assert skew is not None
    assert verdicts.check_clock(verdicts.ClockFacts(1.8e9, skew)).verdict == "fail"


def test_an_unknown_scheme_is_reported_without_its_secret() -> None:
    facts, _ = stores.gather_storage("ftp://user:secret@host/runs")
    assert verdicts.check_storage(facts).verdict == "fail"
    assert "secret" not in str(facts)


def test_a_runtime_directory_of_another_user_is_found(shared_directory: Path, other_user: OtherUser) -> None:
    taken = shared_directory / "powertrain"
    taken.mkdir()
    os.chown(taken, other_user.uid, other_user.uid)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(shared_directory))
        error, notices, paths = machine.gather_runtime_directories()
    assert verdicts.check_runtime_directories(error, notices, paths).verdict == "warn"
    assert [path.name for path in shared_directory.iterdir()] == ["powertrain"]


def test_the_storage_is_opened_as_runs_open_it(tmp_path: Path) -> None:
    facts, skew = stores.gather_storage(str(tmp_path))
    assert verdicts.check_storage(facts).verdict == "ok"
    assert skew is not None
    assert open_storage(tmp_path).list() == []
