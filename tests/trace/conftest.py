"""Times are measured here on machines that others use too: what a host takes from a virtual one looks like a phase.

A test with the mark ``timed`` that fails is therefore tried again, twice at most, with everything of its own made anew.
What is wrong fails each time.
"""

from __future__ import annotations

import pytest
from _pytest.runner import runtestprotocol

_TRIES = 3


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "timed: measures time, and is tried again when the machine was held up"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if item.get_closest_marker("timed") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for number in range(1, _TRIES + 1):
        # With its file as what comes next, what is shared by the file's tests stays, and what is its own goes.
        reports = runtestprotocol(item, nextitem=item.parent, log=False)  # type: ignore[arg-type]
        if number == _TRIES or not any(report.failed for report in reports):
            break
        item._initrequest()  # type: ignore[attr-defined]
    item.session._setupstate.teardown_exact(nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
