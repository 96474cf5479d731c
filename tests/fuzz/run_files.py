"""Damage every file of two small runs and read them with everything that reads runs.

``python -m tests.fuzz.run_files --seed 1 --budget 600``: for so many seconds; 0 for every byte of every file, which
takes hours on two cores. ``--part 3/8`` takes the third of eight parts. Readers run in processes of their own, so that
a crash or a hang is counted and the others continue.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.fuzz import small_runs
from tests.fuzz.damage import Damage, every_damage, repair
from tests.fuzz.judging import CRASH, HANG, Tally
from tests.fuzz.readers import READERS, WITHOUT_HASH, Reading, read_with

#: A reader that takes longer than this hangs.
HANG_SECONDS = 30.0
#: Readers that never open files whose names start so.
_ENDS = ("logs/", "final_summary.json", "return_value.", "trainer.")
_NO_METRICS = (*_ENDS, "checkpoints/", "commits/", "telemetry/", "run.json")
_SKIPPED = {
    "resume": _ENDS,
    "frame": _NO_METRICS,
    "curves": _NO_METRICS,
    "picture": (*_ENDS, "commits/", "telemetry/"),
    "restore": ("checkpoints/", "commits/", "telemetry/", "metrics/", "journal/", "logs/"),
}
_fork = multiprocessing.get_context("fork")


def names_for(damage: Damage | None) -> list[str]:
    """The readers that a damage concerns."""
    names = [*READERS, *WITHOUT_HASH]
    if damage is None:
        return names
    return [name for name in names if not damage.file.startswith(_SKIPPED.get(name, ("\0",)))]


def _serve(channel: Connection, source: Path, own: Path) -> None:
    """Read a copy of the runs, damaged as asked, until there is nothing more to do."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    runs = own / "runs"
    shutil.copytree(source, runs)
    while (damage := channel.recv()) is not None:
        content = (runs / damage.run / damage.file).read_bytes() if damage.file else b""
        if damage.file:
            damage.apply(runs)
        found = {}
        for name in names_for(damage if damage.file else None):
            channel.send(name)
            found[name] = read_with(name, runs / damage.run, own)
        if damage.file:
            repair(runs, damage, content)
        channel.send(found)


@dataclass
class _Worker:
    process: Any
    channel: Connection
    own: Path
    damage: Damage
    reader: str = ""
    since: float = 0.0


