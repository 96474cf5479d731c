"""The recorder of this process, and whether it records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from powertrain.trace.recording.recorder import Recorder, recorders

_current: Recorder | None = None
_is_kept = False


def current() -> Recorder:
    """Return this process's recorder: its rank's, or a new one for the calling thread."""
    global _current, _is_kept
    if _current is None:
        _current, _is_kept = Recorder(), False
    return _current


def recording() -> Recorder | None:
    """Return this process's recorder, or None; for code that adds marks only while recording."""
    return _current


def is_kept() -> bool:
    """Return whether the records of this process are kept; False for a recorder that :func:`current` created."""
    return _current is not None and _is_kept


@contextmanager
def phase(number: int) -> Iterator[None]:
    """Attribute the time within to a phase, if this process records."""
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
    """Set this process's recorder, whose records are kept; None for none yet."""
    global _current, _is_kept
    _current, _is_kept = recorder, True


def _record_nothing_in_child() -> None:
    """Disable recording in a forked child, such as a loader worker, which would write to its parent's ring."""
    global _current
    for recorder in recorders:
        recorder.thread = 0
    _current = None


os.register_at_fork(after_in_child=_record_nothing_in_child)
