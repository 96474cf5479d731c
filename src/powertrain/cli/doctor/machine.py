"""Facts about this machine: GPUs, shared memory, limits, ports, name and disks."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import os
import resource
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from powertrain.cli.doctor.device_verdicts import GpuFacts
from powertrain.cli.doctor.processes import TorchFacts
from powertrain.cli.doctor.requirements import Requirement, parse_requirements
from powertrain.cli.doctor.verdicts import (
    DiskFacts,
    HostFacts,
    MemoryFacts,
    PortFacts,
    RayFacts,
    VersionFacts,
)
from powertrain.engine.limits import Limit, need_of
from powertrain.engine.system_limits import read_limits
from powertrain.errors import EngineError
from powertrain.storage.files import private_roots
from powertrain.storage.safety import remarks_about

#: Bytes written at most, and seconds, to measure a disk.
_DISK_BYTES, _DISK_TIMEOUT_S = 64 << 20, 2.0
_CHUNK_BYTES = 4 << 20
#: Seconds to wait for a connection on this machine, and for a cluster.
_CONNECT_TIMEOUT_S = 5.0
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def gather_versions() -> VersionFacts:
    """Return the versions that are installed and those that Powertrain's metadata requires."""
    try:
        lines = importlib.metadata.requires("powertrain") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    requirements = parse_requirements(lines)
    installed = {one.name: installed_version(one.name) for one in requirements}
    return VersionFacts(sys.version_info[:2], (3, 10), requirements, installed)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None where it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def gather_ray(requirements: list[Requirement]) -> RayFacts:
    """Return Ray's version, and whether the cluster of RAY_ADDRESS answers. Ray itself is not imported."""
    needed = next((one for one in requirements if one.name == "ray"), None)
    version = installed_version("ray") or ""
    address = os.environ.get("RAY_ADDRESS", "")
    if not version or not address or address in ("auto", "local"):
        return RayFacts(version, needed, "" if address == "local" else address, _no_cluster(address))
    host, _, port = address.rpartition("://")[2].partition("/")[0].rpartition(":")
    if not host or not port.isdecimal():
        return RayFacts(version, needed, address, "it is not of the form HOST:PORT")
    return RayFacts(version, needed, address, _why_unreachable(host.strip("[]"), int(port)))


def _no_cluster(address: str) -> str:
    """Return why "auto" finds no cluster: Ray names the newest one of a machine in a file."""
    if address != "auto":
        return ""
    root = os.environ.get("RAY_TMPDIR", tempfile.gettempdir())
    try:
        found = Path(root, "ray", "ray_current_cluster").read_text().strip()
    except OSError:
        return "no cluster runs on this machine"
    host, _, port = found.rpartition(":")
    return (
        _why_unreachable(host.strip("[]"), int(port)) if port.isdecimal() else f"{found!r} is not an address"
    )


def _why_unreachable(host: str, port: int) -> str:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


# --------------------------------------------------------------------------- devices


