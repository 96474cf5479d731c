"""Stop and resize runs from the dashboard, and look at their stacks, where that was allowed at its start."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Any

from powertrain.lookup.asking import ask
from powertrain.lookup.finding import FoundRun
from powertrain.lookup.stacks import ask_for_stacks, stack_lines
from powertrain.run.remote import protocol
from powertrain.ui.queries import BadQuery

_MOST_WORKERS = 1 << 20


def control(found: FoundRun, wanted: Any) -> dict[str, Any]:
    """Send a request to a live run and return its answer.

    Args:
        found: The run or sweep.
        wanted: ``{"action": "stop", "now": bool}``, ``{"action": "resize", "workers": N}`` or ``{"action": "stacks"}``,
            whose answer has the stacks of all ranks as ``text``.

    Raises:
        BadQuery: The request is something else.
        StorageError: The run cannot be reached from this machine.
    """
    action = wanted.get("action") if isinstance(wanted, dict) else None
    request: protocol.Request
    if action == "stacks":
        return _stacks(found)
    if action == "stop":
        request = protocol.StopRequest(by=_requester(), now=wanted.get("now") is True)
    elif (
        action == "resize" and type(wanted.get("workers")) is int and 1 <= wanted["workers"] <= _MOST_WORKERS
    ):
        request = protocol.ResizeRequest(workers=wanted["workers"])
    else:
        raise BadQuery("the request is neither a stop, nor a resize with a number of workers, nor for stacks")
    answer = ask(found, request)
    return {"ok": answer.ok, "message": answer.message}


def _stacks(found: FoundRun) -> dict[str, Any]:
    answer, stands, seen = ask_for_stacks(found)
    text = "\n".join(stack_lines(found.name, stands, seen, each=False))
    return {"ok": answer.ok, "message": answer.message, "text": text}


def _requester() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())  # a container's user without a name
    return f"{user}@{socket.gethostname()} with the dashboard, pid {os.getpid()}"
