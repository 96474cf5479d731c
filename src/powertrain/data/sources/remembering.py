"""A source that inspects its data once."""

from __future__ import annotations

from abc import abstractmethod

from powertrain.data.sources.base import Source, SourceFacts


class RememberingSource(Source):
    """Keeps the result of :meth:`_inspect_data`, also across pickling."""

    def __init__(self) -> None:
        self._facts: SourceFacts | None = None

    def inspect(self) -> SourceFacts:
        if self._facts is None:
            self._facts = self._inspect_data()
        return self._facts

    @abstractmethod
    def _inspect_data(self) -> SourceFacts:
        """Inspect the data; raises :class:`~powertrain.errors.DataError` for invalid data."""
