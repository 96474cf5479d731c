"""Attachment of a framework's callback: traces the whole training while it runs."""

from __future__ import annotations

import dataclasses

from powertrain import trace
from powertrain.trace.recording import patches


class Attachment:
    """Install missing patches, and restore the previous ones at the end.

    Patches of input and device copies stay as configured: loops wrap those themselves. Models, backward passes and
    optimizers belong to the framework, so only patches can detect when they begin and end.
    """

    def __init__(self) -> None:
        self._before: patches.Patches | None = None
        self._ours: patches.Patches | None = None

    def begin(self) -> None:
        """Start recording in a process that does not record yet; it continues after :meth:`end`."""
        self.end()
        before = patches.installed()
        if before is None:
            trace.init()
            return
        wider = dataclasses.replace(before.choice, forward=True, backward=True, rest=True)
        if wider != before.choice:
            self._before = before
            self._ours = patches.install(before.recorder, wider)

    def end(self) -> None:
        """Restore the previous patches. Idempotent; later patches of other code stay."""
        before, ours = self._before, self._ours
        self._before = self._ours = None
        if before is not None and ours is patches.installed():
            patches.install(before.recorder, before.choice)
