"""Documents of different lengths as windows of one length: the rows of ``Dataset.pack``.

The tokens of all documents are one stream, in the order of the data, and window w has its tokens from ``w * length``
on. A window is a row like any other, so that shuffles, ranks and positions need to know nothing of documents. A block
has the windows that begin in a block of the documents; reading it also reads the beginning of the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.items import table_of_arrays
from powertrain.data.sources.packing.windows import (
    Documents,
    Ints,
    TokenStream,
    cut,
    stream_of,
    tokens_of,
    windows_between,
)
from powertrain.data.sources.plain import checked_columns, one_batch, with_rows_only
from powertrain.data.sources.remembering import RememberingSource
from powertrain.data.sources.zipped import BlockOrder, OrderedRows
from powertrain.errors import DataError

#: Names of the columns that ``documents`` adds.
DOCUMENT_IDS, POSITIONS = "document_ids", "positions"
_pt = pa.types


@dataclass(frozen=True)
class Packing:
    """How documents become windows."""

    column: str | None
    length: int
    separator: int | None = None
    padding: int = 0
    drops_tail: bool = False
    with_documents: bool = False


class PackedSource(RememberingSource):
    """Windows of the documents of some sources, one after the other or with blocks in a given order."""

    def __init__(self, sources: Sequence[Source], order: BlockOrder, packing: Packing) -> None:
        super().__init__()
        self._rows, self._packing = OrderedRows(sources, order), packing
        self._inners = tuple(sources)
        self.in_memory = all(source.in_memory for source in sources)
        self.cheap_to_decode = all(source.cheap_to_decode for source in sources)
        self._column = ""
        #: Tokens before each block, and before the end.
        self._tokens: Ints = np.zeros(1, np.int64)

    # -- inspection

    def _inspect_data(self) -> SourceFacts:
        packing = self._packing
        facts = self._rows.inspect()
        self._column = _token_column(packing.column, facts[0].schema)
        value = self._common_type(facts)
        self._check_tokens(value)
        counts = [self._counted(number, index) for number, index, _ in self._rows.blocks]
        self._tokens = np.cumsum([0, *counts], dtype=np.int64)
        width = packing.length * (value.bit_width // 8 + 16 * packing.with_documents)
        blocks = []
        for block in range(len(counts)):
            first, last = self._windows(block)
            blocks.append(BlockFacts(last - first, (last - first) * width))
        schema = self._table(
            TokenStream(*(np.zeros(packing.length, each) for each in self._dtypes(value)))
        ).schema
        joined = "+".join(fact.fingerprint for fact in facts)
        digest = xxhash.xxh3_128_hexdigest(f"pack/{joined}/{self._rows.order}/{self._key()}".encode())
        return SourceFacts(tuple(blocks), schema, digest)

    def _common_type(self, facts: Sequence[SourceFacts]) -> Any:
        """Return the type of the tokens of all sources."""
        for number, other in enumerate(facts):
            checked_columns([self._column], other.schema.names, f"part {number} of the data")
        kinds = [_value_type(self._column, other.schema.field(self._column).type) for other in facts]
        odd = [kind for kind in kinds if not kind.equals(kinds[0])]
        if odd:
            raise DataError(
                f"The column {self._column!r} has values of {kinds[0]} in some of the data and of {odd[0]} in other "
                "parts. Convert it to one type before pack()."
            )
        if self._packing.with_documents and self._column in (DOCUMENT_IDS, POSITIONS):
            raise DataError(
                f"pack(documents=True) would add a column {self._column!r}, which is the name of the tokens' column. "
                "Rename that first."
            )
        return kinds[0]

    def _key(self) -> str:
        return f"{self._column}/{self._packing}"

    def _dtypes(self, value: Any) -> tuple[Any, ...]:
        numbers = (np.int64, np.int64) if self._packing.with_documents else ()
        return (value.to_pandas_dtype(), *numbers)

    def _check_tokens(self, value: Any) -> None:
        """Raise where the separator or the padding is no value of the column."""
        for name, token in (("separator", self._packing.separator), ("padding", self._packing.padding)):
            try:
                if token is not None:
                    pa.array([token], value)
            except (pa.ArrowException, OverflowError) as error:
                raise DataError(
                    f"pack({name}={token}) does not fit the column {self._column!r}, whose values are {value}. Give a "
                    "token that it can hold, or convert the column first."
                ) from error

    def _counted(self, source: int, index: int) -> int:
        """Return the number of tokens of a block."""
        found = 0
        for batch in self._rows.sources[source].read(index, [self._column]):
            lengths = pc.list_value_length(_as_lists(batch.column(0))).drop_null()
            found += tokens_of(lengths.to_numpy(zero_copy_only=False), self._packing.separator is not None)
        return found

    def _windows(self, block: int) -> tuple[int, int]:
        return windows_between(
            int(self._tokens[block]),
            int(self._tokens[block + 1]),
            int(self._tokens[-1]),
            self._packing.length,
            not self._packing.drops_tail,
        )

    # -- reading

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self.inspect().schema
        names = schema.names if columns is None else list(columns)
        first, last = self._windows(block)
        if not names:
            yield with_rows_only(last - first)
            return
        skip = first * self._packing.length - int(self._tokens[block])
        streams = self._streams(block)
        for found in cut(streams, self._packing.length, skip, last - first, self._packing.padding):
            yield one_batch(self._table(found).select(names).to_batches())

    def _streams(self, block: int) -> Iterator[TokenStream]:
        """Yield the tokens from the beginning of a block on, until nobody asks for more."""
        for place in range(block, len(self._rows.blocks)):
            source, index, facts = self._rows.blocks[place]
            number = int(self._rows.firsts[place])
            for batch in self._rows.sources[source].read(index, [self._column]) if facts.rows else ():
                documents = _documents(batch.column(0), number, self._column)
                number += batch.num_rows
                if len(documents.numbers):
                    yield stream_of(
                        documents, self._packing.separator, with_documents=self._packing.with_documents
                    )

    def _table(self, found: TokenStream) -> pa.Table:
        columns = {self._column: found.tokens, DOCUMENT_IDS: found.numbers, POSITIONS: found.positions}
        shape = (-1, self._packing.length)
        return table_of_arrays(
            {name: values.reshape(shape) for name, values in columns.items() if values is not None}
        )

    @property
    def cache_key(self) -> str:
        self.inspect()
        inner = "+".join(source.cache_key for source in self._rows.sources)
        return f"pack/{inner}/{self._rows.order}/{self._key()}"

    def name_row(self, block: int, row: int) -> str:
        self.inspect()
        window = self._windows(block)[0] + row
        start = window * self._packing.length
        return f"window {window} (tokens {start} to {start + self._packing.length - 1})"

    def publish(self, directory: str) -> Source:
        import copy
        import os

        other, rows = copy.copy(self), copy.copy(self._rows)
        rows.sources = tuple(
            source.publish(os.path.join(directory, f"packed-{number}"))
            for number, source in enumerate(self._rows.sources)
        )
        other._rows, other._inners = rows, rows.sources
        return other


# --------------------------------------------------------------------------- columns of documents


def _is_list(kind: Any) -> bool:
    is_tensor = isinstance(kind, pa.FixedShapeTensorType) and len(kind.shape) == 1
    return bool(is_tensor or _pt.is_list(kind) or _pt.is_large_list(kind) or _pt.is_fixed_size_list(kind))


def _token_column(given: str | None, schema: pa.Schema) -> str:
    if given is not None:
        checked_columns([given], schema.names, "the data")
        return given
    lists = [field.name for field in schema if _is_list(field.type)]
    if len(lists) != 1:
        what = f"the columns with lists are {', '.join(lists)}" if lists else "no column has lists"
        raise DataError(
            f"pack() needs a column with the tokens of each document, and {what}. Give column='...'."
        )
    return lists[0]


def _value_type(column: str, kind: Any) -> Any:
    value = kind.value_type if _is_list(kind) else None
    if value is None or not (_pt.is_integer(value) or _pt.is_floating(value)):
        raise DataError(
            f"The column {column!r} has the type {kind}, and pack() needs lists of numbers, the tokens of each "
            "document. Make them with map() first, for example with a tokenizer."
        )
    return value


def _as_lists(array: Any) -> Any:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    return (
        array
        if _pt.is_list(array.type) or _pt.is_large_list(array.type)
        else array.cast(pa.large_list(array.type.value_type))
    )


def _documents(array: Any, number: int, column: str) -> Documents:
    """Return the documents of a column, whose first has the given number; nulls are left out."""
    lists = _as_lists(array)
    numbers = number + np.arange(len(lists))
    if lists.null_count:
        there = lists.is_valid()
        numbers, lists = numbers[there.to_numpy(zero_copy_only=False)], lists.filter(there)
    values = lists.flatten()
    if values.null_count:
        raise DataError(
            f"The column {column!r} has a null within a document, where a token should be. Remove it with map() before "
            "pack()."
        )
    lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return Documents(values.to_numpy(zero_copy_only=False), offsets, numbers)
