"""Storage faults do not slow training down, and no checkpoint is lost silently.

One real run per kind of fault, with one worker: steps of fixed work, and a checkpoint of a few MB at a fixed interval.
While it trains, its storage fails and is repaired again, in blocks of equal time:

- the disk is full from byte k on, with the staging area on it and elsewhere (a small tmpfs, several k);
- an S3 server (moto's, behind a proxy) refuses connections, is throttled, hangs.

A pair is a block in trouble beside one without, in turning order. What counts is steps a second of the one over the
other; the bound is on the lower end of the bootstrapped 95 % interval of the mean. Between blocks there is a gap that
does not count, in which storage is well until it has taken what had piled up: otherwise the work left by the trouble
would slow down the block without, and flatter the one in trouble. In blocks without trouble checkpoints really are
uploaded, which costs time on the other cores; in blocks in trouble retries do.

The limit beside each figure is the same ratio among blocks without trouble: what this machine's own noise makes of 1.

At the end every reported checkpoint must be in the journal as committed or as failed, those in S3 all as committed, and
what retention kept must verify.

    python benchmarks/storage_faults.py [--quick] [--json FILE] [--check]     (root, for the tmpfs)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from harness import Bound, MeasurementFailed, Options, Outcome, Row, conclude, parse_options

import powertrain
from powertrain import (
    Checkpoint,
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    UserCallback,
)
from powertrain.checkpoint import committed as checkpoint_committed
from powertrain.errors import PowertrainError
from powertrain.run import events as ev
from powertrain.run.record import journal
from powertrain.storage import Storage, open_storage

sys.path.append(str(Path(__file__).resolve().parent.parent))

#: The claims of the issue.
RATIO_AT_LEAST = 0.95
SILENTLY_MISSING_AT_MOST = 0
#: "Storage refusing for a minute" is a minute, once.
LONG_SECONDS = 60.0

MIB = 2**20
#: Two files, so that a disk can be full in the middle of either.
FILES = {"model.bin": 3 * MIB, "optimizer.bin": 1 * MIB}
SIZE = sum(FILES.values())
STEP_MILLISECONDS = 4.0
KEPT = 2
DISK_BYTES = 64 * MIB
#: Free bytes on the full disk: none, in the first file, at its end, in the second, one byte short.
FULL_AT = (0, MIB + 1, 3 * MIB, 3 * MIB + 4097, SIZE - 1)
THROTTLED_TO = 200_000.0
#: Seconds in which storage must have taken what piled up, and a moment more before the next block.
_DRAINED_WITHIN, _MOMENT = 150.0, 0.5
_RESAMPLES = 10_000


class Amount(NamedTuple):
    """The amount of measurements of each kind."""

    pairs: int
    seconds: float
    #: Length of one more pair of blocks for storage that refuses; 0 for none.
    long_seconds: float
    steps_between_saves: int


FULL = Amount(pairs=12, seconds=5.0, long_seconds=LONG_SECONDS, steps_between_saves=150)
QUICK = Amount(pairs=3, seconds=2.5, long_seconds=0.0, steps_between_saves=100)


# --------------------------------------------------------------------------- what driver and worker share


class Board:
    """Numbers in a file mapped by both processes: the current block, reported checkpoints, the end."""

    def __init__(self, path: str) -> None:
        if not os.path.exists(path):
            Path(path).write_bytes(bytes(24))
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 24)

    def _get(self, index: int) -> int:
        return int(struct.unpack_from("<q", self._memory, 8 * index)[0])

    def _set(self, index: int, value: int) -> None:
        struct.pack_into("<q", self._memory, 8 * index, value)

    block = property(lambda self: self._get(0), lambda self, value: self._set(0, value))
    reported = property(lambda self: self._get(1), lambda self, value: self._set(1, value))
    over = property(lambda self: self._get(2), lambda self, value: self._set(2, value))


def train_until_over(config: dict[str, Any]) -> dict[int, tuple[int, float]]:
    """Train with steps of fixed work and regular checkpoints; return (steps, seconds) of each block. Block 0 is a
    gap.
    """
    board = Board(config["board"])
    work = _fixed_work(config["step_milliseconds"])
    contents = {name: os.urandom(size) for name, size in FILES.items()}
    blocks: dict[int, tuple[int, float]] = {}
    block, began, steps, total = 0, time.monotonic(), 0, 0
    while not board.over:
        if board.block != block:
            now = time.monotonic()
            if block:
                blocks[block] = (steps, now - began)
            block, began, steps = board.block, now, 0
        work()
        steps, total = steps + 1, total + 1
        if total % config["steps_between_saves"] == 0:
            _save(contents)
            board.reported += 1
    if block:  # the end follows directly after the last block
        blocks[block] = (steps, time.monotonic() - began)
    return blocks


def _fixed_work(milliseconds: float) -> Callable[[], None]:
    """Return a step of constant work, which takes about this long on an idle machine."""
    import torch

    torch.set_num_threads(1)
    weights, inputs = torch.randn(192, 192), torch.randn(192, 192)
    samples = []
    for _ in range(200):
        began = time.perf_counter()
        torch.mm(inputs, weights)
        samples.append(time.perf_counter() - began)
    count = max(1, round(milliseconds / 1000 / min(samples[100:])))

    def work() -> None:
        for _ in range(count):
            torch.mm(inputs, weights)

    return work


def _save(contents: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name, content in contents.items():
            Path(directory, name).write_bytes(content)
        powertrain.report({}, checkpoint=Checkpoint(directory))


# --------------------------------------------------------------------------- kinds of trouble


@dataclass(frozen=True)
class Trouble:
    """One kind of fault: the run's storage, and functions that begin (given the number of the pair) and end the
    fault.
    """

    name: str
    storage_path: str
    begin: Callable[[int], object]
    mend: Callable[[], object]
    #: True when everything must be committed in the end.
    nothing_may_fail: bool
    long_block: bool = False
    checkpoints: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a file system of :data:`DISK_BYTES`."""
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        raise MeasurementFailed(
            f"A small tmpfs cannot be mounted ({mounted.stderr.strip()}). Run it as root."
        )
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(disk: Path, free: int) -> None:
    """Leave ``free`` bytes on the disk, approximately, while other processes write."""
    descriptor = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while (left := _free(disk) - free) > 0:
            if os.write(descriptor, bytes(min(left, MIB))) == 0:
                return
    except OSError:
        return  # it is full
    finally:
        os.close(descriptor)


