"""Faults by script: kill, raise, hang, stop or slow down at a chosen place of a run, in whichever process comes there.

A fault says where (:class:`Step` of a rank's training, :class:`Boundary` of storage) and what (:class:`Kill`,
:class:`Raise`, :class:`Hang`, :class:`Stop`, :class:`Slow`). Any of the one goes with any of the other. To see how a
training function recovers from the death of rank 1 at its fifth report::

    death = faults.Fault(faults.Step(rank=1, step=5), faults.Kill())
    variables = faults.environment(death, directory=tmp_path)
    TorchTrainer(
        train_function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            worker_runtime_env={"env_vars": variables}, failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    assert len(faults.fired(tmp_path)) == 1

It happens once over all attempts, so the second one gets through. The same variables in the environment of a whole
program reach its driver and the other processes of its runs too, which faults in storage may need; :func:`installed`
is for this very process, and so for ``num_workers=0``.

``directory`` holds the chronicle: every step that changes storage, and every fault that happened, in order
(:mod:`powertrain.testing.chronicle`). A run without faults tells in it which steps there are; :func:`same_step` makes a
place of one for a later run. With ``watch`` the chronicle also holds all that was flushed, from which
:mod:`powertrain.testing.power_cut` makes what a power cut would leave.
"""

from __future__ import annotations

import builtins
import ctypes
import fnmatch
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Literal, Union, get_args

import msgspec

from powertrain.storage import boundaries
from powertrain.testing import chronicle, power_cut
from powertrain.testing.chronicle import Crossing, Fired, Note

#: Carries the script to every process of a run.
VARIABLE = "POWERTRAIN_FAULTS"

#: Where in a rank's loop a step is counted.
StepKind = Literal["report", "optimizer", "batch"]
#: In what a rank hangs: asleep, at a lock, in a loop of Python, in C that keeps the interpreter's lock, in C
#: without it.
HangKind = Literal["sleep", "lock", "loop", "gil", "c"]


# --------------------------------------------------------------------------- what can be asked for


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step", forbid_unknown_fields=True):
    """The ``step``-th step of a rank's training function, counted from 1 in each attempt."""

    rank: int
    step: int
    #: Which attempt of the run, from 0; None for whichever comes there.
    attempt: int | None = None
    #: "report": just before a report is taken (those with ``solo`` are not counted). "optimizer": after an optimizer's
    #: step. "batch": before a loader from ``prepare_data_loader`` hands one out.
    at: StepKind = "report"


class Boundary(msgspec.Struct, frozen=True, kw_only=True, tag="boundary", forbid_unknown_fields=True):
    """The ``number``-th step of a process towards storage that is as described.

    Patterns are those of a shell; "*" is anything.
    """

    #: Which process: "controller", "uploader", "rank-0".
    role: str = "*"
    #: What it is about to do: see ``powertrain.storage.boundaries.KINDS``.
    kind: str = "*"
    #: The path or key it is about to change.
    target: str = "*"
    #: Counted from 1 in each process apart, over the steps that are as described.
    number: int = 1


Where = Union[Step, Boundary]


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the process with SIGKILL."""


class Raise(msgspec.Struct, frozen=True, tag="raise"):
    """Raise an ``OSError`` of this number, such as ``errno.ENOSPC``, or else a built-in exception by its name."""

    errno: int | None = None
    error: str = "RuntimeError"
    #: "" for one that says where the fault was.
    message: str = ""


class Hang(msgspec.Struct, frozen=True, tag="hang"):
    """Come no further for so many seconds; None: for ever."""

    kind: HangKind = "sleep"
    seconds: float | None = None


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Stop the process with SIGSTOP until it receives SIGCONT."""


class Slow(msgspec.Struct, frozen=True, tag="slow"):
    """Go on this much later."""

    seconds: float


#: What a stop and a delay of a step towards storage are called as well.
Freeze = Stop
Delay = Slow

Action = Union[Kill, Raise, Hang, Stop, Slow]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong, at one place."""

    where: Where
    what: Action
    #: How often, in all processes and attempts together: at its step and each such step after it, until this many
    #: times; None: no end.
    times: int | None = 1


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All that one run is to go through, as it travels in the environment."""

    faults: list[Fault]
    #: The chronicle's directory.
    directory: str
    #: The directory whose flushes are put down; "" for none.
    watch: str = ""


def environment(*faults: Fault, directory: str | Path, watch: str | Path | None = None) -> dict[str, str]:
    """The variables that make every process of a run go through these faults.

    ``directory`` is made, and keeps the chronicle; use a new one for every run. ``watch`` is the directory, empty yet,
    whose flushes are put down: the run's storage path.
    """
    script = _script(faults, directory, watch)
    hook = f"{__name__}:{at_boundary.__name__}"
    return {boundaries.VARIABLE: hook, VARIABLE: msgspec.json.encode(script).decode()}


