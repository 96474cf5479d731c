"""What a run needs of a machine, and what the machine allows."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine import system_limits
from powertrain.engine.limits import Limit, Need, exceeded, most_workers, need_of, problem
from powertrain.errors import ResourceError

KINDS = ("driver_files", "worker_files", "tasks", "workers")
workers = st.integers(0, 200_000)
flags = st.booleans()
limits = st.lists(
    st.builds(
        Limit,
        kind=st.sampled_from(KINDS),
        amount=st.integers(0, 1_000_000),
        name=st.just("a limit"),
        remedy=st.just("Raise it"),
        used=st.integers(0, 100_000),
    ),
    max_size=5,
)


def fits(need: Need, found: list[Limit]) -> bool:
    return all(getattr(need, limit.kind) <= max(0, limit.amount - limit.used) for limit in found)


@given(workers, workers, flags, flags)
def test_more_workers_never_need_less(one: int, other: int, connected: bool, starts: bool) -> None:
    fewer, more = sorted((one, other))
    small = need_of(fewer, connected=connected, starts_processes=starts)
    large = need_of(more, connected=connected, starts_processes=starts)
    assert all(getattr(small, kind) <= getattr(large, kind) for kind in KINDS)


@given(workers, flags, flags, limits)
def test_a_run_is_refused_exactly_where_a_limit_is_too_low(
    count: int, connected: bool, starts: bool, found: list[Limit]
) -> None:
    need = need_of(count, connected=connected, starts_processes=starts)
    text = problem("asked", count, found, connected=connected, starts_processes=starts)
    assert (text == "") == fits(need, found) == (exceeded(need, found) is None)


@given(workers, flags, flags, limits)
def test_the_number_that_is_offered_fits_and_one_more_does_not(
    count: int, connected: bool, starts: bool, found: list[Limit]
) -> None:
    most = most_workers(found, count, connected=connected, starts_processes=starts)
    assert 0 <= most <= count
    if most:
        assert fits(need_of(most, connected=connected, starts_processes=starts), found)
    if most < count:
        assert not fits(need_of(most + 1, connected=connected, starts_processes=starts), found)


@given(workers, flags)
def test_where_others_start_the_workers_only_this_process_counts(count: int, connected: bool) -> None:
    need = need_of(count, connected=connected, starts_processes=False)
    assert (need.worker_files, need.tasks, need.workers) == (0, 0, 0)
    assert need.driver_files > count


def test_the_message_names_the_limit_the_need_and_the_remedy() -> None:
    limit = Limit(
        "tasks", 1000, "the control group's limit (pids.max)", "Raise it with --pids-limit", used=400
    )
    text = problem("ScalingConfig(num_workers=500)", 500, [limit], connected=False, starts_processes=True)
    assert text == (
        "ScalingConfig(num_workers=500) needs at least 2,020 processes and threads, and the control group's limit "
        "(pids.max) allows 1,000, of which 400 are in use. Raise it with --pids-limit, or ask for at most 145 "
        "worker(s)."
    )


# --------------------------------------------------------------------------- reading


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose /proc and /sys/fs/cgroup are directories of the test."""
    monkeypatch.setattr(system_limits, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(system_limits, "_CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc/sys/kernel/pid_max", "32768\n")
    write(tmp_path / "proc/sys/kernel/threads-max", "60000\n")
    write(tmp_path / "proc/loadavg", "0.00 0.01 0.05 1/300 4242\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def of_tasks() -> dict[str, tuple[int, int]]:
    found = [limit for limit in system_limits.read_limits(100) if limit.kind == "tasks"]
    return {limit.name: (limit.amount, limit.used) for limit in found}


@pytest.mark.parametrize(
    ("line", "below"),
    [
        ("0::/user/job", "cgroup"),
        ("8:pids:/user/job", "cgroup/pids"),
        ("3:cpu,pids:/user/job", "cgroup/pids"),
    ],
)
def test_the_limits_of_all_control_groups_above_are_read(machine: Path, line: str, below: str) -> None:
    write(machine / "proc/self/cgroup", f"4:memory:/user/job\n{line}\n")
    write(machine / below / "user/job/pids.max", "max\n")
    write(machine / below / "user/pids.max", "500\n")
    write(machine / below / "user/pids.current", "120\n")
    found = of_tasks()
    assert found[f"the control group's limit for processes ({machine / below / 'user'}/pids.max)"] == (
        500,
        120,
    )
    assert sum("control group" in name for name in found) == 1, "of those without a limit nothing is said"


def test_the_kernels_limits_are_read(machine: Path) -> None:
    found = of_tasks()
    assert found["the machine (kernel.pid_max)"] == (32768, 300)
    assert found["the machine (kernel.threads-max)"] == (60000, 300)


def test_what_cannot_be_read_limits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system_limits, "_PROC", tmp_path / "nothing")
    monkeypatch.setattr(system_limits, "_CGROUPS", tmp_path / "nothing")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert [limit.kind for limit in system_limits.read_limits(100)] == ["workers"]


@pytest.mark.parametrize(("uid", "wanted", "used"), [(1000, 60, 3), (1000, 10, 0), (0, 60, None)])
def test_the_users_limit_counts_what_runs_already_where_it_matters(
    machine: Path, monkeypatch: pytest.MonkeyPatch, uid: int, wanted: int, used: int | None
) -> None:
    """Root is exempt, and a run that needs far less than the limit is not worth a look at every process."""
    monkeypatch.setattr(os, "getuid", lambda: uid)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 200))
    for pid, threads in (("7", "12"), ("8", "3")):
        for thread in threads:
            write(machine / "proc" / pid / "task" / thread / "comm", "x")
        os.chown(machine / "proc" / pid, uid, -1) if os.geteuid() == 0 else None
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "getuid", lambda: uid and os.geteuid())
    found = {name: value for name, value in of_tasks_of(wanted).items() if "RLIMIT_NPROC" in name}
    assert list(found.values()) == ([] if used is None else [(100, used)])


def of_tasks_of(tasks: int) -> dict[str, Any]:
    found = [limit for limit in system_limits.read_limits(tasks) if limit.kind == "tasks"]
    return {limit.name: (limit.amount, limit.used) for limit in found}


def test_only_the_hard_limit_for_files_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    system_limits.check_limits("asked", 1000, connected=False, starts_processes=False)
    with pytest.raises(ResourceError, match=r"RLIMIT_NOFILE, 'ulimit -Hn'\) allows 4,096"):
        system_limits.check_limits("asked", 2000, connected=False, starts_processes=False)
