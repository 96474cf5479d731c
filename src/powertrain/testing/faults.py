"""Faults by script: kill, freeze, delay or refuse at a chosen step of a run, in whichever process takes it.

A fault says where (:class:`Boundary`) and what (:class:`Kill`, :class:`Freeze`, :class:`Raise`, :class:`Delay`). A
script of them reaches every process of a run through the environment::

    kill = Fault(Boundary(role="controller", kind="link", target="*/MANIFEST.json"), Kill())
    subprocess.run([sys.executable, "train.py"], env={**os.environ, **environment(kill, directory=here)})

and this process through :func:`installed`. ``directory`` holds the chronicle: every step, and every fault that
happened, in order (:mod:`powertrain.testing.chronicle`). A run without faults tells in it which steps there are;
:func:`same_step` makes a place of one for a later run. With ``watch`` the chronicle also holds all that was flushed,
from which :mod:`powertrain.testing.power_cut` makes what a power cut would leave.
"""

from __future__ import annotations

import fnmatch
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Union

import msgspec

from powertrain.storage import boundaries
from powertrain.testing import chronicle, power_cut
from powertrain.testing.chronicle import Crossing, Fired, Note

#: Carries the script to every process of a run.
VARIABLE = "POWERTRAIN_FAULTS"


# --------------------------------------------------------------------------- what can be asked for


class Boundary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``number``-th step of a process that is as described. Patterns are those of a shell; "*" is anything."""

    #: Which process: "controller", "uploader", "rank-0".
    role: str = "*"
    #: What it is about to do: see ``powertrain.storage.boundaries.KINDS``.
    kind: str = "*"
    #: The path or key it is about to change.
    target: str = "*"
    #: Counted from 1 in each process apart, over the steps that are as described.
    number: int = 1


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """End the process with SIGKILL."""


class Freeze(msgspec.Struct, frozen=True, tag="freeze"):
    """Stop the process with SIGSTOP until somebody sends it SIGCONT."""


class Raise(msgspec.Struct, frozen=True, tag="raise"):
    """Refuse the step with an ``OSError`` of this number, such as ``errno.ENOSPC``."""

    errno: int


class Delay(msgspec.Struct, frozen=True, tag="delay"):
    """Take the step this much later."""

    seconds: float


Action = Union[Kill, Freeze, Raise, Delay]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One thing that goes wrong, at one place."""

    where: Boundary
    what: Action
    #: How often, in all processes together: from its number on, each such step until this many. None: no end.
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
        if fault.where.number < 1 or (fault.times is not None and fault.times < 1):
            raise ValueError(f"{fault} never happens: steps and times are counted from 1.")
    Path(directory).mkdir(parents=True, exist_ok=True)
    watched = "" if watch is None else os.path.abspath(watch)
    return Script(faults=list(faults), directory=os.path.abspath(directory), watch=watched)


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

    def cross(self, kind: str, target: str) -> None:
        """Put the step down, then let happen what the script says."""
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
        for index in due:
            told = Fired(fault=index, role=crossing.role, pid=self.pid, kind=kind, target=target)
            chronicle.append(self.directory, told)
            _act(self._script.faults[index].what, target)

    def _is_due(self, index: int, fault: Fault, crossing: Crossing) -> bool:
        where = fault.where
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


def _act(action: Action, target: str) -> None:
    if isinstance(action, Raise):
        raise OSError(action.errno, os.strerror(action.errno), target)
    if isinstance(action, Delay):
        time.sleep(action.seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL if isinstance(action, Kill) else signal.SIGSTOP)


_player: _Player | None = None


def _current() -> _Player | None:
    """What plays in this process; a forked one begins its own."""
    global _player
    if _player is None or _player.pid != os.getpid():
        script = os.environ.get(VARIABLE)
        _player = _Player(msgspec.json.decode(script, type=Script)) if script else None
    return _player


def at_boundary(kind: str, target: str) -> None:
    """The hook that :func:`environment` names."""
    player = _current()
    if player is not None:
        player.cross(kind, target)
