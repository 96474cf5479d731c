"""A source that looks at its data once."""

from __future__ import annotations

from abc import abstractmethod

from powertrain.data.sources.base import Source, SourceFacts


class RememberingSource(Source):
    """Keeps what :meth:`_look` has found, also across pickling."""

    def __init__(self) -> None:
        self._facts: SourceFacts | None = None

    def inspect(self) -> SourceFacts:
        if self._facts is None:
            self._facts = self._look()
        return self._facts

    @abstractmethod
    def _look(self) -> SourceFacts:
        """Look at the data; raises :class:`~powertrain.errors.DataError` for whatever is wrong with it."""
