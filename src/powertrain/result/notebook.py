"""The live view of a run in a notebook: the card of its result, updated while it trains and left behind at its end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from powertrain.run.record import journal
from powertrain.storage import Storage
from powertrain.text.loggers import module_logger

#: Seconds between two updates at least: of real files, and of remote storage.
_LOCAL_INTERVAL_S, _REMOTE_INTERVAL_S = 1.0, 10.0
#: The pause is at least this many times the duration of the last update.
_PAUSE_FACTOR = 20.0
_logger = module_logger(__name__)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """Shows a card in the cell that is running. A context manager; the last update stays in the notebook.

    Showing a run must not end it: after an error there are no further updates.

    Args:
        storage: The run's directory.
        name: Its name.
        show: Shows HTML in the cell, and returns a function that replaces it; IPython's by default.
    """

    def __init__(
        self,
        storage: Storage,
        name: str,
        show: Callable[[str], Callable[[str], None]] | None = None,
    ) -> None:
        self._storage, self._name = storage, name
        self._show = show or _show_in_cell
        self._replace: Callable[[str], None] | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._update, name="powertrain-notebook", daemon=True)

    def __enter__(self) -> NotebookView:
        try:
            # On the thread of the cell, which it belongs to from then on.
            self._replace = self._show(card_html(self._storage, self._name))
            self._thread.start()
        except Exception:
            _logger.debug("The run cannot be shown in this notebook.", exc_info=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.update()

    def update(self) -> bool:
        """Show the run as it is now; return whether that was possible."""
        if self._replace is None:
            return False
        try:
            self._replace(card_html(self._storage, self._name))
        except Exception:
            _logger.debug("The run cannot be shown in this notebook any more.", exc_info=True)
            self._replace = None
        return self._replace is not None

    def _update(self) -> None:
        least = _LOCAL_INTERVAL_S if self._storage.local_path("x") is not None else _REMOTE_INTERVAL_S
        pause = least
        while not self._over.wait(pause):
            began = time.monotonic()
            if not self.update():
                return
            pause = max(least, _PAUSE_FACTOR * (time.monotonic() - began))


def card_html(storage: Storage, name: str) -> str:
    """Return the card of a run as it is now. An unreadable part shows its error."""
    from powertrain.checkpoint.committed import committed
    from powertrain.diagnosis import final
    from powertrain.result import contents, html
    from powertrain.run.metrics import reading

    facts = journal.read(storage)
    if not facts:
        return html.html(html.ResultCard(path=storage.uri, state="starting", name=name))
    state = journal.replay(facts)
    report = final.report_of(storage, name)
    card = contents.card_of(
        contents.Contents(
            path=storage.uri,
            storage=lambda: storage,
            facts=lambda: facts,
            state=lambda: state,
            manifests=lambda: committed(storage),
            findings=lambda: report.findings if report is not None else (),
            report=lambda: report,
        ),
        state=state.state,
        reason=state.reason,
        metrics=reading.last_of_rank(storage, state, 0) or {},
        error=None,
    )
    return html.html(card)


def _show_in_cell(text: str) -> Callable[[str], None]:
    from IPython.display import display

    def bundle(page: str) -> dict[str, str]:
        return {"text/html": page, "text/plain": "a run of Powertrain"}

    show: Any = display  # IPython has no types here
    handle = show(bundle(text), raw=True, display_id=True)

    def replace(newer: str) -> None:
        handle.update(bundle(newer), raw=True)

    return replace
