"""What a framework's callback needs: everything its training does is traced, for as long as it goes on."""

from __future__ import annotations

import dataclasses

from powertrain import trace
from powertrain.trace.recording import patches


class Attachment:
    """Patches what is not patched yet, and puts back what was there before.

    What input and copies to a device cost stays as it was chosen: loops wrap those themselves. Models, backward passes
    and optimizers are the framework's own, so nobody else could say when they begin and end.
    """

    def __init__(self) -> None:
        self._before: patches.Patches | None = None
        self._ours: patches.Patches | None = None

    def begin(self) -> None:
        """In a process that records nothing yet, recording begins, and goes on after :meth:`end`."""
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
        """Again is fine. Whatever somebody else has patched meanwhile stays."""
        before, ours = self._before, self._ours
        self._before = self._ours = None
        if before is not None and ours is patches.installed():
            patches.install(before.recorder, before.choice)