@contextmanager
def installed(*faults: Fault, directory: str | Path, watch: str | Path | None = None) -> Iterator[None]:
    """As :func:`environment`, for this process and as long as the block lasts. Afterwards no hook is installed."""
    global _player
    _player = _Player(_script(faults, directory, watch))
    boundaries.install(at_boundary)
    try:
        yield
    finally:
        boundaries.install(None)
        _player.end()
        _player = None


def _script(faults: Sequence[Fault], directory: str | Path, watch: str | Path | None) -> Script:
    for fault in faults:
        if problem := _problem_of_place(fault) or _problem_of_action(fault.what):
            raise ValueError(f"{fault} {problem}")
    Path(directory).mkdir(parents=True, exist_ok=True)
    watched = "" if watch is None else os.path.abspath(watch)
    return Script(faults=list(faults), directory=os.path.abspath(directory), watch=watched)


def _problem_of_place(fault: Fault) -> str:
    """Why this can never happen, to follow the fault in a sentence; "" when it can."""
    where, times = fault.where, fault.times
    if (where.step if isinstance(where, Step) else where.number) < 1 or (times is not None and times < 1):
        return "never happens: steps and times are counted from 1."
    if isinstance(where, Step):
        if where.rank < 0 or (where.attempt is not None and where.attempt < 0):
            return "never happens: ranks and attempts are counted from 0."
        if where.at not in get_args(StepKind):
            return f"never happens: {where.at!r} is not a kind of step. Use one of {', '.join(get_args(StepKind))}."
    return ""


def _problem_of_action(what: Action) -> str:
    """Why this cannot be done; "" when it can."""
    if isinstance(what, Hang) and what.kind not in get_args(HangKind):
        return f"cannot be done: {what.kind!r} is not a kind of hang. Use one of {', '.join(get_args(HangKind))}."
    if isinstance(what, (Hang, Slow)) and what.seconds is not None and what.seconds < 0:
        return "cannot be done: its seconds are less than none."
    if isinstance(what, Raise):
        try:
            _exception(what, "nowhere")
        except (AttributeError, TypeError):
            return (
                f"cannot be done: {what.error} is no built-in exception that can be made of a message. Use one such "
                'as "ValueError", or give errno for an OSError of a number, and then no other name.'
            )
    return ""


def same_step(crossings: Sequence[Crossing], index: int, root: str | Path) -> Boundary:
    """The place of ``crossings[index]`` in another run of the same program, whose storage may lie elsewhere.

    ``crossings`` are all of one run, and ``root`` is where its storage was. Random parts of names may differ.
    """
    chosen = crossings[index]
    pattern = _pattern(chosen.target, root)
    before = [
        one
        for one in crossings[: index + 1]
        if one.pid == chosen.pid and one.kind == chosen.kind and fnmatch.fnmatchcase(one.target, pattern)
    ]
    return Boundary(role=escape(chosen.role), kind=chosen.kind, target=pattern, number=len(before))


#: Parts of names that differ from run to run: of unfinished writes, and hexadecimal digits as if drawn by lot.
_RANDOM = re.compile(
    r"(?<=\.powertrain-tmp\.)[^/]+|(?<![0-9a-zA-Z])(?=[0-9]*[a-f])(?=[a-f]*[0-9])[0-9a-f]{8,}(?![0-9a-zA-Z])"
)


def _pattern(target: str, root: str | Path) -> str:
    start = os.path.abspath(root)
    inside = target == start or target.startswith(f"{start}/")
    fixed = _RANDOM.split(target[len(start) :] if inside else target)
    return ("*" if inside else "") + "*".join(escape(part) for part in fixed)


def fired(directory: str | Path) -> list[Fired]:
    """The faults that have happened, oldest first."""
    return [record for record in chronicle.read(directory) if isinstance(record, Fired)]


def note(text: str) -> None:
    """Put a line into the chronicle of this process's script, if there is one."""
    player = _current()
    if player is not None:
        chronicle.append(player.directory, Note(pid=os.getpid(), text=text))


# --------------------------------------------------------------------------- in the processes of the run


