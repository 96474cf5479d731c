"""Verdicts of the doctor about one machine. Pure: each is a function of facts that other modules gather.

A fault that ends or refuses a run is ``fail``; one that slows it down, or that matters only to some runs, is ``warn``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from powertrain.cli.doctor.requirements import Requirement, satisfies
from powertrain.engine.limits import Limit, most_workers, problem
from powertrain.storage.safety import size_text

Verdict = Literal["ok", "warn", "fail"]

_MIB, _GIB = 1 << 20, 1 << 30
#: Free disk space below which no checkpoint fits, and below which few do.
_NO_SPACE_BYTES, _LITTLE_SPACE_BYTES = 256 * _MIB, 2 * _GIB
_FEW_INODES = 10_000
#: Bytes per second below which checkpoints are held up by the disk.
_SLOW_DISK = 20e6
#: Shared memory below which the batches of a DataLoader's worker processes do not fit, and what containers have by
#: default.
_NO_SHARED_MEMORY, _LITTLE_SHARED_MEMORY = 16 * _MIB, 256 * _MIB
#: Soft limit of open files below which the worker processes of a DataLoader run out of them.
_FEW_FILES = 1024
#: Ports for outgoing connections: each pair of ranks on a machine takes some.
_FEW_PORTS = 2000
#: A time before the first release or this far in the future is wrong.
_EARLIEST_TIME, _LATEST_TIME = 1_735_689_600.0, 4_102_444_800.0
#: Seconds between the clocks of this machine and the storage: visible in reports, and refused by object stores.
_SKEW_SEEN_S, _SKEW_REFUSED_S = 30.0, 900.0
_SLOW_LOOKUP_S = 2.0


@dataclass(frozen=True)
class Check:
    """The outcome of one check: a sentence that says why, and the fix where there is something to fix."""

    name: str
    verdict: Verdict
    why: str
    fix: str = ""


def overall(checks: Sequence[Check]) -> Verdict:
    """Return the worst verdict of all checks."""
    order: tuple[Verdict, ...] = ("fail", "warn", "ok")
    return next((verdict for verdict in order if any(one.verdict == verdict for one in checks)), "ok")


# --------------------------------------------------------------------------- packages


@dataclass(frozen=True)
class VersionFacts:
    """Versions that are installed, by name of the package (None where it is missing), and the required ones."""

    python: tuple[int, int]
    needs_python: tuple[int, int]
    requirements: Sequence[Requirement]
    installed: Mapping[str, str | None]


def check_versions(facts: VersionFacts) -> Check:
    """Compare installed packages with the requirements of Powertrain and of its extras."""
    if facts.python < facts.needs_python:
        have, need = (".".join(map(str, version)) for version in (facts.python, facts.needs_python))
        return Check(
            "versions", "fail", f"Python {have} is too old.", f"Use Python {need} or later for Powertrain."
        )
    if not facts.requirements:
        return Check(
            "versions",
            "warn",
            "Powertrain has no package metadata here, so versions cannot be compared.",
            "Install it with pip, from the package index or with 'pip install -e .' in a checkout.",
        )
    missing: list[Requirement] = []
    wrong: list[tuple[Requirement, str]] = []
    of_extras: list[tuple[Requirement, str]] = []
    for one in facts.requirements:
        version = facts.installed.get(one.name)
        if version is None:
            missing += [one] if not one.extra else []
        elif not satisfies(version, one):
            (of_extras if one.extra else wrong).append((one, version))
    if missing or wrong:
        words = [f"{one.name} is missing" for one in missing]
        words += [f"{one.name} {version} is not {one.operator}{one.version}" for one, version in wrong]
        needed = " ".join(f"'{one.text}'" for one in [*missing, *(one for one, _ in wrong)])
        return Check("versions", "fail", f"{_listed(words)}.", f"pip install {needed}")
    if of_extras:
        words = [
            f"{one.name} {version} is not {one.operator}{one.version}, which powertrain[{one.extra}] needs"
            for one, version in of_extras
        ]
        needed = " ".join(f"'{one.text}'" for one, _ in of_extras)
        return Check("versions", "warn", f"{_listed(words)}.", f"pip install {needed}")
    shown = [f"{name} {facts.installed[name]}" for name in ("torch", "pyarrow") if facts.installed.get(name)]
    python = ".".join(map(str, facts.python))
    return Check("versions", "ok", f"Python {python}, {', '.join(shown)} and all other packages fit.")


@dataclass(frozen=True)
class RayFacts:
    """Ray on this machine: its version ("" where it is missing), the needed one, and the configured cluster."""

    version: str
    needed: Requirement | None
    address: str = ""
    error: str = ""


def check_ray(facts: RayFacts) -> Check:
    """Check Ray's version, and that the cluster of ``RAY_ADDRESS`` answers."""
    if not facts.version:
        if facts.address:
            return Check(
                "ray",
                "fail",
                f"RAY_ADDRESS names the cluster {facts.address}, and Ray is not installed.",
                "pip install 'powertrain[ray]', or unset RAY_ADDRESS.",
            )
        return Check("ray", "ok", "Ray is not installed; only runs on several machines need it.")
    if facts.needed is not None and not satisfies(facts.version, facts.needed):
        return Check(
            "ray",
            "warn",
            f"Ray {facts.version} is not {facts.needed.operator}{facts.needed.version}, so the Ray engine may fail.",
            f"pip install '{facts.needed.text}'",
        )
    if not facts.address:
        return Check(
            "ray", "ok", f"Ray {facts.version}; RAY_ADDRESS is not set, so no cluster is configured."
        )
    if facts.error:
        return Check(
            "ray",
            "fail",
            f"The cluster of RAY_ADDRESS={facts.address} does not answer: {facts.error}.",
            "Start it with 'ray start --head', correct RAY_ADDRESS, or unset it.",
        )
    return Check("ray", "ok", f"Ray {facts.version}; the cluster at {facts.address} answers.")


