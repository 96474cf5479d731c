"""The verdicts of the doctor: which facts are fine, which warn, and which fail; each problem has a fix."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.cli.doctor import device_verdicts, verdicts
from powertrain.cli.doctor.device_verdicts import CollectiveFacts, GpuFacts, StartFacts
from powertrain.cli.doctor.requirements import Requirement, parse_requirements, release, satisfies
from powertrain.cli.doctor.verdicts import (
    Check,
    ClockFacts,
    DiskFacts,
    HostFacts,
    MemoryFacts,
    PortFacts,
    RayFacts,
    StorageFacts,
    VersionFacts,
)
from powertrain.engine.limits import Limit

GIB = 1 << 30
GPU: dict[str, Any] = {"has_device_files": True, "driver": "570.1", "driver_cuda": (12, 8), "names": ["H200"]}
NEEDED = Requirement("ray", ">=", "2.50", "ray")
TORCH = Requirement("torch", ">=", "2.6")


def versions(**installed: str | None) -> VersionFacts:
    return VersionFacts((3, 11), (3, 10), [TORCH, NEEDED], installed)


CASES: list[tuple[Callable[[Any], Check], Any, str, str]] = [
    (verdicts.check_versions, versions(torch="2.13.0+cpu", ray=None), "ok", "torch 2.13.0"),
    (verdicts.check_versions, versions(torch="2.5.1", ray=None), "fail", "torch 2.5.1 is not >=2.6"),
    (verdicts.check_versions, versions(torch=None, ray=None), "fail", "torch is missing"),
    (verdicts.check_versions, versions(torch="2.6", ray="2.9"), "warn", r"powertrain\[ray\] needs"),
    (verdicts.check_versions, VersionFacts((3, 9), (3, 10), [], {}), "fail", "Python 3.9 is too old"),
    (verdicts.check_versions, VersionFacts((3, 11), (3, 10), [], {}), "warn", "no package metadata"),
    (verdicts.check_ray, RayFacts("", NEEDED), "ok", "not installed"),
    (verdicts.check_ray, RayFacts("", NEEDED, "head:1"), "fail", "Ray is not installed"),
    (verdicts.check_ray, RayFacts("2.9.0", NEEDED), "warn", "not >=2.50"),
    (verdicts.check_ray, RayFacts("2.60.0", NEEDED), "ok", "no cluster is configured"),
    (verdicts.check_ray, RayFacts("2.60.0", NEEDED, "head:1"), "ok", "answers"),
    (verdicts.check_ray, RayFacts("2.60.0", NEEDED, "head:1", "refused"), "fail", "does not answer: refused"),
    (device_verdicts.check_gpus, GpuFacts(), "ok", "no NVIDIA GPU"),
    (device_verdicts.check_gpus, GpuFacts(True, driver_error="mismatch"), "fail", "cannot use it: mismatch"),
    (device_verdicts.check_gpus, GpuFacts(**GPU), "warn", "without CUDA"),
    (device_verdicts.check_gpus, GpuFacts(**GPU, torch_cuda=(12, 6), torch_count=1), "ok", "CUDA 12.6"),
    (
        device_verdicts.check_gpus,
        GpuFacts(**GPU, torch_cuda=(13, 0)),
        "fail",
        "up to 12.8, and torch .* 13.0",
    ),
    (device_verdicts.check_gpus, GpuFacts(**GPU, torch_cuda=(12, 6), torch_error="dead"), "fail", "dead"),
    (device_verdicts.check_gpus, GpuFacts(**GPU, torch_cuda=(12, 6), visible=""), "warn", "hides every GPU"),
    (
        device_verdicts.check_gpus,
        GpuFacts(**{**GPU, "names": ["A", "A"]}, torch_cuda=(12, 6), torch_count=1),
        "warn",
        "lists 2 GPUs, and torch can use 1",
    ),
    (device_verdicts.check_collective, CollectiveFacts("gloo", 2, "", 1.0), "ok", "2 processes took 1.0 s"),
    (device_verdicts.check_collective, CollectiveFacts("gloo", 2, "refused"), "fail", "failed: refused"),
    (device_verdicts.check_collective, CollectiveFacts("nccl", 2, "refused"), "fail", "failed: refused"),
    (device_verdicts.check_start_method, StartFacts("linux"), "ok", "forked"),
    (device_verdicts.check_start_method, StartFacts("linux", "a thread"), "warn", "a thread"),
    (device_verdicts.check_start_method, StartFacts("linux", error="no torch"), "fail", "no torch"),
    (device_verdicts.check_start_method, StartFacts("darwin"), "fail", "darwin"),
    (verdicts.check_shared_memory, MemoryFacts("/dev/shm", GIB, GIB), "ok", "1.0 GiB"),
    (verdicts.check_shared_memory, MemoryFacts("/dev/shm", GIB, 0), "fail", "is full"),
    (verdicts.check_shared_memory, MemoryFacts("/dev/shm", 64 << 20, 64 << 20), "warn", "is small"),
    (verdicts.check_shared_memory, MemoryFacts("/dev/shm", error="denied"), "fail", "denied"),
    (verdicts.check_ports, PortFacts("", 32768, 60999), "ok", "reached"),
    (verdicts.check_ports, PortFacts("refused"), "fail", "refused"),
    (
        verdicts.check_ports,
        PortFacts("", 32768, 60999, 29500, "in use"),
        "fail",
        "MASTER_PORT=29500 .* in use",
    ),
    (verdicts.check_ports, PortFacts("", 60000, 60999), "warn", "only 1,000 ports"),
    (verdicts.check_hostname, HostFacts("a", ["127.0.0.1"]), "ok", "127.0.0.1"),
    (verdicts.check_hostname, HostFacts("a", error="unknown"), "warn", "unknown"),
    (verdicts.check_hostname, HostFacts("a", ["10.0.0.9"], "", ["10.0.0.9"]), "warn", "not an address of"),
    (verdicts.check_hostname, HostFacts("a", ["::1", "10.0.0.9"], "", ["10.0.0.9"]), "ok", "::1"),
    (verdicts.check_hostname, HostFacts("a", ["127.0.0.1"], "", (), 9.0), "warn", "took 9.0 s"),
    (verdicts.check_clock, ClockFacts(1.8e9), "ok", "not known"),
    (verdicts.check_clock, ClockFacts(1.8e9, 0.2), "ok", "agree to 1 s"),
    (verdicts.check_clock, ClockFacts(0.0, 0.2), "fail", "is wrong"),
    (verdicts.check_clock, ClockFacts(1.8e9, -60.0), "warn", "60 s behind"),
    (verdicts.check_clock, ClockFacts(1.8e9, 5000.0), "fail", "5000 s ahead of .* refuse"),
    (verdicts.check_disk, DiskFacts("storage", "/d", 9 * GIB, -1, 1e8), "ok", "100 MB/s"),
    (verdicts.check_disk, DiskFacts("storage", "/d", error="denied"), "fail", "denied"),
    (verdicts.check_disk, DiskFacts("storage", "/d", 1 << 20, -1, 1e8), "fail", "only 1.0 MiB free"),
    (verdicts.check_disk, DiskFacts("scratch", "/d", GIB, -1, 1e8), "warn", "only 1.0 GiB free"),
    (verdicts.check_disk, DiskFacts("scratch", "/d", 9 * GIB, 10, 1e8), "warn", "10 more files"),
    (verdicts.check_disk, DiskFacts("scratch", "/d", 9 * GIB, -1, 1e6), "warn", "slow: 1 MB/s"),
    (
        verdicts.check_disk,
        DiskFacts("storage", "/d", 9 * GIB, -1, 1e8, "", ["It is in memory. Use a disk."]),
        "warn",
        "in memory",
    ),
    (verdicts.check_storage, StorageFacts("/s"), "ok", "written, read, listed and cleared"),
    (verdicts.check_storage, StorageFacts("/s", "It cannot be written."), "fail", "cannot be written"),
    (verdicts.check_storage, StorageFacts("/s", lacks=["No locks."]), "warn", "No locks"),
]


# Numbers as ids: a test with the name of the cluster's library in its id counts as one that needs a cluster.
@pytest.mark.parametrize(("check", "facts", "verdict", "why"), CASES, ids=map(str, range(len(CASES))))
def test_facts_lead_to_a_verdict(check: Callable[[Any], Check], facts: Any, verdict: str, why: str) -> None:
    found = check(facts)
    assert found.verdict == verdict
    assert re.search(why, found.why), found.why
    assert found.why.endswith(".")
    assert bool(found.fix) == (verdict != "ok"), found


def files(amount: int) -> Limit:
    return Limit("worker_files", amount, "the limit of files", "Raise it with 'ulimit'")


def test_limits_warn_where_fewer_workers_fit_and_fail_where_none_does() -> None:
    assert verdicts.check_limits([files(10_000)], 4096, 8).verdict == "ok"
    fewer = verdicts.check_limits([files(32)], 4096, 8)
    assert (fewer.verdict, fewer.fix) == ("warn", "Raise it with 'ulimit', or ask for at most 4 worker(s).")
    assert "needs at least 40 open files" in fewer.why
    assert verdicts.check_limits([files(5)], 4096, 8).verdict == "fail"
    assert verdicts.check_limits([files(10_000)], 256, 8).verdict == "warn"


def test_runtime_directories_fail_without_one_and_warn_about_one_that_stands_in() -> None:
    assert verdicts.check_runtime_directories("", [], ["/run/a", "/var/b"]).why.endswith("/run/a and /var/b.")
    assert verdicts.check_runtime_directories("", ["It was passed over."], ["/a"]).verdict == "warn"
    assert verdicts.check_runtime_directories("None is private.", [], []).verdict == "fail"


def test_the_worst_verdict_is_that_of_all() -> None:
    ok, warn, fail = (Check("a", verdict, "Why.") for verdict in ("ok", "warn", "fail"))
    assert verdicts.overall([ok, fail, warn]) == "fail"
    assert verdicts.overall([ok, warn]) == "warn"
    assert verdicts.overall([ok]) == verdicts.overall([]) == "ok"


def test_requirements_are_read_with_their_extra_and_without_those_of_developers() -> None:
    lines = [
        "torch>=2.6",
        "ray[train]==2.60.0; extra == 'bench'",
        'ray>=2.50 ; extra == "ray"',
        "pandas-stubs",
    ]
    assert parse_requirements(lines) == [TORCH, NEEDED]
    assert TORCH.text == "torch>=2.6"


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.13.0+cpu", (2, 13)), ("3.0rc1", (3,)), ("1!2.4", (2, 4)), ("12.535.161", (12, 535, 161)), ("x", ())],
)
def test_a_release_is_its_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


@given(
    st.lists(st.integers(0, 99), min_size=1, max_size=4), st.lists(st.integers(0, 99), min_size=1, max_size=4)
)
def test_versions_compare_as_their_numbers_padded_with_zeros(have: list[int], need: list[int]) -> None:
    padded = [(*one, *[0] * (4 - len(one))) for one in (have, need)]
    texts = [".".join(map(str, one)) for one in (have, need)]
    assert satisfies(texts[0], Requirement("a", ">=", texts[1])) == (padded[0] >= padded[1])
    assert satisfies(texts[0], Requirement("a", "==", texts[1])) == (padded[0] == padded[1])