def _free(disk: Path) -> int:
    found = os.statvfs(disk)
    return found.f_bavail * found.f_frsize


@contextlib.contextmanager
def full_disk(workspace: Path, staging: Path | None) -> Iterator[Trouble]:
    """Return a fault that fills the run's disk; ``staging`` is elsewhere, or on it too (None)."""
    where = "staging on it" if staging is None else "staging elsewhere"
    with small_disk(workspace / f"disk-{where.replace(' ', '-')}") as disk:
        yield Trouble(
            f"disk full, {where}",
            str(disk / "runs"),
            begin=lambda pair: fill(disk, FULL_AT[pair % len(FULL_AT)]),
            mend=lambda: (disk / "filler").unlink(),
            nothing_may_fail=staging is not None,
            checkpoints={} if staging is None else {"staging_dir": str(staging)},
        )


@contextlib.contextmanager
def bad_server(name: str) -> Iterator[Trouble]:
    """Start an S3 server behind a proxy with injectable faults."""
    from tests.s3_server import served_with_proxy

    with served_with_proxy() as (_, proxy):
        begins: dict[str, Callable[[int], object]] = {
            "refuses": lambda _: proxy.refuse(),
            "throttled": lambda _: proxy.throttle(THROTTLED_TO),
            "hangs": lambda _: proxy.hang(),
        }
        yield Trouble(
            f"S3 {name}",
            proxy.uri("runs"),
            begins[name],
            proxy.mend,
            nothing_may_fail=True,
            long_block=name == "refuses",
        )


# --------------------------------------------------------------------------- one run


@dataclass
class Measured:
    """The result of one run: steps per second of each pair, and the outcome of its checkpoints."""

    name: str
    #: (without trouble, in trouble), the long pair last.
    pairs: list[tuple[float, float]]
    long_ratio: float | None
    reported: int
    committed: int
    failed: int
    #: One sentence for each checkpoint that is silently missing, reported twice or incomplete.
    wrong: list[str]
    drained_seconds: list[float]

    @property
    def ratios(self) -> list[float]:
        return [faulty / free for free, faulty in self.pairs]

    @property
    def noise(self) -> list[float]:
        """Return the same ratio among neighbouring blocks without a fault."""
        return [later[0] / earlier[0] for earlier, later in pairwise(self.pairs)]


class Listener(UserCallback):
    """Callback that counts checkpoints with a reported outcome."""

    def __init__(self) -> None:
        self.settled = 0

    def on_event(self, run_context: Any, event: Any) -> None:
        self.settled += isinstance(event, (ev.Committed, ev.CheckpointFailed))


