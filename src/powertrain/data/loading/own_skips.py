"""Loops that skip, after a restart, the batches that they have trained on before.

The data layer does that already: an epoch resumes behind the last batch before the checkpoint. A loop that skips as
many batches again would silently lose their rows, so it is stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.errors import DataError


@dataclass(frozen=True)
class ResumedEpoch:
    """An epoch that resumes in its middle: ``skipped`` of its ``total`` batches were consumed before the restart."""

    epoch: int
    skipped: int
    total: int

    def described(self, name: str) -> str:
        """Return a sentence on where the dataset ``name`` resumes."""
        return (
            f"data: resuming epoch {self.epoch} of {name!r} at batch {self.skipped} of {self.total}; batches already "
            "consumed are skipped for you"
        )


class SkipWatch:
    """Counts the batches of one dataset that are drawn without an optimizer step between them.

    A loop skips by itself if it draws as many batches as were skipped for it (or all that are left, where those are
    fewer) without a step, and never drew so many before the restart. This distinguishes it from datasets that are read
    without steps (for an evaluation, or with a framework whose steps are not known) and from accumulated gradients.
    """

    def __init__(self, name: str, known: int | None = None) -> None:
        """``known`` is :attr:`longest` of the attempt that made the checkpoint, if the checkpoint has it."""
        self._name, self._known = name, known
        #: The most batches drawn without a step between them, counted when the next one was requested. None as long as
        #: there was no step between any of them: a loop without steps proves nothing.
        self.longest = known
        self._longest = known or 0
        self._steps, self._drawn, self._left = -1, 0, 0
        self._resumed: ResumedEpoch | None = None

    def resume(self, resumed: ResumedEpoch) -> None:
        """Note that the iteration that begins now resumes in mid-epoch."""
        self._resumed, self._drawn, self._left = resumed, 0, resumed.total - resumed.skipped

    def request(self, steps: int) -> None:
        """Record a request for a batch, or the end of an epoch, after ``steps`` optimizer steps of this process.

        Raises:
            DataError: The loop skips batches that were skipped for it.
        """
        if steps != self._steps:
            if self._drawn:
                self._resumed = None  # it trains
                self.longest = self._longest
            self._steps, self._drawn = steps, 0
        resumed = self._resumed
        if resumed is not None:
            again = min(resumed.skipped, resumed.total - resumed.skipped)
            if self._known is not None and self._drawn > self._known and self._drawn >= again:
                raise DataError(self._refusal(resumed))
            if not self._left:
                self._resumed = None  # its epoch is over
        self._longest = max(self._longest, self._drawn)
        if self.longest is not None:
            self.longest = self._longest

    def draw(self) -> None:
        """Record that the requested batch is handed out."""
        self._drawn += 1
        self._left -= 1

    def _refusal(self, resumed: ResumedEpoch) -> str:
        return (
            f"The loop skips batches that were skipped for it: epoch {resumed.epoch} of the dataset {self._name!r} was "
            f"resumed at batch {resumed.skipped} of {resumed.total}, and then {self._drawn} batches were drawn without "
            "an optimizer step between them. Their rows would never be trained on. Take the skipping out of the loop "
            "(such as 'if i <= start_batch: continue'), or keep it and let the epoch begin again at its first batch: "
            "DataConfig(resume='epoch') for datasets, prepare_data_loader(loader, resume='epoch') for a DataLoader."
        )
