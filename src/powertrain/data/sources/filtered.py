"""Sources made of another source: the rows that fit a condition, a sample of rows, some of the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from powertrain.data.arguments import shortened
from powertrain.data.plan.order import Ints, permutation
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.plain import checked_columns
from powertrain.data.sources.remembering import RememberingSource
from powertrain.errors import DataError

_S = TypeVar("_S", bound=Source)


class FilteredSource(RememberingSource):
    """The rows of ``inner`` for which an Arrow expression is true (not false and not null).

    They are counted once, block by block, by reading the columns that the expression names.
    """

    def __init__(self, inner: Source, expression: pc.Expression) -> None:
        super().__init__()
        self._inner, self._expression = inner, expression
        self.in_memory, self.cheap_to_decode = inner.in_memory, inner.cheap_to_decode
        self._needed: tuple[str, ...] = ()

    def _inspect_data(self) -> SourceFacts:
        facts = self._inner.inspect()
        self._needed = columns_of(self._expression, facts.schema)
        blocks = []
        for number, block in enumerate(facts.blocks):
            rows = int(self._kept(number).sum()) if block.rows else 0
            blocks.append(BlockFacts(rows, block.nbytes * rows // max(block.rows, 1)))
        condition = _identity_of(self._expression)
        return facts.derived(
            lambda inner: xxhash.xxh3_128_hexdigest(f"{inner}\0{condition}".encode()), blocks=tuple(blocks)
        )

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        names = schema.names if columns is None else list(columns)
        wanted = [*names, *(name for name in self._needed if name not in names)]
        for batch in self._inner.read(block, wanted):
            kept = mask_of(self._expression, batch).nonzero()[0]
            if len(kept):
                yield _taken(batch, kept, names)

    @property
    def cache_key(self) -> str:
        # Also for conditions that the text does not distinguish, such as those on constants of other types.
        return f"{self.inspect().fingerprint}/{_serialized_hash(self._expression)}/{self._inner.cache_key}"

    def name_row(self, block: int, row: int) -> str:
        kept = self._kept(block).nonzero()[0]
        return self._inner.name_row(block, int(kept[row]))

    def select(self, columns: Sequence[str]) -> Source | None:
        if self._facts is not None:
            return None  # its rows are counted already
        needed = columns_of(self._expression, self._inner.glimpse())
        inner = self._inner.select([*columns, *(name for name in needed if name not in columns)])
        return None if inner is None else FilteredSource(inner, self._expression)

    def _kept(self, block: int) -> Any:
        """Return the rows of a block of the inner source that are kept."""
        masks = [mask_of(self._expression, batch) for batch in self._inner.read(block, self._needed)]
        return np.concatenate(masks) if masks else np.zeros(0, bool)

    def publish(self, directory: str) -> Source:
        return _around(self, self._inner.publish(directory))


def _identity_of(expression: pc.Expression) -> str:
    """Return a text that differs for conditions that differ.

    Arrow's own text is the same in all its versions, but leaves out the middle of long lists of values.
    """
    text = str(expression)
    return _serialized_hash(expression) if "..." in text else text


def _serialized_hash(expression: pc.Expression) -> str:
    reduced: Any = expression.__reduce__()
    return xxhash.xxh3_128_hexdigest(memoryview(reduced[1][0]))


def columns_of(expression: pc.Expression, schema: pa.Schema) -> tuple[str, ...]:
    """Return the columns named by an expression; raises :class:`DataError` where it does not fit the schema."""
    empty = schema.empty_table()
    try:
        kind = _evaluated(expression, empty).type
    except (pa.ArrowException, KeyError) as error:
        columns = ", ".join(f"{field.name!r} ({field.type})" for field in schema)
        raise DataError(
            f"The filter {shortened(str(expression), 200)} does not fit the data: "
            f"{shortened(str(error).partition(' in ')[0], 300)}. The columns are {shortened(columns, 2000)}."
        ) from error
    if not (pa.types.is_boolean(kind) or pa.types.is_null(kind)):
        raise DataError(
            f"The filter {shortened(str(expression), 200)} gives {kind} and not true or false. Compare it with "
            "something."
        )
    named = []
    for name in schema.names:
        try:
            _evaluated(expression, empty.drop_columns([name]))
        except (pa.ArrowException, KeyError):
            named.append(name)
    # A constant condition is still evaluated row by row, for which some column must be read.
    return tuple(named) or tuple(schema.names[:1])


def mask_of(expression: pc.Expression, batch: pa.RecordBatch) -> Any:
    """Return for each row of ``batch`` whether the expression is true, as a numpy array."""
    try:
        found = _evaluated(expression, pa.Table.from_batches([batch])).fill_null(False)
    except (pa.ArrowException, KeyError) as error:
        raise DataError(
            f"The filter {shortened(str(expression), 200)} cannot be computed: {shortened(str(error), 300)}. Compare a "
            "column with a value of its type."
        ) from error
    return found.to_numpy().astype(bool)


def _evaluated(expression: pc.Expression, table: pa.Table) -> Any:
    from pyarrow import acero

    rows = acero.Declaration("table_source", acero.TableSourceNodeOptions(table))
    result = acero.Declaration("project", acero.ProjectNodeOptions([expression], ["kept"]))
    # On this thread: a process that has started Arrow's threads cannot be forked any more.
    return acero.Declaration.from_sequence([rows, result]).to_table(use_threads=False).column(0)


def _taken(batch: pa.RecordBatch, rows: Any, names: Sequence[str]) -> pa.RecordBatch:
    """Return some rows, and some columns, of a batch."""
    chosen = batch if list(names) == batch.schema.names else batch.select(list(names))
    if len(rows) == batch.num_rows:
        return chosen
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return chosen.slice(int(rows[0]), len(rows))
    return chosen.take(pa.array(rows))


def _around(source: _S, inner: Source) -> _S:
    """Return a copy of a source with another inner one, and with its inspection results."""
    import copy

    other = copy.copy(source)
    vars(other)["_inner"] = inner
    return other


class SampledSource(RememberingSource):
    """A share of the rows of ``inner``, taken evenly from all its blocks; or, as ``complement``, all the others.

    Of the first n rows always floor(n * fraction) belong to the share, independent of the blocks.
    """

    def __init__(
        self, inner: Source, fraction: float | Fraction, seed: int, complement: bool = False
    ) -> None:
        super().__init__()
        # As the number is written: 0.29 of 100 rows are 29, though the float is slightly less.
        self._fraction = fraction if isinstance(fraction, Fraction) else Fraction(str(fraction))
        if not 0 <= self._fraction <= 1:
            raise DataError(
                f"A share of {float(fraction)} of the rows cannot be taken. Give a number from 0 to 1."
            )
        self._inner, self._seed, self._complement = inner, seed, complement
        self.in_memory, self.cheap_to_decode = inner.in_memory, inner.cheap_to_decode
        self._firsts: tuple[int, ...] = ()

    def _inspect_data(self) -> SourceFacts:
        facts = self._inner.inspect()
        blocks, firsts, first = [], [], 0
        for block in facts.blocks:
            firsts.append(first)
            rows = self._sampled(first, block.rows)
            rows = block.rows - rows if self._complement else rows
            blocks.append(BlockFacts(rows, block.nbytes * rows // max(block.rows, 1)))
            first += block.rows
        self._firsts = tuple(firsts)
        sample = f"{self._fraction}\0{self._seed}\0{self._complement}"
        return facts.derived(
            lambda inner: xxhash.xxh3_128_hexdigest(f"{inner}\0{sample}".encode()), blocks=tuple(blocks)
        )

    def _sampled(self, first: int, rows: int) -> int:
        return int((first + rows) * self._fraction) - int(first * self._fraction)

    def _chosen(self, block: int) -> Ints:
        """Return the rows of a block of the inner source that are kept, in their order."""
        self.inspect()
        rows = self._inner.inspect().blocks[block].rows
        sampled = self._sampled(self._firsts[block], rows)
        order = permutation(rows, self._seed, "sample", block)
        return np.sort(order[sampled:] if self._complement else order[:sampled])

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        chosen, first = self._chosen(block), 0
        for batch in self._inner.read(block, columns) if len(chosen) else ():
            low, high = np.searchsorted(chosen, [first, first + batch.num_rows])
            if low < high:
                yield _taken(batch, chosen[low:high] - first, batch.schema.names)
            first += batch.num_rows

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._inner.cache_key}"

    def name_row(self, block: int, row: int) -> str:
        return self._inner.name_row(block, int(self._chosen(block)[row]))

    def select(self, columns: Sequence[str]) -> Source | None:
        inner = self._inner.select(columns)
        if inner is None:
            return None
        return SampledSource(inner, self._fraction, self._seed, self._complement)

    def publish(self, directory: str) -> Source:
        return _around(self, self._inner.publish(directory))


class ProjectedSource(RememberingSource):
    """Some columns of ``inner``, in the order of ``columns``; ``renames`` gives some of them another name."""

    def __init__(
        self, inner: Source, columns: Sequence[str] | None, renames: Mapping[str, str] | None = None
    ) -> None:
        super().__init__()
        self._inner, self._columns = inner, None if columns is None else tuple(columns)
        self._renames = dict(renames or {})
        self.in_memory, self.cheap_to_decode = inner.in_memory, inner.cheap_to_decode
        self._stored: dict[str, str] = {}

    def _inspect_data(self) -> SourceFacts:
        if self._columns is not None:
            # Before the inspection, so that files may differ in the columns that are not requested.
            self._inner = self._inner.select(list(self._columns)) or self._inner
        facts = self._inner.inspect()
        columns = facts.schema.names if self._columns is None else self._columns
        checked_columns([*columns], facts.schema.names, "the data")
        checked_columns([*self._renames], list(columns), "the data that is left")
        fields = [facts.schema.field(name).with_name(self._renames.get(name, name)) for name in columns]
        names = [field.name for field in fields]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise DataError(
                f"After renaming there would be several columns {twice[0]!r}. Choose another name."
            )
        self._stored = dict(zip(names, columns, strict=True))
        return replace(facts, schema=pa.schema(fields))

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        wanted = schema if columns is None else pa.schema([schema.field(name) for name in columns])
        for batch in self._inner.read(block, [self._stored[name] for name in wanted.names]):
            yield pa.RecordBatch.from_arrays(batch.columns, schema=wanted) if wanted.names else batch

    @property
    def cache_key(self) -> str:
        self.inspect()
        return f"{self._inner.cache_key}/{self._stored}"

    def name_row(self, block: int, row: int) -> str:
        return self._inner.name_row(block, row)

    def publish(self, directory: str) -> Source:
        return _around(self, self._inner.publish(directory))
