"""Joining and leaving of a group by a backend's workers, without waiting for a worker that has exited."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

from powertrain.backend import WorkerGroup
from powertrain.text.loggers import module_logger

logger = module_logger(__name__)

#: Seconds for a worker to leave its group, and the additional wait of the driver for the replies.
LEAVE_TIMEOUT_S = 5.0
_LEAVE_SLACK_S = 3.0


def await_joined(joining: Sequence[Future[Any]]) -> None:
    """Wait until all workers have joined; raise the error of the first one that could not.

    The others would wait for it until their own timeout.
    """
    done, _ = wait(joining, return_when=FIRST_EXCEPTION)
    for future in joining:
        # Only errors are read: a value would be unpickled, and none is needed.
        if future in done and (error := future.exception()) is not None:
            raise error


def leave_all(worker_group: WorkerGroup, leave: Callable[[float], None]) -> None:
    """Call ``leave`` with its timeout in every worker that still answers. Never raises, never hangs."""
    try:
        leaving: Sequence[Future[None]] = worker_group.execute_async(leave, LEAVE_TIMEOUT_S)
    except Exception as error:
        logger.debug("The workers can no longer be asked to leave their group: %s", error)
        return
    done, late = wait(leaving, timeout=LEAVE_TIMEOUT_S + _LEAVE_SLACK_S)
    for future in done:
        if (problem := future.exception()) is not None:
            logger.debug("A worker did not leave its group: %s", problem)
    if late:
        logger.debug("%d workers did not answer when asked to leave their group", len(late))


def within(seconds: float, action: Callable[[], Any], what: str = "destroying the process group") -> str:
    """Call ``action`` with a timeout of ``seconds``; return the error, or "".

    A group with a broken member may never come back from being destroyed.
    """
    problems = [f"{what} took longer than {seconds:g} s"]

    def act() -> None:
        try:
            action()
            problems[0] = ""
        except Exception as error:
            problems[0] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=act, name="powertrain-leave-group", daemon=True)
    thread.start()
    thread.join(seconds)
    return problems[0]
