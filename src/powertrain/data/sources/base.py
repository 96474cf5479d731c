"""What a source of rows promises: blocks with exact row counts, readable in any order, by any process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

#: Marks a float64 column, or list column, whose values were Python's own floats: a tensor of it gets torch's default
#: dtype. Kept in the metadata of the Arrow field.
PYTHON_FLOATS = (b"powertrain.values", b"python")
#: Marks a list column whose rows were arrays: a row of it is an array again, where that of other lists is a list.
ARRAYS = (b"powertrain.rows", b"arrays")
#: Marks a binary column that holds encoded images, to be decoded on the way to the user: the value is JSON of
#: ``{"size": [height, width] or null, "mode": "RGB" or null}``.
IMAGES = b"powertrain.images"


@dataclass(frozen=True)
class BlockFacts:
    """What is known of a block before it is read."""

    rows: int
    #: Bytes of its columns once decoded, as well as can be known beforehand.
    nbytes: int


@dataclass(frozen=True)
class SourceFacts:
    """What :meth:`Source.inspect` has found."""

    blocks: tuple[BlockFacts, ...]
    schema: pa.Schema
    #: Changes when the data does, and not when it is copied elsewhere: at most 32 characters.
    fingerprint: str
    #: The fingerprint as older versions of this package made it, where that differs: positions saved by them hold it.
    earlier: str = ""

    def derived(self, derive: Callable[[str], str], **changes: Any) -> SourceFacts:
        """These facts for rows made of these ones: ``derive`` makes each fingerprint from the one here."""
        earlier = derive(self.earlier) if self.earlier else ""
        return replace(self, fingerprint=derive(self.fingerprint), earlier=earlier, **changes)


class Source(ABC):
    """Rows in blocks. Picklable; small when pickled unless it holds rows itself (see :meth:`publish`).

    Nothing is read, listed or opened by the constructor. :meth:`inspect` is called once, in the driver, and raises
    :class:`~powertrain.errors.DataError` for whatever is wrong with the data; its answer travels with the source, so
    that :meth:`read` can rely on it in any process.
    """

    #: True where any row can be had at once at no cost: such data is shuffled row by row.
    in_memory: bool = False
    #: True where decoding costs about as much as reading the decoded block from disk, so that caching it does not pay.
    cheap_to_decode: bool = False

    @abstractmethod
    def inspect(self) -> SourceFacts:
        """The blocks, the schema and the fingerprint. Found once, then remembered, also across pickling."""

    @abstractmethod
    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        """The rows of one block, in order, in batches of moderate size; only these columns, in this order.

        Any thread of any process. Holds at most one batch beyond what it has given (a giant block is streamed).
        """

    @abstractmethod
    def name_row(self, block: int, row: int) -> str:
        """Where a row is, for people: "part-3.parquet, row group 2, row 17" or "item 17"."""

    @property
    def cache_key(self) -> str:
        """What is kept of it on a node is known by this: the fingerprint, and all that tells its rows from those of
        other data there: where it is, which columns it gives."""
        return self.inspect().fingerprint

    def select(self, columns: Sequence[str]) -> Source | None:
        """A source of these columns only, or None where it cannot do better than dropping them after reading."""
        return None

    def glimpse(self) -> pa.Schema:
        """The columns as the first rows have them, where that is known sooner than what all of them agree on."""
        return self.inspect().schema

    def publish(self, directory: str) -> Source:
        """The same rows (same blocks, same fingerprint), to be pickled for other processes of this machine: rows that
        are in this process's memory are put into a file below ``directory`` first."""
        return self


def layers_of(source: Source | None) -> Iterator[Source]:
    """Yield the source and the sources it is made of, from the outermost to the one that holds the rows."""
    while source is not None:
        yield source
        source = getattr(source, "_inner", None)
