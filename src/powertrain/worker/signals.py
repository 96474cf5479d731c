"""Signals by which a scheduler, or a closed terminal, announces the end of a process.

They are noticed through a descriptor, so that the side thread learns of them even while the main thread is deep
inside a collective; the handler itself does nothing. Forked children are not affected: for them the signals keep their
earlier handlers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: Slurm's ``--signal`` names one of these; elsewhere they are the user's own.
_GRACE_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_ALL = frozenset({signal.SIGTERM, signal.SIGHUP, *_GRACE_SIGNALS})
#: Signals within so many seconds of each other are one: a scheduler and a launcher may both send it.
SAME_NOTICE_INTERVAL_S = 0.3
#: Functions that undo the current changes to this process's signal handlers, oldest first.
_in_force: list[Callable[[], None]] = []


def notice_signals(environ: Mapping[str, str] | None = None) -> tuple[signal.Signals, ...]:
    """Return the signals that announce an end: SIGTERM, SIGHUP, and within a Slurm job those that it may send before.

    SIGHUP stays ignored in a process that was started with nohup.
    """
    in_slurm = "SLURM_JOB_ID" in (os.environ if environ is None else environ)
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return (signal.SIGTERM, *hangup, *(_GRACE_SIGNALS if in_slurm else ()))


class NoticedSignals:
    """This process's notice signals, readable from ``descriptor``. Made and closed in the main thread only.

    With ``end`` the second signal calls it in the main thread, and the third has its default effect: for a process that
    no engine may end.
    """

    def __init__(self, end: Callable[[], None] | None = None) -> None:
        self._end, self._first = end, 0.0
        self._numbers = notice_signals()
        self.descriptor, self._write = os.pipe()
        for descriptor in (self.descriptor, self._write):
            os.set_blocking(descriptor, False)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._on_signal)
            for number in self._numbers
            if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN)  # the user's own handler stays
        }
        self._wakeup_before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._undo = self._restore  # one object, to be found again
        _in_force.append(self._undo)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)

    def take(self) -> list[signal.Signals]:
        """Return the notice signals since the last call. Any thread."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(n) for n in os.read(self.descriptor, 256) if n in self._numbers]
        return []

    def close(self) -> None:
        _in_force.remove(self._undo)
        self._restore()
        os.close(self._write)
        os.close(self.descriptor)

    def _on_signal(self, number: int, frame: object) -> None:
        """Count a signal. The descriptor has delivered it already, unless this process must end itself."""
        now = time.monotonic()
        if self._end is None or not self._first or now - self._first < SAME_NOTICE_INTERVAL_S:
            self._first = self._first or now
            return
        for each, handler in self._before.items():
            signal.signal(each, handler)
        self._end()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)


def leave_to_users_code() -> None:
    """Restore the original handlers of notice signals. Main thread only."""
    for undo in _in_force:
        undo()


@contextlib.contextmanager
def handling(notify: Callable[[signal.Signals], None]) -> Iterator[None]:
    """Call ``notify`` from the handler of each notice signal, for as long as the block lasts. Main thread only; in
    other threads it does nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {
        number: signal.signal(number, lambda n, _: notify(signal.Signals(n))) for number in notice_signals()
    }

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    _in_force.append(restore)
    try:
        yield
    finally:
        _in_force.remove(restore)
        restore()


# --------------------------------------------------------------------------- forks


def _hold_back() -> None:
    """Block signals before a fork: one sent to the child at once must not be taken for a signal to this process."""
    if _in_force:
        signal.pthread_sigmask(signal.SIG_BLOCK, _ALL)


def _let_through() -> None:
    if _in_force:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)


def _forget_in_child() -> None:
    """Restore the earlier handlers in a forked child."""
    if _in_force:
        while _in_force:
            _in_force.pop()()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ALL)


os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_forget_in_child)