# --------------------------------------------------------------------------- the machine


@dataclass(frozen=True)
class MemoryFacts:
    """A file system in memory: its path, size and free bytes, and why it cannot be written."""

    path: str
    total: int = 0
    free: int = 0
    error: str = ""


def check_shared_memory(facts: MemoryFacts) -> Check:
    """Check the shared memory that loaders and NCCL pass data in."""
    larger = (
        "Give the container more ('docker run --shm-size=8g', or an emptyDir of medium Memory at /dev/shm)."
    )
    if facts.error:
        return Check(
            "shared_memory", "fail", f"Shared memory at {facts.path} cannot be used: {facts.error}.", larger
        )
    sizes = f"{size_text(facts.total)}, {size_text(facts.free)} free"
    if facts.free < _NO_SHARED_MEMORY:
        fix = (
            larger
            if facts.total < _LITTLE_SHARED_MEMORY
            else f"Remove files that ended programs left in {facts.path}."
        )
        return Check("shared_memory", "fail", f"Shared memory at {facts.path} is full: {sizes}.", fix)
    if facts.total < _LITTLE_SHARED_MEMORY:
        return Check(
            "shared_memory",
            "warn",
            f"Shared memory at {facts.path} is small: {sizes}. A DataLoader's workers get 'Bus error' when full.",
            larger,
        )
    return Check("shared_memory", "ok", f"{facts.path}: {sizes}.")


def check_limits(limits: Sequence[Limit], soft_files: int, workers: int) -> Check:
    """Check the limits of open files and processes for a run with one worker per core or GPU."""
    fit = most_workers(limits, workers, connected=True, starts_processes=True)
    if fit < workers:
        text = problem(
            f"A run with {workers} worker(s)", workers, limits, connected=True, starts_processes=True
        )
        why, _, fix = text.partition(". ")
        return Check("limits", "warn" if fit else "fail", f"{why}.", fix)
    if soft_files < _FEW_FILES:
        return Check(
            "limits",
            "warn",
            f"The soft limit for open files is {soft_files:,}; a DataLoader's worker processes may run out of them.",
            "Raise it with 'ulimit -n 65536' before the script starts.",
        )
    return Check("limits", "ok", f"Open files and processes suffice for {workers} workers.")


@dataclass(frozen=True)
class PortFacts:
    """Ports of this machine.

    Attributes:
        error: Why a connection over loopback failed.
        low: The first port for outgoing connections.
        high: The last one.
        wanted: The port of MASTER_PORT; 0 where it is not set.
        wanted_error: Why that port cannot be listened at.
    """

    error: str = ""
    low: int = 0
    high: int = 0
    wanted: int = 0
    wanted_error: str = ""


def check_ports(facts: PortFacts) -> Check:
    """Check that a free port can be listened at and reached, and MASTER_PORT where it is set."""
    if facts.error:
        return Check(
            "ports",
            "fail",
            f"A connection to a port of this machine failed: {facts.error}.",
            "Allow TCP connections on the loopback interface (127.0.0.1) in the firewall or container.",
        )
    if facts.wanted_error:
        return Check(
            "ports",
            "fail",
            f"The port of MASTER_PORT={facts.wanted} cannot be listened at: {facts.wanted_error}.",
            "Unset MASTER_PORT, which Powertrain does not need, or end the process that has the port.",
        )
    count = facts.high - facts.low + 1
    if facts.high and count < _FEW_PORTS:
        return Check(
            "ports",
            "warn",
            f"The machine has only {count:,} ports for outgoing connections ({facts.low} to {facts.high}).",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )
    return Check("ports", "ok", "Ports of this machine can be listened at and reached.")


@dataclass(frozen=True)
class HostFacts:
    """The name of this machine, its addresses, and why they cannot be used."""

    name: str
    addresses: Sequence[str] = ()
    error: str = ""
    foreign: Sequence[str] = ()
    seconds: float = 0.0


