"""Names of prepared loaders in checkpoints, and the end of their worker processes."""

from __future__ import annotations

import itertools
import os
import reprlib
import signal
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError

if TYPE_CHECKING:
    from powertrain.worker.session import Session


#: Id of the process that ends loaders' processes at its exit, and the names of each session's loaders in checkpoints.
_ending_processes = 0
_names: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def free(session: Session, name: str) -> None:
    """Release the name of a prepared loader that was dropped."""
    _names.setdefault(session, set()).discard(name)
    session.data.let_go(name)


def end_processes_at_exit() -> None:
    """Let this process exit although loaders' processes block SIGTERM, which multiprocessing would send them."""
    from multiprocessing import util

    global _ending_processes
    if _ending_processes != os.getpid():
        util.Finalize(None, _kill_sigterm_blockers, exitpriority=100)
        _ending_processes = os.getpid()


def _kill_sigterm_blockers() -> None:
    from multiprocessing import active_children

    for child in active_children():
        if child.daemon and child.pid is not None and _blocks_sigterm(child.pid):
            child.kill()


def _blocks_sigterm(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as status:
            masks = [line.split()[1] for line in status if line.startswith("SigBlk:")]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (signal.SIGTERM - 1) & 1)


def free_name(session: Session, wanted: str | None, fingerprint: str) -> str:
    """Return ``wanted``, or the next of "loader", "loader-2", ...: the same on ranks that prepare in the same order."""
    taken = _names.setdefault(session, set())
    if wanted is None:
        names = itertools.chain(["loader"], (f"loader-{number}" for number in itertools.count(2)))
        wanted = next(
            name for name in names if name not in taken and _can_follow(session.data.left(name), fingerprint)
        )
    elif not isinstance(wanted, str) or not wanted:
        raise ConfigError(
            f"prepare_data_loader(name={reprlib.repr(wanted)}) cannot be used: checkpoints need a name for the "
            "loader's position. Give some text, or leave it out."
        )
    elif wanted in taken:
        raise ConfigError(
            f"prepare_data_loader(name={wanted!r}) was called twice, and checkpoints could not tell the two loaders "
            "apart. Prepare a loader once, before the loop over epochs, and give each its own name."
        )
    taken.add(wanted)
    return wanted


def _can_follow(left: Mapping[str, Any] | None, fingerprint: str) -> bool:
    """Return whether a loader over this data may continue from a dropped one."""
    return left is None or left["fingerprint"] == fingerprint
