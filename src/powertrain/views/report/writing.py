"""``report.html`` in a run's directory, written at its end."""

from __future__ import annotations

import functools

from powertrain.run.record import journal
from powertrain.storage import Storage
from powertrain.trace import store
from powertrain.views.report.content import logs_in, run_report
from powertrain.views.run_page import ShownRun

#: In the run's directory.
REPORT = "report.html"
#: Seconds after which no further curves are read: the end of the run would wait for them.
_CURVES_TIMEOUT_S = 3.0


def keep_report(storage: Storage, name: str) -> None:
    """Write the report of a run that is over into its directory."""
    facts = journal.read(storage)
    if not facts:
        return
    view = ShownRun(name, storage, facts, functools.cache(lambda: store.read(storage)))
    storage.put(REPORT, run_report(view, logs_in(view), _CURVES_TIMEOUT_S))
