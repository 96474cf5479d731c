"""``powertrain doctor``: checks of this machine and of the storage, with the fix for each problem."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from powertrain.cli.common.output import print_json, print_line, print_message, print_status
from powertrain.cli.doctor import device_verdicts, machine, processes, stores, verdicts
from powertrain.cli.doctor.verdicts import Check
from powertrain.lookup.finding import default_storage
from powertrain.storage import open_storage
from powertrain.storage.files.private_roots import lasting_root
from powertrain.version import __version__


def doctor(
    storage: Annotated[
        str,
        typer.Option(
            help="Storage path to check; the default storage path when omitted.", show_default=False
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Check this machine and a storage path for problems of runs. Exits with 1 if a check fails."""
    checks = []
    for check in run_checks(storage or default_storage(), _no_status if json else _show_status):
        checks.append(check)
        if not json:
            _print_check(check)
    verdict = verdicts.overall(checks)
    if json:
        print_json({"version": __version__, "verdict": verdict, "checks": [asdict(one) for one in checks]})
    else:
        _print_summary(checks)
    raise typer.Exit(1 if verdict == "fail" else 0)


def run_checks(storage: str, show: Callable[[str], None]) -> Iterator[Check]:
    """Yield the checks, each as soon as its facts are gathered; ``show`` is given what is being done."""
    versions = machine.gather_versions()
    yield verdicts.check_versions(versions)
    show("importing torch in a new process")
    torch = processes.gather_torch()
    yield device_verdicts.check_start_method(
        device_verdicts.StartFacts(sys.platform, torch.unsafe, torch.failure)
    )
    gpus = machine.gather_gpus(torch)
    yield device_verdicts.check_gpus(gpus)
    if not torch.failure:
        show("an all_reduce of two processes")
        yield device_verdicts.check_collective(processes.gather_collective("gloo", 2))
        if torch.nccl and torch.count:
            show("an all_reduce with NCCL")
            yield device_verdicts.check_collective(processes.gather_collective("nccl", min(2, torch.count)))
    show("memory, limits, ports and names")
    yield verdicts.check_shared_memory(machine.gather_shared_memory())
    workers = max(len(os.sched_getaffinity(0)), torch.count, 2)
    limits, soft_files = machine.gather_limits(workers)
    yield verdicts.check_limits(limits, soft_files, workers)
    yield verdicts.check_ports(machine.gather_ports())
    yield verdicts.check_hostname(machine.gather_host())
    error, notices, paths = machine.gather_runtime_directories()
    yield verdicts.check_runtime_directories(error, notices, paths)
    yield verdicts.check_ray(machine.gather_ray(list(versions.requirements)))
    yield from _storage_checks(storage, show, has_scratch=not error)


def _storage_checks(storage: str, show: Callable[[str], None], *, has_scratch: bool) -> Iterator[Check]:
    show("the storage")
    facts, skew = stores.gather_storage(storage)
    yield verdicts.check_storage(facts)
    yield verdicts.check_clock(verdicts.ClockFacts(time.time(), skew))
    show("the speed of the disks")
    real = None if facts.error else open_storage(storage).local_path("probe")
    if real is not None:
        yield verdicts.check_disk(machine.gather_disk("storage", real.parent, with_remarks=True))
    if has_scratch:
        yield verdicts.check_disk(machine.gather_disk("scratch", Path(lasting_root())))


def _show_status(text: str) -> None:
    if sys.stderr.isatty():
        print_status(f"checking: {text}")


def _no_status(text: str) -> None:
    """Show nothing: the output is for a program."""


def _print_check(check: Check) -> None:
    if sys.stderr.isatty():
        print_status("")
    print_line(f"{check.verdict:<5} {check.name:<20} {check.why}")
    if check.fix and check.verdict != "ok":
        print_message(f"{'':<5} {'':<20} Fix: {check.fix}")


def _print_summary(checks: list[Check]) -> None:
    counts = {verdict: sum(one.verdict == verdict for one in checks) for verdict in ("ok", "warn", "fail")}
    print_line(f"{counts['ok']} ok, {counts['warn']} warnings, {counts['fail']} failed")
