"""Hard timeout for a test that hangs in C, where pytest-timeout's exception cannot reach it.

pytest-timeout raises in the main thread as soon as Python code runs there again. A thread of :mod:`faulthandler` waits
a little longer, writes the stacks of all threads, and ends the process; pytest-xdist then reports the test as crashed,
starts a new worker and continues.
"""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

#: The ini option with the seconds after a test's own timeout: the time that its clean-up may take.
GRACE = "hang_grace"
GRACE_S = 60.0


def timeout_of(item: pytest.Item) -> float:
    """Return the pytest-timeout of a test in seconds; 0 for none."""
    mark = item.get_closest_marker("timeout")
    if mark is not None:
        return float(mark.args[0] if mark.args else mark.kwargs.get("timeout", 0))
    return float(item.config.getoption("timeout", None) or item.config.getini("timeout") or 0)


@contextmanager
def ending_the_process(item: pytest.Item, stderr: int) -> Iterator[None]:
    """End this process if the block takes longer than the test's timeout and the grace; writes to ``stderr`` first."""
    timeout = timeout_of(item)
    if not timeout:
        yield
        return
    grace = float(item.config.getini(GRACE))
    faulthandler.dump_traceback_later(timeout + grace, file=stderr, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
