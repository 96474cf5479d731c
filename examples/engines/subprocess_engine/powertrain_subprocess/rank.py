"""The first code of a rank's interpreter: read the payload, call the entry, end with its code."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import NoReturn


def live(entry: str, payload_path: str, driver: int) -> NoReturn:
    """Run one process of the engine.

    Args:
        entry: "package.module:function", called with the payload.
        payload_path: A file with the payload; removed once it is read.
        driver: The process that this one must not outlive.
    """
    threading.Thread(target=_end_with, args=(driver,), name="powertrain-driver", daemon=True).start()
    path = Path(payload_path)
    payload = path.read_bytes()
    path.unlink()
    module, _, name = entry.partition(":")
    sys.exit(getattr(importlib.import_module(module), name)(payload))


def _end_with(driver: int) -> None:
    poll = select.poll()
    poll.register(os.pidfd_open(driver), select.POLLIN)
    poll.poll()
    os.killpg(0, signal.SIGKILL)
