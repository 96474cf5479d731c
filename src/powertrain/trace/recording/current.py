"""The recorder of this process, and whether it records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from powertrain.trace.recording.recorder import Recorder, recorders

_current: Recorder | None = None
_is_kept = False


def current() -> Recorder:
    """This process's recorder: its rank's, or one that is made now for the thread that asks."""
    global _current, _is_kept
    if _current is None:
        _current, _is_kept = Recorder(), False
    return _current


def recording() -> Recorder | None:
    """This process's recorder, where there is one: for code that notes what it does only if anybody records."""
    return _current


def is_kept() -> bool:
    """Whether somebody keeps what this process records: not where there is a recorder only because it was asked for."""
    return _current is not None and _is_kept


@contextmanager
def phase(number: int) -> Iterator[None]:
    """What is within belongs to a phase, where this process records at all."""
    recorder = _current
    if recorder is None:
        yield
        return
    depth = recorder.enter(number)
    try:
        yield
    finally:
        recorder.leave(depth)


def use(recorder: Recorder | None) -> None:
    """Let ``recorder`` be this process's, which somebody keeps; None for none yet."""
    global _current, _is_kept
    _current, _is_kept = recorder, True


def _record_nothing_in_child() -> None:
    """A forked child, such as a loader's process, has its parent's thread and would write in its parent's ring."""
    global _current
    for recorder in recorders:
        recorder.thread = 0
    _current = None


os.register_at_fork(after_in_child=_record_nothing_in_child)
