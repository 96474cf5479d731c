"""Rows that were computed once and kept: Arrow files in a directory of this process."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import xxhash

from powertrain.data.loading.scratch import Scratch
from powertrain.data.output.tables import conformed, declared_schema, widened
from powertrain.data.plan.plan import Plan
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.errors import DataError
from powertrain.text.progress import ProgressBar

#: Approximate bytes of a block of materialized rows.
BLOCK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class _File:
    name: str
    rows: int
    nbytes: int


class MaterializedSource(Source):
    """Decoded blocks in files of a process on this machine, one file each.

    The files exist as long as that process has this object, or one made from it. A copy in another process reads them
    and does not keep them alive.
    """

    cheap_to_decode = True

    def __init__(
        self, scratch: Scratch | None, directory: str, files: Sequence[_File], facts: SourceFacts
    ) -> None:
        self._scratch, self._directory = scratch, directory
        self._files, self._facts = tuple(files), facts
        # A single block is mapped once and kept; of many, a full shuffle would touch all for every batch.
        self.in_memory = len(files) <= 1

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (None, self._directory, self._files, self._facts))

    def inspect(self) -> SourceFacts:
        return self._facts

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        schema = self._facts.schema
        if columns is not None:
            schema = pa.schema([schema.field(name) for name in columns])
        table = self._table(block).select(schema.names)
        # Types of later blocks may be wider than those of this one: see materialize().
        yield from conformed(table, schema, "").to_batches()

    def linked(self, directory: str) -> MaterializedSource:
        """Return the same rows in files below ``directory``: the files under second names, or copies of them."""
        place = os.path.join(directory, self._facts.fingerprint)
        os.makedirs(place, exist_ok=True)
        for file in self._files:
            _link(os.path.join(self._directory, file.name), os.path.join(place, file.name))
        return MaterializedSource(None, place, self._files, self._facts)

    def described(self, fingerprint: str) -> MaterializedSource:
        """Return the same rows under another fingerprint."""
        return MaterializedSource(
            self._scratch, self._directory, self._files, replace(self._facts, fingerprint=fingerprint)
        )

    def _table(self, block: int) -> pa.Table:
        path = os.path.join(self._directory, self._files[block].name)
        try:
            return pyarrow.ipc.open_file(pa.memory_map(path)).read_all()
        except FileNotFoundError as error:
            raise DataError(
                f"The rows that materialize() kept in {self._directory} are not there. They are on the machine of the "
                "process that made them, as long as it lives and refers to the dataset. Keep a reference to it, or "
                "write the rows to storage that all machines see, with write_parquet()."
            ) from error

    def name_row(self, block: int, row: int) -> str:
        number = sum(file.rows for file in self._files[:block]) + row
        return f"row {number} of the materialized rows"


def materialize(
    plan: Plan, pieces: Iterable[pa.Table], columns_if_empty: Callable[[], pa.Schema]
) -> MaterializedSource:
    """Keep ``pieces``, the rows of ``plan``, each as a block.

    Results of functions may change their type on the way (integers, then floats; lists of one length, then of others):
    every block is written as it is, and read as the common type of all of them.
    """
    return keep(pieces, columns_if_empty, declared_schema(plan))


def keep(
    pieces: Iterable[pa.Table], columns_if_empty: Callable[[], pa.Schema], declared: pa.Schema | None = None
) -> MaterializedSource:
    """Keep tables, each as a block; of the types in ``declared`` where that is given."""
    scratch = Scratch()
    files: list[_File] = []
    digest = xxhash.xxh3_128()
    schema: pa.Schema | None = None
    with ProgressBar("computing rows of a dataset", unit="rows") as bar:
        for table in pieces:
            table = table if declared is None else conformed(table, declared, "")
            schema = table.schema if schema is None else widened(schema, table.schema)
            files.append(_written(scratch.path, len(files), table, digest))
            bar.advance(table.num_rows)
    if schema is None:
        schema = columns_if_empty()
    blocks = tuple(BlockFacts(file.rows, file.nbytes) for file in files)
    return MaterializedSource(scratch, scratch.path, files, SourceFacts(blocks, schema, digest.hexdigest()))


def _written(directory: str, number: int, table: pa.Table, digest: xxhash.xxh3_128) -> _File:
    """Write one block as one record batch, and add its bytes to ``digest``."""
    name = f"{number:06d}.arrow"
    path = os.path.join(directory, name)
    with pa.OSFile(path, "wb") as file, pyarrow.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    with pa.memory_map(path) as content:
        digest.update(content.read_buffer())
    return _File(name, table.num_rows, table.nbytes)


def _link(path: str, place: str) -> None:
    """Give a file a second name; on another file system a copy, which appears when it is complete."""
    if os.path.exists(place):
        return
    try:
        os.link(path, place)
    except FileExistsError:
        return
    except OSError:
        unfinished = f"{place}.{os.getpid()}.tmp"
        try:
            shutil.copyfile(path, unfinished)
            os.replace(unfinished, place)
        finally:
            if os.path.exists(unfinished):
                os.unlink(unfinished)