class Pool:
    """Processes that read damaged runs, replaced when they die or hang."""

    def __init__(self, source: Path, scratch: Path, count: int) -> None:
        self._source, self._scratch, self._count = source, scratch, count
        self._made = 0

    def readings(
        self, damages: Iterable[Damage], deadline: float = 0.0
    ) -> Iterator[tuple[Damage, dict[str, Reading] | str, str]]:
        """(damage, what its readers made of it) as they come; or :data:`CRASH` or :data:`HANG`, and the reader."""
        waiting = iter(damages)
        workers: list[_Worker] = []
        is_over = False
        while True:
            while len(workers) < self._count and not is_over:
                is_over = bool(deadline) and time.monotonic() > deadline
                damage = next(waiting, None) if not is_over else None
                if damage is None:
                    is_over = True
                    break
                workers.append(self._start(damage))
            if not workers:
                return
            for worker in list(workers):
                for answer in self._answers(worker):
                    yield answer
                    over = (bool(deadline) and time.monotonic() > deadline) or is_over
                    damage = None if over or isinstance(answer[1], str) else next(waiting, None)
                    if damage is None:
                        self._end(worker)
                        workers.remove(worker)
                    else:
                        self._give(worker, damage)
            wait([worker.channel for worker in workers], 0.5)

    def _start(self, damage: Damage) -> _Worker:
        self._made += 1
        own = self._scratch / f"worker-{self._made}"
        own.mkdir()
        here, there = _fork.Pipe()
        process = _fork.Process(target=_serve, args=(there, self._source, own), daemon=True)
        process.start()
        there.close()
        worker = _Worker(process, here, own, damage)
        self._give(worker, damage)
        return worker

    def _give(self, worker: _Worker, damage: Damage) -> None:
        worker.damage, worker.reader, worker.since = damage, "", time.monotonic()
        worker.channel.send(damage)

    def _answers(self, worker: _Worker) -> Iterator[tuple[Damage, dict[str, Reading] | str, str]]:
        """At most one."""
        try:
            while worker.channel.poll():
                message = worker.channel.recv()
                worker.since = time.monotonic()
                if not isinstance(message, str):
                    yield worker.damage, message, ""
                    return
                worker.reader = message
        except (EOFError, ConnectionResetError):
            yield worker.damage, CRASH, worker.reader
            return
        if time.monotonic() - worker.since > HANG_SECONDS:
            yield worker.damage, HANG, worker.reader

    def _end(self, worker: _Worker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.channel.close()
        shutil.rmtree(worker.own, ignore_errors=True)


def fuzz(
    scratch: Path,
    seed: int,
    budget: float,
    most: int = 0,
    processes: int = 2,
    kinds: Sequence[str] = (),
    part: tuple[int, int] = (1, 1),
    progress: Callable[[int, int, Tally], None] | None = None,
) -> Tally:
    """Damage files of two small runs and read them.

    Args:
        scratch: A directory for the runs and their copies.
        seed: Decides the order of the damages and the values that are written.
        budget: Seconds; 0 for all damages.
        most: At most so many damages; 0 for all.
        processes: How many processes read at a time.
        kinds: Only these ways of damage; all where none are named.
        part: (i, n) takes the i-th of n parts.
        progress: Called after each damage with how many are done, of how many, and the tally so far.
    """
    source = scratch / "source"
    source.mkdir()
    small_runs.record(source)
    files = {
        (run, str(path.relative_to(source / run))): path.read_bytes()
        for run in (small_runs.FINISHED, small_runs.KILLED)
        for path in sorted((source / run).rglob("*"))
        if path.is_file()
    }
    pool = Pool(source, scratch, processes)
    undamaged = [Damage(run, "", "none") for run in (small_runs.FINISHED, small_runs.KILLED)]
    whole = {damage.run: found for damage, found, _ in pool.readings(undamaged)}
    damages = [one for one in every_damage(files, seed) if not kinds or one.kind in kinds]
    chosen = damages[part[0] - 1 :: part[1]][: most or None]
    tally = Tally()
    for damage, found, reader in pool.readings(chosen, time.monotonic() + budget if budget else 0.0):
        base = whole[damage.run]
        if isinstance(found, str):
            tally.damages += 1
            tally.blame(found, f"{damage}: {reader}")
        elif isinstance(base, dict):
            tally.add(damage, base, found)
        if progress is not None:
            progress(tally.damages, len(chosen), tally)
    for run, base in whole.items():
        for name, one in base.items() if isinstance(base, dict) else ():
            if one.raw or (one.refusal and run == small_runs.FINISHED):
                tally.blame(CRASH, f"the whole run {run}: {name}: {one.raw or one.refusal}")
    return tally


class _Progress:
    """A line to stderr every ten seconds."""

    def __init__(self, every: float = 10.0) -> None:
        self._every, self._next = every, 0.0

    def __call__(self, done: int, of: int, tally: Tally) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._every
            print(f"{done} of {of} damages, {len(tally.faults)} kinds of fault", file=sys.stderr, flush=True)


def _part(text: str) -> tuple[int, int]:
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a part such as 3/8")
    return int(number), int(count)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=600.0, help="seconds; 0 for every byte of every file")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--kinds", nargs="*", default=(), help="only these ways of damage, such as forge")
    parser.add_argument("--part", type=_part, default=(1, 1), help="i/n: only the i-th of n parts")
    parser.add_argument("--scratch", default=None, help="a directory for copies of the runs")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="powertrain-fuzz-", dir=options.scratch) as scratch:
        tally = fuzz(
            Path(scratch),
            options.seed,
            options.budget,
            processes=options.processes,
            kinds=options.kinds,
            part=options.part,
            progress=_Progress(),
        )
    print("\n".join(tally.lines()))
    print(f"seed {options.seed}, {time.monotonic() - began:.0f} s")
    sys.exit(1 if tally.faults else 0)


if __name__ == "__main__":
    main()
