"""The interface of a source of rows: blocks with exact row counts, readable in any order, by any process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

#: Marks a float64 column, or list column, of Python floats: its tensor gets torch's default dtype. Kept in the
#: metadata of the Arrow field.
PYTHON_FLOATS = (b"powertrain.values", b"python")
#: Marks a list column whose rows were arrays: a row of it is an array again, and not a list.
ARRAYS = (b"powertrain.rows", b"arrays")
#: Marks a binary column that holds encoded images, to be decoded on the way to the user: the value is JSON of
#: ``{"size": [height, width] or null, "mode": "RGB" or null}``.
IMAGES = b"powertrain.images"


@dataclass(frozen=True)
class BlockFacts:
    """The properties of a block known before it is read."""

    rows: int
    #: Estimated bytes of its columns once decoded.
    nbytes: int


@dataclass(frozen=True)
class SourceFacts:
    """The result of :meth:`Source.inspect`."""

    blocks: tuple[BlockFacts, ...]
    schema: pa.Schema
    #: Changes when the data does, and not when it is copied elsewhere: at most 32 characters.
    fingerprint: str
    #: The fingerprint as older versions of this package made it, where that differs: positions saved by them hold it.
    earlier: str = ""

    def derived(self, derive: Callable[[str], str], **changes: Any) -> SourceFacts:
        """Return the facts of rows made from these: ``derive`` maps each fingerprint."""
        earlier = derive(self.earlier) if self.earlier else ""
        return replace(self, fingerprint=derive(self.fingerprint), earlier=earlier, **changes)


class Source(ABC):
    """Rows in blocks. Picklable; small when pickled unless it holds rows itself (see :meth:`publish`).

    The constructor reads, lists and opens nothing. :meth:`inspect` is called once, in the driver, and raises
    :class:`~powertrain.errors.DataError` for invalid data; its result is pickled with the source, so that :meth:`read`
    can rely on it in any process.
    """

    #: True where random access to rows is free: such data is shuffled row by row.
    in_memory: bool = False
    #: True where decoding costs about as much as reading the decoded block from disk, so that caching it does not pay.
    cheap_to_decode: bool = False

    @abstractmethod
    def inspect(self) -> SourceFacts:
        """Return the blocks, the schema and the fingerprint. Found once, then remembered, also across pickling."""

    @abstractmethod
    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one block, in order, in batches of moderate size; only these columns, in this order.

        Called on any thread of any process. Holds at most one batch beyond those yielded (a giant block is streamed).
        """

    @abstractmethod
    def name_row(self, block: int, row: int) -> str:
        """Return the location of a row for messages: "part-3.parquet, row group 2, row 17" or "item 17"."""

    @property
    def cache_key(self) -> str:
        """The cache key of its rows on a node: the fingerprint, and all that distinguishes its rows from other data
        there, such as location and columns."""
        return self.inspect().fingerprint

    def select(self, columns: Sequence[str]) -> Source | None:
        """Return a source of these columns only, or None where it can only drop them after reading."""
        return None

    def glimpse(self) -> pa.Schema:
        """Return the columns of the first rows, where that is known sooner than the common schema of all."""
        return self.inspect().schema

    def publish(self, directory: str) -> Source:
        """Return the same rows (same blocks, same fingerprint), to be pickled for other processes of this machine:
        rows in this process's memory are written to a file below ``directory`` first."""
        return self


def layers_of(source: Source | None) -> Iterator[Source]:
    """Yield the source and the sources it is made of, from the outermost to those that hold the rows."""
    if source is None:
        return
    yield source
    yield from layers_of(getattr(source, "_inner", None))
    for inner in getattr(source, "_inners", ()):
        yield from layers_of(inner)