class Conductor:
    """Runs the training on a thread, and switches the blocks."""

    def __init__(self, trouble: Trouble, amount: Amount, workspace: Path) -> None:
        self._trouble, self._amount = trouble, amount
        path = workspace / f"board-{trouble.name.replace(' ', '-')}"
        self._board, self._listener = Board(str(path)), Listener()
        self._trainer = DataParallelTrainer(
            train_until_over,
            train_loop_config={
                "board": str(path),
                "step_milliseconds": STEP_MILLISECONDS,
                "steps_between_saves": amount.steps_between_saves,
            },
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="run",
                storage_path=trouble.storage_path,
                checkpoint_config=CheckpointConfig(num_to_keep=KEPT, **trouble.checkpoints),
                callbacks=[self._listener],
                verbose=0,
            ),
        )
        self._result: Any = None
        self._problem: BaseException | None = None
        self._drained: list[float] = []
        self._blocks = 0

    def measure(self) -> Measured:
        """Measure all pairs, then end the run."""
        thread = threading.Thread(target=self._fit, daemon=True)
        thread.start()
        try:
            self._await(lambda: self._listener.settled >= 2, "its first checkpoints to be committed", thread)
            lengths = [self._amount.seconds] * self._amount.pairs
            if self._trouble.long_block and self._amount.long_seconds:
                lengths.append(self._amount.long_seconds)
            numbers = [self._pair(index, seconds, thread) for index, seconds in enumerate(lengths)]
        finally:
            self._board.over = 1
            thread.join(_DRAINED_WITHIN)
        if self._problem is not None or thread.is_alive():
            raise MeasurementFailed(f"{self._trouble.name}: the run did not end well: {self._problem}.")
        return self._measured(numbers, len(lengths) > self._amount.pairs)

    def _fit(self) -> None:
        try:
            self._result = self._trainer.fit()
        except BaseException as error:
            self._problem = error

    def _pair(self, index: int, seconds: float, thread: threading.Thread) -> tuple[int, int]:
        """Numbers of the blocks (without trouble, in trouble); every other pair begins with the trouble."""
        if index % 2:
            faulty = self._in_trouble(index, seconds, thread)
            return self._block(seconds), faulty
        free = self._block(seconds)
        return free, self._in_trouble(index, seconds, thread)

    def _in_trouble(self, index: int, seconds: float, thread: threading.Thread) -> int:
        self._trouble.begin(index)
        try:
            number = self._block(seconds)
        finally:
            self._trouble.mend()
        began, reported = time.monotonic(), self._board.reported  # more will follow
        self._await(lambda: self._listener.settled >= reported, "storage to take what piled up", thread)
        self._drained.append(time.monotonic() - began)
        time.sleep(_MOMENT)
        return number

    def _block(self, seconds: float) -> int:
        self._blocks += 1
        self._board.block = self._blocks
        time.sleep(seconds)
        self._board.block = 0
        return self._blocks

    def _await(self, come: Callable[[], bool], what: str, thread: threading.Thread) -> None:
        deadline = time.monotonic() + _DRAINED_WITHIN
        while not come():
            if not thread.is_alive() or time.monotonic() > deadline:
                raise MeasurementFailed(
                    f"{self._trouble.name}: the run was to come to this and did not: {what} (reported "
                    f"{self._board.reported}, settled {self._listener.settled}, {self._problem})."
                )
            time.sleep(0.02)

    def _measured(self, numbers: list[tuple[int, int]], has_long: bool) -> Measured:
        blocks = self._result.return_value
        rate = {number: steps / seconds for number, (steps, seconds) in blocks.items()}
        pairs = [(rate[free], rate[faulty]) for free, faulty in numbers]
        storage = open_storage(self._result.path)
        fates = Fates(storage)
        return Measured(
            self._trouble.name,
            pairs,
            pairs[-1][1] / pairs[-1][0] if has_long else None,
            self._board.reported,
            len(fates.committed),
            len(fates.failed),
            fates.wrong(self._board.reported, self._trouble.nothing_may_fail),
            self._drained,
        )