def check_hostname(facts: HostFacts) -> Check:
    """Check that the host name leads to an address of this machine."""
    hosts = f"Add a line '127.0.1.1 {facts.name}' to /etc/hosts, or correct the one that is there."
    if facts.error:
        return Check(
            "hostname",
            "warn",
            f"The host name {facts.name!r} has no address: {facts.error}. Gloo and Ray look it up.",
            hosts,
        )
    if facts.foreign and len(facts.foreign) == len(facts.addresses):
        return Check(
            "hostname",
            "warn",
            f"The host name {facts.name!r} leads to {_listed(facts.foreign)}, which is not an address of this machine.",
            hosts,
        )
    if facts.seconds > _SLOW_LOOKUP_S:
        return Check(
            "hostname",
            "warn",
            f"Looking up the host name {facts.name!r} took {facts.seconds:.1f} s, which delays every process group.",
            hosts,
        )
    return Check("hostname", "ok", f"{facts.name!r} is {_listed(facts.addresses)}.")


# --------------------------------------------------------------------------- time and storage


@dataclass(frozen=True)
class ClockFacts:
    """The time of this machine, and of the storage less it (None where it is not known)."""

    now: float
    storage_skew: float | None = None


def check_clock(facts: ClockFacts) -> Check:
    """Check that the time is possible and that the storage has the same."""
    fix = "Set the clock by NTP (chrony, systemd-timesyncd)."
    if not _EARLIEST_TIME <= facts.now <= _LATEST_TIME:
        return Check("clock", "fail", f"The clock is wrong: it shows {facts.now:.0f} s since 1970.", fix)
    skew = facts.storage_skew
    if skew is None:
        return Check("clock", "ok", "The time is possible; the storage's clock is not known.")
    direction = "ahead of" if skew > 0 else "behind"
    words = f"The storage's clock is {abs(skew):.0f} s {direction} this machine's"
    if abs(skew) > _SKEW_REFUSED_S:
        return Check("clock", "fail", f"{words}; object stores refuse requests then.", fix)
    if abs(skew) > _SKEW_SEEN_S:
        return Check("clock", "warn", f"{words}, so ages of runs and leases are shown wrong.", fix)
    return Check("clock", "ok", f"This machine and the storage agree to {max(1.0, abs(skew)):.0f} s.")


@dataclass(frozen=True)
class DiskFacts:
    """A directory on a disk: free bytes and inodes (-1 where unknown), speed in bytes per second, and remarks."""

    purpose: str
    path: str
    free: int = 0
    free_inodes: int = -1
    speed: float = 0.0
    error: str = ""
    remarks: Sequence[str] = ()


def check_disk(facts: DiskFacts) -> Check:
    """Check space, speed and durability of a directory."""
    name, where = f"disk_{facts.purpose}", repr(facts.path)
    another = "choose another storage path" if facts.purpose == "storage" else "set TMPDIR to another disk"
    if facts.error:
        return Check(name, "fail", f"{where} cannot be written: {facts.error}.", f"Mend it, or {another}.")
    space = f"{size_text(facts.free)} free"
    if facts.free < _NO_SPACE_BYTES:
        return Check(name, "fail", f"{where} has only {space}.", f"Free some space, or {another}.")
    if 0 <= facts.free_inodes < _FEW_INODES:
        return Check(
            name,
            "warn",
            f"{where} has room for only {facts.free_inodes:,} more files.",
            f"Remove small files, or {another}.",
        )
    if facts.free < _LITTLE_SPACE_BYTES:
        return Check(name, "warn", f"{where} has only {space}.", f"Free some space, or {another}.")
    speed = f"{facts.speed / 1e6:,.0f} MB/s flushed to the disk"
    if facts.speed < _SLOW_DISK:
        return Check(
            name, "warn", f"{where} is slow: {speed}.", f"Checkpoints will take long there; {another}."
        )
    if facts.remarks:
        why, _, fix = facts.remarks[0].rpartition(". ")
        return Check(name, "warn", f"{why}.", fix)
    return Check(name, "ok", f"{where}: {space}, {speed}.")


@dataclass(frozen=True)
class StorageFacts:
    """A storage after values were put, read, listed and deleted: why that failed, and promises that it lacks."""

    uri: str
    error: str = ""
    fix: str = ""
    lacks: Sequence[str] = ()
    seconds: float = 0.0


def check_storage(facts: StorageFacts) -> Check:
    """Check that a storage keeps the promises that runs rely on."""
    if facts.error:
        return Check("storage", "fail", facts.error, facts.fix or "Choose another storage path.")
    if facts.lacks:
        return Check(
            "storage", "warn", facts.lacks[0], "Give one run at a time this storage path, or choose another."
        )
    return Check(
        "storage", "ok", f"{facts.uri!r} was written, read, listed and cleared in {facts.seconds:.2f} s."
    )


def check_runtime_directories(error: str, notices: Sequence[str], paths: Sequence[str]) -> Check:
    """Check that this user has private directories for sockets and scratch files."""
    fix = "Set XDG_RUNTIME_DIR and TMPDIR to a directory of your own that others cannot write to."
    if error:
        return Check("runtime_directories", "fail", error, fix)
    if notices:
        return Check("runtime_directories", "warn", notices[0], fix)
    return Check("runtime_directories", "ok", f"Sockets and scratch files go to {_listed(paths)}.")


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else "".join(words)