def gather_gpus(torch: TorchFacts) -> GpuFacts:
    """Return the GPUs of the driver beside those of torch."""
    driver, cuda, names, error = "", (0, 0), [], ""
    has_device_files = os.path.exists("/dev/nvidiactl")
    if has_device_files:
        import pynvml

        try:
            pynvml.nvmlInit()
            try:
                driver = _text(pynvml.nvmlSystemGetDriverVersion())
                number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
                cuda = (number // 1000, number % 1000 // 10)
                for index in range(pynvml.nvmlDeviceGetCount()):
                    names.append(_text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))))
            finally:
                pynvml.nvmlShutdown()
        except pynvml.NVMLError as raised:
            error = str(raised)
    built_for = None
    if torch.cuda:
        major, _, minor = torch.cuda.partition(".")
        built_for = (int(major), int(minor or 0))
    return GpuFacts(
        has_device_files,
        driver,
        error,
        cuda,
        names,
        built_for,
        torch.count,
        torch.error or torch.failure,
        os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name


# --------------------------------------------------------------------------- memory, limits, ports, name


def gather_shared_memory(path: str = "/dev/shm") -> MemoryFacts:
    """Return size and free space of the shared memory, after a byte was written to it."""
    probe = os.path.join(path, f"powertrain-doctor-{secrets.token_hex(8)}")
    try:
        usage = shutil.disk_usage(path)
        with _removed(probe), open(probe, "xb") as file:
            file.write(b"\0")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            return MemoryFacts(path, usage.total, 0)
        return MemoryFacts(path, error=error.strerror or str(error))
    return MemoryFacts(path, usage.total, usage.free)


def gather_limits(workers: int) -> tuple[list[Limit], int]:
    """Return the limits for a run with so many workers, and the soft limit of open files."""
    tasks = need_of(workers, connected=True, starts_processes=True).tasks
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return list(read_limits(tasks)), sys.maxsize if soft == resource.RLIM_INFINITY else soft


def gather_ports() -> PortFacts:
    """Listen at a free port of the loopback interface, connect to it, and try the port of MASTER_PORT."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S):
                pass
    except OSError as error:
        return PortFacts(error.strerror or str(error))
    low, high = 0, 0
    with contextlib.suppress(OSError, ValueError):
        low, high = map(int, _PORT_RANGE.read_text().split())
    wanted = os.environ.get("MASTER_PORT", "")
    if not wanted.isdecimal():
        return PortFacts("", low, high, 0, "")
    return PortFacts("", low, high, int(wanted), _why_taken(int(wanted)))


def _why_taken(port: int) -> str:
    try:
        socket.create_server(("", port)).close()
    except (OSError, OverflowError) as error:
        return getattr(error, "strerror", "") or str(error)
    return ""


def gather_host(name: str = "") -> HostFacts:
    """Look up the name of this machine, and try to bind its addresses."""
    name = name or socket.gethostname()
    started = time.monotonic()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return HostFacts(name, error=getattr(error, "strerror", "") or str(error))
    seconds = time.monotonic() - started
    places = {str(place[0]): (family, place) for family, _, _, _, place in found}
    foreign = [address for address, (family, place) in places.items() if not _can_bind(family, place)]
    return HostFacts(name, list(places), "", foreign, seconds)


def _can_bind(family: socket.AddressFamily, place: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((place[0], 0, *place[2:]))
    except OSError:
        return False
    return True


def gather_runtime_directories() -> tuple[str, list[str], list[str]]:
    """Return why there are no private directories, notices about those that were passed over, and the chosen ones."""
    private_roots.take_notices()
    try:
        chosen = [private_roots.runtime_root(), private_roots.lasting_root(), private_roots.temporary_root()]
    except EngineError as error:
        return str(error), [], []
    notices = private_roots.take_notices()
    for path in chosen if notices else []:
        with contextlib.suppress(
            OSError
        ):  # one that stands in for the usual one was made; runs make it again
            path.rmdir()
    return "", notices, list(dict.fromkeys(map(str, chosen)))


# --------------------------------------------------------------------------- disks


def gather_disk(purpose: str, path: Path, *, with_remarks: bool = False) -> DiskFacts:
    """Write a file in ``path``, or the nearest directory above it that exists, and measure it."""
    place = path.expanduser().absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    try:
        free = shutil.disk_usage(place).free
        status = os.statvfs(place)
        speed = _write_speed(place, min(_DISK_BYTES, free // 4))
    except OSError as error:
        return DiskFacts(purpose, str(place), error=error.strerror or str(error))
    inodes = status.f_favail if status.f_files else -1
    remarks = remarks_about(path) if with_remarks else []
    return DiskFacts(purpose, str(place), free, inodes, speed, "", remarks)


def _write_speed(place: Path, most: int) -> float:
    """Return bytes per second of a file that is written and flushed."""
    probe = place / f".powertrain-doctor-{secrets.token_hex(8)}"
    chunk = memoryview(secrets.token_bytes(min(_CHUNK_BYTES, max(1, most))))
    started = time.monotonic()
    written = 0
    with _removed(str(probe)), open(probe, "xb", buffering=0) as file:
        while written == 0 or (written < most and time.monotonic() - started < _DISK_TIMEOUT_S):
            written += file.write(chunk)
        os.fsync(file.fileno())
        seconds = time.monotonic() - started
    return written / max(seconds, 1e-9)


@contextlib.contextmanager
def _removed(path: str) -> Iterator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