class _Player:
    """Plays a script in one process."""

    def __init__(self, script: Script) -> None:
        self.pid, self.directory = os.getpid(), Path(script.directory)
        self._script = script
        self._guard = threading.Lock()
        self._steps = 0
        self._matches = [0] * len(script.faults)
        self.end: Callable[[], None] = lambda: None
        if script.watch:
            self.end = power_cut.watch(script.watch, script.directory)

    def take(self, at: str, number: int) -> None:
        """A training step is here: let happen what the script says. Steps are many, so only faults are put down."""
        from powertrain.worker import context, session

        if not session.in_worker():
            return
        rank, attempt = context.get_context().get_world_rank(), context.get_context().get_attempt()
        due = (
            index
            for index, fault in enumerate(self._script.faults)
            if isinstance(fault.where, Step)
            and is_reached(fault.where, rank=rank, attempt=attempt, at=at, step=number)
            and self._is_left(index, fault.times)
        )
        self._let_happen(due, f"rank-{rank}", boundaries.TRAINING_STEP, f"attempt-{attempt}/{at}/{number}")

    def cross(self, kind: str, target: str) -> None:
        """Put the step towards storage down, then let happen what the script says."""
        with self._guard:
            self._steps += 1
            names = power_cut.names_below(self._script.watch) if self._script.watch else None
            crossing = Crossing(
                role=boundaries.role, pid=self.pid, kind=kind, target=target, number=self._steps, names=names
            )
            chronicle.append(self.directory, crossing)
            due = [
                index
                for index, fault in enumerate(self._script.faults)
                if self._is_due(index, fault, crossing)
            ]
        self._let_happen(due, crossing.role, kind, target)

    def _let_happen(self, due: Iterable[int], role: str, kind: str, target: str) -> None:
        for index in due:
            told = Fired(fault=index, role=role, pid=self.pid, kind=kind, target=target)
            chronicle.append(self.directory, told)
            _act(self._script.faults[index].what, target)

    def _is_due(self, index: int, fault: Fault, crossing: Crossing) -> bool:
        where = fault.where
        if not isinstance(where, Boundary):
            return False
        described = (
            (crossing.role, where.role),
            (crossing.kind, where.kind),
            (crossing.target, where.target),
        )
        if not all(fnmatch.fnmatchcase(text, pattern) for text, pattern in described):
            return False
        self._matches[index] += 1
        return self._matches[index] >= where.number and self._is_left(index, fault.times)

    def _is_left(self, index: int, times: int | None) -> bool:
        """True for as many callers, of all processes, as the fault may happen."""
        if times is None:
            return True
        for turn in range(times):
            try:
                os.close(os.open(self.directory / f"fault-{index}-{turn}", os.O_CREAT | os.O_EXCL))
                return True
            except FileExistsError:
                continue
        return False


def is_reached(where: Step, *, rank: int, attempt: int, at: str, step: int) -> bool:
    """True at the step of ``where`` and at those of its kind that follow in the attempt."""
    return where.rank == rank and where.attempt in (None, attempt) and where.at == at and where.step <= step


def _act(what: Action, target: str) -> None:
    if isinstance(what, Raise):
        raise _exception(what, target)
    if isinstance(what, Hang):
        _hang(what.kind, _FOR_EVER if what.seconds is None else what.seconds)
    elif isinstance(what, Slow):
        time.sleep(what.seconds)
    else:
        # To this very thread, so that it takes no further step while the process is on its way to stop.
        signal.pthread_kill(
            threading.get_ident(), signal.SIGKILL if isinstance(what, Kill) else signal.SIGSTOP
        )


def _exception(what: Raise, target: str) -> BaseException:
    """Raises TypeError or AttributeError where there is none such."""
    if what.errno is not None:
        if what.error != "RuntimeError":
            raise TypeError("a number is that of an OSError")
        return OSError(what.errno, what.message or os.strerror(what.errno), target)
    kind = getattr(builtins, what.error)
    if not (isinstance(kind, type) and issubclass(kind, BaseException)):
        raise TypeError(f"{what.error} is not an exception")
    return kind(what.message or f"a scripted fault at {target}")


#: Seconds, about thirty years.
_FOR_EVER = 1e9


def _hang(kind: HangKind, seconds: float) -> None:
    """Come back after so many seconds. A signal does not shorten it, unless its handler raises."""
    if kind == "sleep":
        time.sleep(seconds)
    elif kind == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=seconds)
    elif kind == "loop":
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass
    else:
        # Calls through a PyDLL keep the interpreter's lock, those through a CDLL give it away.
        _wait_in_c(ctypes.PyDLL(None) if kind == "gil" else ctypes.CDLL(None), seconds)


def _wait_in_c(library: ctypes.CDLL, seconds: float) -> None:
    """Wait in one call of C for a condition that is never signalled: unlike a sleep of C, it goes on after a signal."""
    mutex, condition = (ctypes.create_string_buffer(256) for _ in range(2))  # more than any system needs
    library.pthread_mutex_init(mutex, None)
    library.pthread_cond_init(condition, None)
    library.pthread_mutex_lock(mutex)
    until = time.time() + seconds
    timespec = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
    library.pthread_cond_timedwait(condition, mutex, timespec)


_player: _Player | None = None


def _current() -> _Player | None:
    """Return the script that plays in this process; a forked one begins its own."""
    global _player
    if _player is None or _player.pid != os.getpid():
        script = os.environ.get(VARIABLE)
        _player = _Player(msgspec.json.decode(script, type=Script)) if script else None
    return _player


def at_boundary(kind: str, target: str) -> None:
    """The hook that :func:`environment` names."""
    player = _current()
    if player is None:
        return
    if kind == boundaries.TRAINING_STEP:
        at, _, number = target.partition("/")
        player.take(at, int(number))
    else:
        player.cross(kind, target)
