"""A crash at any moment loses no committed checkpoint: N of N.

The run is crash_scripts/crash_driver.py: two ranks that save in every row, old checkpoints deleted on the way. It is

- killed with SIGKILL at every step of one save that changes storage: the controller, the uploader, a rank;
- cut off from power at every step of all saves, with three models of lost writes: this needs no killing, because the
  durable state after each flush is recorded while one run continues undisturbed (``powertrain.testing.power_cut``);
- killed at random moments: whole runs, and many short ones in which one process is rank, uploader and controller;
- stopped by the death of a rank right after ``report`` has returned on all ranks.

After each crash the newest committed checkpoint must exist, verify, have the saved content, and be as new as the last
announced commit; no process of the run may be alive; and the same script must resume from it to its end.

    python benchmarks/crash_matrix.py [--quick] [--json FILE] [--check]
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from harness import Bound, Outcome, Row, conclude, parse_options

from powertrain.checkpoint import committed
from powertrain.errors import CheckpointError
from powertrain.storage import open_storage
from powertrain.storage.base import TEMPORARY_PREFIX
from powertrain.testing import chronicle, faults, power_cut
from powertrain.testing.chronicle import Crossing, Name, Note, Record
from powertrain.testing.faults import Boundary, Fault, Kill

sys.path.append(str(Path(__file__).parent / "crash_scripts"))

import crash_driver

#: One rank saves in a directory of Powertrain's, the other in a temporary one.
VICTIMS = ("controller", "uploader", "rank-0", "rank-1")
WORKERS, ROWS, MEBIBYTES = 2, 5, 3.0
#: The save in which processes are killed: two are committed before it, and one is deleted after it.
SAVE = 3


class Amount(NamedTuple):
    """The number of crashes of each kind."""

    #: Steps of each victim.
    steps: int
    #: Number of random choices of surviving names per step, and of restarts on the result.
    draws: int
    resumes: int
    whole_moments: int
    short_moments: int
    #: Deaths of each rank after its report.
    reports: int


FULL = Amount(steps=10**6, draws=8, resumes=8, whole_moments=30, short_moments=1000, reports=10)
QUICK = Amount(steps=2, draws=1, resumes=1, whole_moments=4, short_moments=20, reports=2)
#: Number of attempts for a step that depends on thread timing and is not reached in every run.
TRIES_TO_REACH = 2
REACHED_AT_LEAST = 0.9
#: Number of concurrent whole runs: they spend half of their time waiting.
LANES = 2
SHORT_ROWS, SHORT_MEBIBYTES, SHORT_STARTS = 8, 0.25, 12
_RUN_WITHIN = 90.0
_GONE_WITHIN = 5.0
_OTHER_ROOMS = ("metrics", "journal", "logs", ".staging")
_MARK = "CRASH_MATRIX"
Thing = TypeVar("Thing")


@dataclass
class Trial:
    """One crash, and all errors after it."""

    what: str
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    #: False if the run ended before the step at which it was to be killed.
    reached: bool = True


@dataclass
class Line:
    """All crashes of one kind."""

    what: str
    who: str
    trials: list[Trial]

    @property
    def counted(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.reached]

    @property
    def good(self) -> int:
        return sum(not trial.wrong for trial in self.counted)


# --------------------------------------------------------------------------- running the script


@dataclass(frozen=True)
class Ended:
    """The end of one start of the script. Processes alive ``_GONE_WITHIN`` seconds later were killed."""

    code: int
    output: str
    left: list[str]


class Place:
    """A directory in which one run starts, crashes and resumes."""

    def __init__(self) -> None:
        # A short path: a socket's path must fit into 107 bytes.
        self.root = Path(tempfile.mkdtemp(prefix="crash-", dir="/tmp"))
        self.storage, self._temporary, self._runtime = (self.root / n for n in ("storage", "tmp", "run"))
        for place in (self._temporary, self._runtime):
            place.mkdir(mode=0o700)
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        self._starts = 0
        #: Of the last start.
        self.chronicle = self.root / "chronicle"

    def start(
        self, *script: Fault, watch: bool = False, dies: int | None = None, same_chronicle: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start the script with its faults. In the same chronicle, a fault does not occur twice."""
        self._starts += 1
        if not same_chronicle:
            self.chronicle = self.root / f"chronicle-{self._starts}"
        name, value = self._mark.split("=")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("POWERTRAIN_", _MARK))}
        environment |= {name: value, "TMPDIR": str(self._temporary), "XDG_RUNTIME_DIR": str(self._runtime)}
        environment |= faults.environment(
            *script, directory=self.chronicle, watch=self.storage if watch else None
        )
        command = [sys.executable, crash_driver.__file__, str(self.storage)]
        command += [f"--workers={WORKERS}", f"--rows={ROWS}", f"--mebibytes={MEBIBYTES}"]
        command += [] if dies is None else [f"--dies={dies}"]
        with self._output.open("wb") as output:
            return subprocess.Popen(
                command,
                env=environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, process: subprocess.Popen[bytes]) -> Ended:
        """Wait for the end of the script and all its processes."""
        left = []
        try:
            process.wait(_RUN_WITHIN)
        except subprocess.TimeoutExpired:
            left.append(f"the script itself after {_RUN_WITHIN:g} s")
            process.kill()
            process.wait()
        deadline = time.monotonic() + _GONE_WITHIN
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        left += [f"process {pid} ({command})" for pid, command in alive.items()]
        self._kill_all()
        return Ended(process.returncode, self._output.read_text(errors="replace"), left)

    def close(self) -> None:
        """Remove all processes and files."""
        self._kill_all()
        shutil.rmtree(self.root, ignore_errors=True)

    @property
    def _output(self) -> Path:
        return self.root / f"output-{self._starts}"

    def _kill_all(self) -> None:
        for pid in self._alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _alive(self) -> dict[int, str]:
        """Return the processes of the script, whatever their parent is now; dead ones have no environment."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:80]
        return found


@contextlib.contextmanager
def place() -> Iterator[Place]:
    """Yield a place that is removed afterwards."""
    made = Place()
    try:
        yield made
    finally:
        made.close()


# --------------------------------------------------------------------------- judging what is left


def announced(records: Iterable[Record]) -> int:
    """Return the newest row announced as committed; 0 for none."""
    told = [record.text.split() for record in records if isinstance(record, Note)]
    return max((int(words[1]) for words in told if words[0] == "committed"), default=0)


def newest_row(storage: Path, promised: int, mebibytes: float, workers: int, wrong: list[str]) -> int:
    """Return the row of the newest valid checkpoint, 0 for none; errors are appended to ``wrong``."""
    if not (storage / crash_driver.NAME).is_dir():
        wrong.extend([f"row {promised} was committed, and no run is there"] if promised else [])
        return 0
    run = open_storage(storage / crash_driver.NAME)
    newest = committed.newest_verified(run, wrong.append)
    for older in (one for one in committed.committed(run) if newest is None or one.name != newest.name):
        try:
            committed.verify(run, older)
        except CheckpointError as error:
            wrong.append(str(error))
    row = newest.row if newest is not None else 0
    if newest is not None:
        directory = Path(committed.checkpoint_of(run, newest).path)
        wrong.extend(crash_driver.wrong_in(directory, row, workers, mebibytes))
    if row < promised:
        wrong.append(f"row {promised} was committed, but the newest checkpoint is that of row {row}")
    return row


def goes_on(here: Place, row: int, wrong: list[str]) -> None:
    """Restart the script without faults: it must resume after ``row``, reach its end and leave no temporary files."""
    ended = here.end(here.start())
    notes = {record.text for record in chronicle.read(here.chronicle) if isinstance(record, Note)}
    if ended.code != 0:
        wrong.append(f"started again, it ended with {ended.code}: {ended.output[-600:]}")
    for rank in range(WORKERS):
        if f"rank {rank} goes on after row {row}" not in notes:
            wrong.append(f"started again, rank {rank} did not go on after row {row}: {sorted(notes)}")
    wrong.extend(f"left alive by the second start: {one}" for one in ended.left)
    newest_row(here.storage, ROWS, MEBIBYTES, WORKERS, wrong)
    wrong.extend(f"litter in storage: {one}" for one in _litter(here.storage / crash_driver.NAME))


def _litter(run: Path) -> list[str]:
    """Return unfinished writes and staged files left after the run."""
    unfinished = [str(path) for path in run.rglob(f"{TEMPORARY_PREFIX}*")]
    return unfinished + [str(path) for path in (run / ".staging").rglob("*") if path.is_file()]


def judge(here: Place, ended: Ended, wrong: list[str]) -> None:
    """Check all conditions after a crash."""
    wrong.extend(f"left alive: {one}" for one in ended.left)
    promised = announced(chronicle.read(here.chronicle))
    goes_on(here, newest_row(here.storage, promised, MEBIBYTES, WORKERS, wrong), wrong)


# --------------------------------------------------------------------------- the kinds of crash


class Recording:
    """One complete run: all its steps and, if observed, the durable state at each."""

    def __init__(self, here: Place, *, watch: bool = True, killed_before: Boundary | None = None) -> None:
        """Record the run; with ``killed_before`` as two starts: one that is killed there, and one that resumes."""
        script = [] if killed_before is None else [Fault(killed_before, Kill())]
        if script:
            here.end(here.start(*script, watch=watch))
        ended = here.end(here.start(*script, watch=watch, same_chronicle=bool(script)))
        if ended.code != 0 or ended.left:
            raise SystemExit(
                f"The script was to come to its end and ended with {ended.code} (left: {ended.left}).\n{ended.output}"
            )
        self.storage, self.chronicle = here.storage, here.chronicle
        self.records = chronicle.read(here.chronicle)
        self.crossings = [record for record in self.records if isinstance(record, Crossing)]
        #: Seconds from the first save to the last step.
        self.lasting = self.crossings[-1].at - next(r.at for r in self.records if isinstance(r, Note))

    def places(self, role: str) -> list[Boundary]:
        """Return the steps of one role in the chosen save, as positions for another run."""
        begin, end = (self._first(f"row {row} begins") for row in (SAVE, SAVE + 1))
        inside = {id(record) for record in self.records[begin:end] if isinstance(record, Crossing)}
        return [
            faults.same_step(self.crossings, index, self.storage)
            for index, crossing in enumerate(self.crossings)
            if id(crossing) in inside and crossing.role == role
        ]

    def _first(self, text: str) -> int:
        return next(i for i, one in enumerate(self.records) if isinstance(one, Note) and one.text == text)


def killed_at(where: Boundary) -> Trial:
    """Kill the process that reaches this step."""
    trial = Trial(f"{where.role} before {where.kind} {where.target} ({where.number})")
    began = time.monotonic()
    for _ in range(TRIES_TO_REACH):
        with place() as here:
            ended = here.end(here.start(Fault(where, Kill())))
            trial.reached = bool(faults.fired(here.chronicle))
            if trial.reached:
                judge(here, ended, trial.wrong)
                break
    trial.seconds = time.monotonic() - began
    return trial


@dataclass
class Cut:
    """A power cut at one step, with the content of the disk; ``row`` is its newest valid checkpoint."""

    trial: Trial
    remains: dict[str, power_cut.Remains]
    row: int = 0


#: The surviving names: a function of the flushed state and of the current names.
View = Callable[[power_cut.Disk, Sequence[Name]], dict[str, power_cut.Remains]]
BY_CHANCE = "names of some directories"
_chance = random.Random(0)
VIEWS: dict[str, View] = {
    "names as flushed": lambda disk, names: disk.with_flushed_names(),
    "all names survive": lambda disk, names: disk.with_names(names),
    BY_CHANCE: lambda disk, names: disk.with_some_names(names, _chance),
}


def cut_everywhere(recording: Recording, view: View) -> list[Cut]:
    """Cut the power at every step of every process."""
    disk, promised = power_cut.Disk(), 0
    cuts: list[Cut] = []
    judged: tuple[dict[str, power_cut.Remains], int] | None = None
    wrong, row = list[str](), 0
    for record in recording.records:
        disk.add(record)
        promised = max(promised, announced([record]))
        if not isinstance(record, Crossing):
            continue
        began = time.monotonic()
        remains = view(disk, record.names or [])
        facts = {path: left for path, left in remains.items() if _matters(path)}
        if judged != (facts, promised):  # most steps do not change it
            judged, wrong = (facts, promised), []
            row = _row_on(facts, recording.chronicle, promised, wrong)
        trial = Trial(f"{record.role} before {record.kind} {record.target}", time.monotonic() - began, wrong)
        cuts.append(Cut(trial, remains, row))
    return cuts


def _matters(path: str) -> bool:
    """Return whether a file is relevant for finding the newest checkpoint."""
    asked = not path.startswith(tuple(f"{crash_driver.NAME}/{room}/" for room in _OTHER_ROOMS))
    return asked and TEMPORARY_PREFIX not in path


def _row_on(remains: dict[str, power_cut.Remains], directory: Path, promised: int, wrong: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="crash-", dir="/tmp") as temporary:
        storage = Path(temporary, "storage")
        power_cut.build(remains, directory, storage, share=True)
        return newest_row(storage, promised, MEBIBYTES, WORKERS, wrong)


def goes_on_after_cut(cut: Cut, directory: Path) -> Trial:
    """Restart the script on the disk after the power cut."""
    trial, began = Trial(f"started again after: {cut.trial.what}"), time.monotonic()
    with place() as here:
        power_cut.build(cut.remains, directory, here.storage)
        goes_on(here, cut.row, trial.wrong)
    trial.seconds = time.monotonic() - began
    return trial


def killed_at_random(number: int, victim: str, lasting: float) -> Trial:
    """Kill one process of a whole run at a random time of its training, which lasts this many seconds."""
    chance, began = random.Random(number), time.monotonic()
    trial = Trial(victim, reached=False)
    for _ in range(TRIES_TO_REACH):
        moment = chance.uniform(0.0, lasting)
        with place() as here:
            process = here.start()
            while (pid := _pid_of(victim, chronicle.read(here.chronicle))) is None and process.poll() is None:
                time.sleep(0.005)
            time.sleep(moment)
            if pid is not None and process.poll() is None:
                trial.what, trial.reached = f"{victim}, {moment:.3f} s after it was first seen", True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                judge(here, here.end(process), trial.wrong)
                break
    trial.seconds = time.monotonic() - began
    return trial


def _pid_of(role: str, records: Sequence[Record]) -> int | None:
    """Return the process of a role; None before training has begun, or before its first action."""
    if not any(isinstance(record, Note) for record in records):
        return None
    return next((r.pid for r in records if isinstance(r, Crossing) and r.role == role), None)


def rank_dies_after_report(victim: int) -> Trial:
    """Kill a rank after ``report`` has returned on all ranks: the checkpoint must be committed."""
    trial, began = Trial(f"rank {victim}"), time.monotonic()
    with place() as here:
        ended = here.end(here.start(dies=victim))
        trial.reached = len(list(here.root.glob("returned-*"))) == WORKERS
        row = newest_row(here.storage, crash_driver.DIES_AFTER_ROW, MEBIBYTES, WORKERS, trial.wrong)
        trial.wrong.extend(f"left alive: {one}" for one in ended.left)
        goes_on(here, row, trial.wrong)
    trial.seconds = time.monotonic() - began
    return trial


# --------------------------------------------------------------------------- many short runs


def short_runs_killed(moments: int) -> list[Trial]:
    """Kill short runs, in which one process is rank, uploader and controller, at random times and restart them.

    The process is forked, so that a start costs little. This process must have no threads.
    """
    chance = random.Random(0)
    trials: list[Trial] = []
    # The cleanup after a killed process may still be running at the end.
    with tempfile.TemporaryDirectory(prefix="crash-", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        loading, undisturbed = Path(temporary, "loading"), Path(temporary, "undisturbed")
        if _short_start(loading, 0, None)[1] != 0:
            raise SystemExit(f"A short run failed without any fault.\n{(loading / 'output').read_text()}")
        _load_as(loading)
        lasting = _short_start(undisturbed, 0, None)[0]
        while len(trials) < moments:
            here = Path(temporary, f"{len(trials)}")
            trials += _one_short_run(here, lasting, min(SHORT_STARTS, moments - len(trials)), chance)
            shutil.rmtree(here, ignore_errors=True)
    return trials


def _one_short_run(here: Path, lasting: float, most: int, chance: random.Random) -> list[Trial]:
    """Kill and restart until the run has reached its end, at most this many times, then once undisturbed."""
    trials: list[Trial] = []
    row = promised = 0
    while row < SHORT_ROWS and len(trials) < most:
        moment = chance.uniform(0.0, lasting)
        trial = Trial(f"{moment:.4f} s after start {len(trials)}")
        trial.seconds = _short_start(here, len(trials), moment)[0]
        records = chronicle.read(here / f"chronicle-{len(trials)}")
        for text in (record.text for record in records if isinstance(record, Note)):
            if "goes on" in text and text != f"rank 0 goes on after row {row}":
                trial.wrong.append(f"{text}, but the newest checkpoint was that of row {row}")
        promised = max(promised, announced(records))
        row = newest_row(here / "storage", promised, SHORT_MEBIBYTES, 0, trial.wrong)
        trials.append(trial)
    if _short_start(here, len(trials), None)[1] != 0:
        trials[-1].wrong.append(f"started again, it failed: {(here / 'output').read_text()[-600:]}")
    newest_row(here / "storage", SHORT_ROWS, SHORT_MEBIBYTES, 0, trials[-1].wrong)
    return trials


def _load_as(here: Path) -> None:
    """Load the modules of a short run, so that forks from now on find them loaded."""
    for name in (here / "modules").read_text().split():
        with contextlib.suppress(Exception):  # created at run time by some package
            importlib.import_module(name)


def _short_start(here: Path, number: int, killed_after: float | None) -> tuple[float, int]:
    """Start a short run in a forked process, and kill it after this many seconds; return its lifetime and status."""
    began, pid = time.monotonic(), os.fork()
    if pid == 0:
        _be_short_run(here, here / f"chronicle-{number}")
    if killed_after is not None:
        time.sleep(killed_after)
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    return time.monotonic() - began, status


def _be_short_run(here: Path, directory: Path) -> None:
    """Train in the forked process, without returning."""
    try:
        for name in ("tmp", "run"):
            (here / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        output = os.open(here / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(faults.environment(directory=directory))
        os.environ.update(TMPDIR=str(here / "tmp"), XDG_RUNTIME_DIR=str(here / "run"))
        tempfile.tempdir = None  # cached from before the fork
        crash_driver.fit(here / "storage", workers=0, rows=SHORT_ROWS, mebibytes=SHORT_MEBIBYTES, paced=False)
        (here / "modules").write_text("\n".join(sys.modules))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# --------------------------------------------------------------------------- the matrix


def spread(things: Sequence[Thing], most: int) -> list[Thing]:
    """Return at most this many items, evenly from the first to the last."""
    if len(things) <= most:
        return list(things)
    return [things[round(i * (len(things) - 1) / max(1, most - 1))] for i in range(most)]


def short_lines(moments: int) -> Iterator[Line]:
    """Run the many short runs. They fork, so they run before any thread exists."""
    trials = short_runs_killed(moments)
    yield Line("SIGKILL at a random moment, short runs", "one process is all", trials)


def power_lines(
    recording: Recording, what: str, draws: int, resumes: int, lanes: ThreadPoolExecutor
) -> Iterator[Line]:
    """Run the power cuts of one recorded run, and restart the script on some of the results."""
    for who, view in VIEWS.items():
        times = draws if who == BY_CHANCE else 1
        cuts = [cut for _ in range(times) for cut in cut_everywhere(recording, view)]
        yield Line(f"power cut at every step{what}", who, [cut.trial for cut in cuts])
        chosen = spread([cut for cut in cuts if cut.row], resumes)
        if chosen:
            trials = lanes.map(lambda cut: goes_on_after_cut(cut, recording.chronicle), chosen)
            yield Line(f"power cut{what}, then started again", who, list(trials))


def kill_lines(recording: Recording, steps: int, moments: int, lanes: ThreadPoolExecutor) -> Iterator[Line]:
    """Run the kills at every step of one save, and at random times of whole runs."""
    for role in VICTIMS:
        places = spread(recording.places(role), steps)
        yield Line(f"SIGKILL at every step of save {SAVE}", role, list(lanes.map(killed_at, places)))
    with place() as here:
        lasting = Recording(here, watch=False).lasting
    present = [role for role in VICTIMS if recording.places(role)]
    victims = [present[number % len(present)] for number in range(moments)]
    tries = lanes.map(killed_at_random, range(moments), victims, [lasting] * moments)
    yield Line("SIGKILL at a random moment, whole runs", "each in turn", list(tries))


def report_lines(tries: int, lanes: ThreadPoolExecutor) -> Iterator[Line]:
    """Run the deaths of a rank right after all reports have returned."""
    for rank in range(WORKERS):
        trials = list(lanes.map(rank_dies_after_report, [rank] * tries))
        yield Line("SIGKILL after report returned on all ranks", f"rank-{rank}", trials)


def all_lines(amount: Amount) -> Iterator[Line]:
    """Run all kinds of crashes in turn."""
    yield from short_lines(amount.short_moments)
    with place() as here, place() as there, ThreadPoolExecutor(LANES) as lanes:
        recording = Recording(here)
        yield from power_lines(recording, "", amount.draws, amount.resumes, lanes)
        middle = recording.places("controller")[len(recording.places("controller")) // 2]
        resumed = Recording(there, killed_before=middle)
        yield from power_lines(resumed, " of a run that was killed once", 1, 0, lanes)
        yield from kill_lines(recording, amount.steps, amount.whole_moments, lanes)
        yield from report_lines(amount.reports, lanes)


def bounds_of(lines: Sequence[Line]) -> list[Bound]:
    """Return the bounds: N of N on every line, and nearly every step reached."""
    bounds = [
        Bound(
            f"{line.what}, {line.who}", line.good if line.counted else None, at_least=len(line.counted) or 1
        )
        for line in lines
    ]
    everything = [trial for line in lines for trial in line.trials]
    reached = sum(trial.reached for trial in everything) / len(everything)
    return [*bounds, Bound("share of crashes that came about", reached, at_least=REACHED_AT_LEAST)]


def main() -> int:
    """Run the crashes, print, and return the exit code."""
    options = parse_options("Whether a crash at any moment loses a committed checkpoint.")
    lines = []
    for line in all_lines(QUICK if options.quick else FULL):
        lines.append(line)
        print(f"{line.what}, {line.who}: {line.good} of {len(line.counted)}", file=sys.stderr, flush=True)
    outcome = Outcome(
        title=f"crashes of a run with {WORKERS} ranks that saves {ROWS} times",
        repetitions=1,
        rows=[
            Row(
                f"{line.what}: {line.good} of {len(line.counted)}",
                line.who,
                "s",
                [t.seconds for t in line.counted],
            )
            for line in lines
        ],
        bounds=bounds_of(lines),
        failures=[
            f"{line.what}, {trial.what}: {'; '.join(trial.wrong)}"
            for line in lines
            for trial in line.counted
            if trial.wrong
        ],
        notes=[
            f"{line.who}: no such process changes storage in this version, so none was killed"
            for line in lines
            if not line.trials
        ],
        samples={f"{line.what}, {line.who}": [asdict(trial) for trial in line.trials] for line in lines},
    )
    return conclude(outcome, options)


if __name__ == "__main__":
    raise SystemExit(main())