class Fates:
    """The outcomes of checkpoints in a run's journal, compared with the storage."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        facts = journal.read(storage)
        self.committed = {fact.row: fact.checkpoint for fact in facts if isinstance(fact, ev.Committed)}
        self.failed = {fact.row: fact.reason for fact in facts if isinstance(fact, ev.CheckpointFailed)}
        self._told = Counter(
            fact.row for fact in facts if isinstance(fact, (ev.Committed, ev.CheckpointFailed))
        )

    def wrong(self, reported: int, nothing_may_fail: bool) -> list[str]:
        """Return one sentence for each checkpoint with a wrong outcome. Every report had one."""
        rows = range(1, reported + 1)
        wrong = [f"the checkpoint of row {row} is silently missing" for row in rows if row not in self._told]
        wrong += [
            f"the fate of row {row} was told {count} times" for row, count in self._told.items() if count > 1
        ]
        if nothing_may_fail:
            wrong += [f"the checkpoint of row {row} failed: {reason}" for row, reason in self.failed.items()]
        newest = sorted(self.committed)[-KEPT:]
        kept = {manifest.row: manifest for manifest in checkpoint_committed.committed(self._storage)}
        wrong += [f"the committed checkpoint of row {row} is gone" for row in newest if row not in kept]
        wrong += [
            f"the checkpoint of row {row} lies there uncommitted" for row in kept if row not in self.committed
        ]
        for row, manifest in kept.items():
            try:
                checkpoint_committed.verify(self._storage, manifest)
            except (PowertrainError, OSError) as error:
                wrong.append(f"the committed checkpoint of row {row} does not verify: {error}")
        return wrong


# --------------------------------------------------------------------------- figures


def lower_bound(ratios: Sequence[float]) -> float | None:
    """Return the lower end of the bootstrapped 95 % interval of the mean."""
    if len(ratios) < 2:
        return None
    chance = random.Random(0)
    means = sorted(statistics.fmean(chance.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES))
    return means[int(0.025 * _RESAMPLES)]


def rows_of(one: Measured) -> list[Row]:
    floor = lower_bound(one.noise)
    noise = "" if floor is None else f"blocks without, among themselves: {statistics.fmean(one.noise):.3f}"
    noise += "" if floor is None else f" (bound {floor:.3f})"
    rows = [
        Row(f"{one.name}: steps a second", "without", "/s", [free for free, _ in one.pairs]),
        Row(f"{one.name}: steps a second", "in trouble", "/s", [faulty for _, faulty in one.pairs]),
        Row(f"{one.name}: in trouble / without", "pairs", "", one.ratios, limit=noise),
    ]
    if one.long_ratio is not None:
        rows.append(Row(f"{one.name}: the pair of {LONG_SECONDS:.0f} s", "pair", "", [one.long_ratio]))
    fates = f"{one.reported} reported, {one.committed} committed, {one.failed} told as failed"
    rows.append(
        Row(f"{one.name}: until all was taken", "after trouble", "s", one.drained_seconds, limit=fates)
    )
    return rows


def bounds_of(name: str, one: Measured | None) -> list[Bound]:
    ratio = lower_bound(one.ratios) if one is not None else None
    wrong = len(one.wrong) if one is not None and one.reported else None
    return [
        Bound(f"{name}: steps in trouble / without, 95 % bound", ratio, at_least=RATIO_AT_LEAST),
        Bound(f"{name}: checkpoints silently missing or wrong", wrong, at_most=SILENTLY_MISSING_AT_MOST),
    ]


KINDS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Trouble]]] = {
    "disk full, staging on it": lambda workspace: full_disk(workspace, None),
    "disk full, staging elsewhere": lambda workspace: full_disk(workspace, workspace / "staging"),
    "S3 refuses": lambda _: bad_server("refuses"),
    "S3 throttled": lambda _: bad_server("throttled"),
    "S3 hangs": lambda _: bad_server("hangs"),
}


def measure_all(options: Options) -> Outcome:
    amount = QUICK if options.quick else FULL
    outcome = Outcome("Training while its storage is in trouble", amount.pairs, [], [], samples={})
    failures, samples = [], {}
    with tempfile.TemporaryDirectory(prefix="ptb-") as directory:
        # Before the first trainer: the warm server reads its directories from here.
        os.environ["TMPDIR"] = tempfile.tempdir = directory
        for name, kind in KINDS.items():
            one = None
            try:
                with kind(Path(directory)) as trouble:
                    one = Conductor(trouble, amount, Path(directory)).measure()
            except MeasurementFailed as failure:
                failures.append(str(failure))
            outcome.bounds += bounds_of(name, one)
            if one is not None:
                outcome.rows += rows_of(one)
                outcome.notes += [f"{name}: {sentence}" for sentence in one.wrong[:10]]
                samples[name] = asdict(one)
    outcome.failures, outcome.samples = failures, samples
    outcome.notes.append(
        "without trouble checkpoints are uploaded as well, which costs steps where the server shares the cores: a "
        "ratio above 1 is that. What piled up in trouble is taken in gaps that do not count."
    )
    return outcome


def main() -> int:
    """Measure, print, and return the exit code."""
    options = parse_options("Steps a second while storage is full, refuses, is throttled or hangs.")
    return conclude(measure_all(options), options)


if __name__ == "__main__":
    raise SystemExit(main())
