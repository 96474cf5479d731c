"""Columns of another source that can only be named once its schema is known by inspection."""

from __future__ import annotations

from collections.abc import Sequence

from powertrain.data.arguments import shortened, shown
from powertrain.data.sources.base import Source, SourceFacts
from powertrain.data.sources.filtered import ProjectedSource
from powertrain.data.sources.plain import checked_columns
from powertrain.errors import DataError


class WithoutColumnsSource(ProjectedSource):
    """All columns of ``inner`` except the dropped ones."""

    def __init__(self, inner: Source, dropped: Sequence[str]) -> None:
        super().__init__(inner, None)
        self._dropped = tuple(dropped)

    def _inspect_data(self) -> SourceFacts:
        there = self._inner.inspect().schema.names
        checked_columns(self._dropped, there, "the data")
        self._columns = tuple(name for name in there if name not in self._dropped)
        if not self._columns:
            raise DataError(
                f"drop_columns({shown(list(self._dropped))}) leaves no column. Keep at least one."
            )
        return super()._inspect_data()


class RelabeledSource(ProjectedSource):
    """All columns of ``inner`` under new names, given in the order of the columns."""

    def __init__(self, inner: Source, names: Sequence[str]) -> None:
        super().__init__(inner, None)
        self._names = tuple(names)

    def _inspect_data(self) -> SourceFacts:
        there = self._inner.inspect().schema.names
        if len(there) != len(self._names):
            raise DataError(
                f"rename_columns() got {len(self._names)} names ({shortened(', '.join(self._names), 300)}) for "
                f"{len(there)} columns ({shortened(', '.join(there), 300)}). Give one for each, or a dict of "
                "those to change."
            )
        self._renames = dict(zip(there, self._names, strict=True))
        return super()._inspect_data()
