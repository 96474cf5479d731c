"""Dataset: rows of files or memory and what is to be done to them, as a value that nothing is read for."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import (
    column_names,
    flag,
    keyword_arguments,
    number,
    optional_whole,
    seed_number,
    shown,
    values_of,
    whole,
)
from powertrain.data.dataset_arguments import checked_batch_format, checked_place, function, parsed, picked
from powertrain.data.loading.execution import Execution
from powertrain.data.plan import cutting
from powertrain.data.plan.plan import Block, Inspected, Part, Plan
from powertrain.data.plan.plan import union as union_of
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    import torch

    from powertrain.data.operations.operation import Operation
    from powertrain.data.rows.rows import Rows
    from powertrain.data.shard import Batches, DataShard
    from powertrain.data.sources.base import Source


Row = dict[str, Any]
#: Datasets that a split makes, blocks that a repartition makes, processes of a function, at most: each costs memory.
MOST_PIECES = 100_000
MOST_BLOCKS = 1_000_000


class Dataset:
    """Rows in blocks, and what is to be done to each of them. Made by ``powertrain.data.read_...`` and ``from_...``.

    A dataset never changes: every method that transforms returns a new one, and nothing is read before rows, or
    facts about them, are asked for. Rows then stream through within a budget of memory, however many there are.
    """

    __slots__ = ("__weakref__", "_newest", "_plan")

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._newest: Execution | None = None

    @property
    def plan(self) -> Plan:
        """What this dataset stands for."""
        return self._plan

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dataset, (self._plan,))

    def __repr__(self) -> str:
        parts = [type(part.source).__name__.removesuffix("Source").lower() for part in self._plan.parts]
        done = [operation.name for operation in self._plan.parts[0].operations]
        shuffled = ["shuffled"] if self._plan.shuffled else []
        return f"Dataset({', '.join([' + '.join(dict.fromkeys(parts)), *done, *shuffled])})"

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        raise TypeError(
            "A Dataset has no len(), because counting its rows may mean to read them. Use dataset.count()."
        )

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(
            "A Dataset cannot be iterated over itself. Use dataset.iter_rows(), iter_batches() or iter_torch_batches()."
        )

    # -- transforming

    def map(
        self,
        fn: Callable[..., Row] | type[Any],
        *,
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
    ) -> Dataset:
        """Every row, a dict, replaced by the dict that ``fn(row, *fn_args, **fn_kwargs)`` returns.

        ``fn`` may be a class, which is constructed once for each process that uses it. A parameter named ``rng`` gets
        a numpy generator that belongs to the row: the same numbers at any number of ranks. ``concurrency`` runs it in
        so many processes of the machine; None runs it on the threads of the process that reads.
        """
        from powertrain.data.operations.functions import MapRows

        given = function(fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs, concurrency)
        return self._then(MapRows(**given))

    def map_batches(
        self,
        fn: Callable[..., Any],
        *,
        batch_size: int | None = None,
        batch_format: str | None = "default",
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        udf_modifying_row_count: bool = True,
    ) -> Dataset:
        """As :meth:`map`, but ``fn`` gets and returns batches of at most ``batch_size`` rows (None: 1024).

        ``batch_format`` says in which form it gets them: ``"numpy"`` (a dict of arrays, the default), ``"pandas"`` or
        ``"pyarrow"``; it may return any of these. Batches hold neighbours of one block and are the same at any number
        of ranks. It may return another number of rows; ``udf_modifying_row_count=False`` promises that it does not, so
        that :meth:`count`, :meth:`limit` and the splits need not run it.
        """
        from powertrain.data.operations.functions import BATCH_SIZE, MapBatches

        given = function(fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs, concurrency)
        return self._then(
            MapBatches(
                **given,
                batch_size=BATCH_SIZE if batch_size is None else whole("batch_size", batch_size, 1),
                batch_format=checked_batch_format(batch_format),
                changes_count=flag("udf_modifying_row_count", udf_modifying_row_count),
            )
        )

    def flat_map(
        self,
        fn: Callable[..., Iterable[Row]] | type[Any],
        *,
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
    ) -> Dataset:
        """Every row replaced by the rows that ``fn`` returns for it, any number of them; the rest as for :meth:`map`.

        An epoch is counted in rows of the source, so batches have as many rows as come of theirs. :meth:`materialize`
        gives batches of equal size.
        """
        from powertrain.data.operations.functions import FlatMap

        given = function(fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs, concurrency)
        return self._then(FlatMap(**given))

    def filter(
        self,
        fn: Callable[..., bool] | type[Any] | pc.Expression | str | None = None,
        expr: pc.Expression | str | None = None,
        *,
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
    ) -> Dataset:
        """The rows for which ``fn(row)`` is true, or those that an expression keeps (null counts as false).

        An expression is an Arrow one (``pyarrow.compute.field("label") == 3``) or text (``"label == 3"``). Before any
        function of yours it is counted once per block and exact: batches are full and epochs have an exact number of
        rows. A function, or an expression after one, leaves holes: batches have fewer rows than asked for.
        """
        if (fn is None) == (expr is None):
            raise DataError(
                "filter() takes either a function or an expression. Give fn=... or expr=..., not both."
            )
        condition = expr if expr is not None else fn
        if callable(condition):
            from powertrain.data.operations.functions import FilterRows

            given = function(
                condition, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs, concurrency
            )
            return self._then(FilterRows(**given))
        if any(
            value is not None for value in (fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs)
        ):
            raise DataError(
                "filter() got arguments for a function together with an expression. Leave fn_args, fn_kwargs and "
                "fn_constructor_args out."
            )
        return self._filtered(parsed(condition))

    def _filtered(self, expression: pc.Expression) -> Dataset:
        from powertrain.data.operations.columns import FilterExpression
        from powertrain.data.sources.filtered import FilteredSource

        if any(part.operations for part in self._plan.parts):
            return self._then(FilterExpression(expression))
        return self._with_sources(lambda source: FilteredSource(source, expression))

    def select_columns(self, cols: str | Sequence[str]) -> Dataset:
        """Only these columns, in this order. Others are not even read where the source can do without them."""
        from powertrain.data.operations.columns import SelectColumns
        from powertrain.data.sources.filtered import ProjectedSource

        names = column_names("select_columns", cols)
        return self._projected(lambda source: ProjectedSource(source, names), SelectColumns(names))

    def decode_images(
        self, columns: str | Sequence[str], *, size: tuple[int, int] | None = None, mode: str | None = None
    ) -> Dataset:
        """Columns of encoded images (JPEG, PNG, …: bytes) become pixels: ``uint8`` of (height, width, channels).

        ``size`` is (height, width) to scale every image to; ``mode`` is Pillow's, such as "RGB". Columns of
        :func:`read_images` and of Hugging Face's ``Image`` features are decoded without being asked.
        """
        from powertrain.data.operations.decode import DecodeImages
        from powertrain.data.operations.images import checked_mode, checked_size

        names = column_names("decode_images", columns)
        return self._then(DecodeImages(names, checked_size(size), checked_mode(mode)))

    def drop_columns(self, cols: str | Sequence[str]) -> Dataset:
        """Without these columns."""
        from powertrain.data.operations.columns import DropColumns
        from powertrain.data.sources.relabeled import WithoutColumnsSource

        names = column_names("drop_columns", cols)
        return self._projected(lambda source: WithoutColumnsSource(source, names), DropColumns(names))

    def rename_columns(self, names: Mapping[str, str] | Sequence[str]) -> Dataset:
        """Columns under other names: a dict from old to new, or new names for all columns in order."""
        from powertrain.data.operations.columns import RenameColumns
        from powertrain.data.sources.filtered import ProjectedSource
        from powertrain.data.sources.relabeled import RelabeledSource

        if isinstance(names, Mapping):
            renames = keyword_arguments("rename_columns(): names", names)
            column_names("rename_columns", [*renames, *renames.values()])
            return self._projected(
                lambda source: ProjectedSource(source, None, renames), RenameColumns(renames)
            )
        new = column_names("rename_columns", [names] if isinstance(names, str) else names)
        return self._projected(lambda source: RelabeledSource(source, new), RenameColumns(new))

    def random_shuffle(self, *, seed: int | None = None) -> Dataset:
        """In an order that is drawn anew for each epoch. Nothing is moved: rows are read in that order.

        Data in memory is permuted row by row. Of files blocks are permuted, and rows inside them; a batch has rows from
        64 places of the data. Without a seed a run draws one and keeps it, so that it resumes in the same order; which
        rows a limit or split of it picks then follows from the data, the same at every start of a program.
        """
        return Dataset(dataclasses.replace(self._plan, shuffled=True, seed=seed_number("seed", seed)))

    def union(self, *other: Dataset) -> Dataset:
        """The rows of this dataset, then those of the others. All must have the same columns."""
        for one in other:
            if not isinstance(one, Dataset):
                raise DataError(
                    f"union() takes datasets, and got a {type(one).__name__}. Give Dataset objects."
                )
        return Dataset(union_of([self._plan, *(one._plan for one in other)]))

    # -- fewer rows, other blocks

    def limit(self, limit: int) -> Dataset:
        """The first ``limit`` rows; of a shuffled dataset as many rows drawn from everywhere, the same in every epoch.

        Looks at the files to count rows. Where functions decide how many rows there are, the rows are computed and
        kept as :meth:`materialize` does, as far as they are needed.
        """
        limit = min(whole("limit", limit, 0), sys.maxsize)
        inspected = self._inspected()
        if not inspected.is_exact:
            return self._kept(limit)._shuffled_like(self)
        if limit >= inspected.rows:
            return self
        if self._plan.shuffled:
            return self._sampled(inspected, limit)[0]
        return self._with_blocks(cutting.between(inspected.blocks, 0, limit))

    def split(self, n: int, *, equal: bool = False) -> list[Dataset]:
        """``n`` datasets of consecutive rows, whose sizes differ by at most one; with ``equal`` by none, and rows that
        are left over are in none of them. See :meth:`split_at_indices` for what is computed."""
        n, equal = whole("n", n, 1, MOST_PIECES), flag("equal", equal)
        counted = self._countable()
        rows = counted._inspected().rows
        if equal:
            rows -= rows % n
        return self._pieces(counted, [*cutting.even_cuts(rows, n), rows])[:n]

    def split_at_indices(self, indices: Sequence[int]) -> list[Dataset]:
        """Datasets of the rows before, between and after these row numbers.

        Looks at the files to count rows; nothing is read or written but where the dataset is shuffled, or where
        functions decide how many rows there are. Then the rows are kept first as :meth:`materialize` does. Pieces of a
        shuffled dataset are shuffled too.
        """
        what = "Give row numbers of at least 0, and at least one."
        cuts = [whole("indices", index, 0) for index in values_of("indices", indices, what)]
        if not cuts or len(cuts) > MOST_PIECES:
            raise DataError(f"indices has {len(cuts)} row numbers. Give from 1 to {MOST_PIECES} of them.")
        if sorted(cuts) != cuts:
            raise DataError(f"indices={shown(cuts)} must not fall. Sort them.")
        return self._pieces(self._countable(), cuts)

    def split_proportionately(self, proportions: Sequence[float]) -> list[Dataset]:
        """Datasets of these proportions of the rows, and one more of the rest. See :meth:`split_at_indices`."""
        what = "must be numbers that are each more than 0 and together less than 1; the rest is the last dataset."
        given = values_of("proportions", proportions, f"They {what}")
        shares = [number("a value of proportions", each, what) for each in given]
        if not 0 < len(shares) <= MOST_PIECES or min(shares) <= 0 or sum(map(cutting.decimal, shares)) >= 1:
            raise DataError(f"proportions={shown(given)} {what}")
        counted = self._countable()
        return self._pieces(counted, cutting.proportional_cuts(counted._inspected().rows, shares))

    def train_test_split(
        self, test_size: int | float, *, shuffle: bool = False, seed: int | None = None
    ) -> tuple[Dataset, Dataset]:
        """Two datasets: the last ``test_size`` rows (a number, or a fraction between 0 and 1) are the second.

        With ``shuffle``, or of a shuffled dataset, the test's rows are drawn from everywhere, evenly from all blocks,
        and the two are shuffled too. Without a seed they follow from the data: the same data is split in the same way
        at every start of a program, so that a run that goes on meets no row of the test. Looks at the files to count
        rows; nothing is read or written but where functions decide how many rows there are: then they are kept first
        as :meth:`materialize` does.
        """
        test_size = _checked_test_size(test_size)
        shuffle, seed = flag("shuffle", shuffle), seed_number("seed", seed)
        counted = self if self._inspected().is_exact else self.materialize()._shuffled_like(self)
        if shuffle:
            counted = counted.random_shuffle(seed=seed)
        inspected = counted._inspected()
        test = cutting.rows_of_test(inspected.rows, test_size)
        if not 0 < test < inspected.rows:
            raise DataError(
                f"test_size={test_size!r} leaves nothing to train on or nothing to test with: there are "
                f"{inspected.rows} rows. Choose a size between them."
            )
        if counted._plan.shuffled:
            return counted._sampled(inspected, inspected.rows - test)
        train, rest = self._pieces(counted, [inspected.rows - test])
        return train, rest

    def repartition(
        self,
        num_blocks: int | None = None,
        target_num_rows_per_block: int | None = None,
        *,
        shuffle: bool = False,
    ) -> Dataset:
        """The same rows in another number of blocks: what is shuffled as one, and read as one.

        Where every new block lies within an old one, nothing is read. Otherwise, and where functions decide how many
        rows there are, the rows are written anew as :meth:`materialize` does.
        """
        if (num_blocks is None) == (target_num_rows_per_block is None):
            raise DataError("repartition() takes one of num_blocks and target_num_rows_per_block. Give one.")
        # Blocks there can be no more of than rows.
        blocks = optional_whole("num_blocks", num_blocks, 1)
        size = optional_whole("target_num_rows_per_block", target_num_rows_per_block, 1)
        counted = self.random_shuffle() if flag("shuffle", shuffle) else self
        inspected = counted._inspected()
        if not inspected.is_exact:
            counted = counted.materialize()._shuffled_like(counted)
            inspected = counted._inspected()
        blocks = min(-(-inspected.rows // size) if size is not None else blocks or 1, max(inspected.rows, 1))
        if blocks > MOST_BLOCKS:
            raise DataError(f"repartition() would make {blocks} blocks. Ask for at most {MOST_BLOCKS}.")
        if size is None:
            cuts = cutting.even_cuts(inspected.rows, blocks)
        else:
            cuts = list(range(size, inspected.rows, size))
        found = cutting.repartitioned(inspected.blocks, cuts)
        if found is not None:
            return counted._with_blocks(found)
        in_order = Dataset(dataclasses.replace(counted._plan, shuffled=False))
        return in_order._kept(sizes=list(cutting.sizes(inspected.rows, cuts)))._shuffled_like(counted)

    def materialize(self, *, on: str | None = None) -> Dataset:
        """Read and compute all rows once, and keep them in files of this machine that are gone with the dataset.

        What functions did is then done for all epochs, their random numbers too; a shuffled dataset is shuffled once,
        for good: by its seed, or by one that follows from the data. Counts are exact afterwards, so that batches are
        full and every epoch is exact. ``on="ray"`` computes the rows in tasks on all nodes of the Ray cluster that this
        process is connected to: the same rows, in the same order. Files must then be where every node sees them.
        """
        return self._kept(on=checked_place(on))

    # -- facts

    def count(self) -> int:
        """How many rows there are: known from the files, or by running functions that decide it."""
        inspected = self._inspected()
        if inspected.is_exact:
            return inspected.rows
        return sum(len(rows) for rows in self._stream())

    def schema(self) -> pa.Schema:
        """Columns and their types; where functions make them, those of the first row, which is computed for it."""
        from powertrain.data.output.tables import declared_schema, settled_schema, table_of

        declared = declared_schema(self._plan)
        if declared is not None:
            return declared
        for rows in self._stream(1):
            return settled_schema(self._plan, table_of(rows).schema)
        return self._plan.parts[0].source.inspect().schema

    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema().names)

    def num_blocks(self) -> int:
        """How many blocks the rows are in: what is read, cached and shuffled as one."""
        return len(self._inspected().blocks)

    def size_bytes(self) -> int:
        """About how many bytes the rows of the source take once decoded."""
        inspected = self._inspected()
        facts = [part.source.inspect().blocks for part in self._plan.parts]
        return sum(
            facts[block.part][block.index].nbytes * block.rows // max(facts[block.part][block.index].rows, 1)
            for block in inspected.blocks
        )

    def stats(self) -> str:
        """What the newest reading of this dataset has cost, in words."""
        if self._newest is None:
            return f"{self!r} has not been read yet."
        return self._newest.text()

    # -- rows

    def take(self, limit: int = 20) -> list[Row]:
        """The first ``limit`` rows."""
        limit = min(whole("limit", limit, 0), sys.maxsize)
        return list(itertools.islice(self._row_dicts(limit), limit))

    def take_all(self, limit: int | None = None) -> list[Row]:
        """All rows; refuses if there are more than ``limit``."""
        limit = optional_whole("limit", limit, 0)
        rows: list[Row] = []
        for row in self._row_dicts():
            if limit is not None and len(rows) >= limit:
                raise DataError(
                    f"The dataset has more than limit={limit} rows. Raise the limit, or use take({limit})."
                )
            rows.append(row)
        return rows

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """The first ``batch_size`` rows as one batch: see :meth:`iter_batches`."""
        from powertrain.data.rows import formats
        from powertrain.data.rows.gather import concat_rows

        form = checked_batch_format(batch_format)
        batch_size = min(whole("batch_size", batch_size, 1), sys.maxsize)
        found: list[Rows] = []
        for rows in self._stream(batch_size):
            found.append(rows)
            if sum(map(len, found)) >= batch_size:
                break
        if not found:
            raise DataError("The dataset has no rows to take. Check its paths and filters.")
        batch = concat_rows(found).between(0, batch_size)
        make = {"numpy": formats.to_numpy, "pandas": formats.to_pandas, "pyarrow": formats.to_arrow}
        return make[form](batch)

    def show(self, limit: int = 20) -> None:
        """Print the first ``limit`` rows."""
        for row in self.take(limit):
            print(row)

    def iter_rows(self) -> Iterator[Row]:
        """Every row as a dict, in order."""
        return self._row_dicts()

    def iter_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        batch_format: str | None = "default",
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        tail: str | None = None,
        seed: int | None = None,
    ) -> Batches[Any]:
        """Batches as dicts of numpy arrays, DataFrames or tables. Each iteration over them is a new epoch."""
        return self._alone().iter_batches(
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            batch_format=batch_format,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            tail=tail,
            seed=seed,
        )

    def iter_torch_batches(
        self,
        *,
        prefetch_batches: int = 1,
        batch_size: int | None = 256,
        dtypes: torch.dtype | Mapping[str, torch.dtype] | None = None,
        device: str | torch.device = "auto",
        collate_fn: Callable[[Any], Any] | None = None,
        drop_last: bool = False,
        local_shuffle_buffer_size: int | None = None,
        local_shuffle_seed: int | None = None,
        pin_memory: bool = False,
        tail: str | None = None,
        seed: int | None = None,
    ) -> Batches[Any]:
        """Batches as dicts of tensors: see :meth:`powertrain.data.DataShard.iter_torch_batches`."""
        return self._alone().iter_torch_batches(
            prefetch_batches=prefetch_batches,
            batch_size=batch_size,
            dtypes=dtypes,
            device=device,
            collate_fn=collate_fn,
            drop_last=drop_last,
            local_shuffle_buffer_size=local_shuffle_buffer_size,
            local_shuffle_seed=local_shuffle_seed,
            pin_memory=pin_memory,
            tail=tail,
            seed=seed,
        )

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """All rows as one DataFrame in memory; refuses if there are more than ``limit``."""
        from powertrain.data.rows import formats
        from powertrain.data.rows.gather import concat_rows

        limit = optional_whole("limit", limit, 0)
        found: list[Rows] = []
        count = 0
        for rows in self._stream():
            found.append(rows)
            count += len(rows)
            if limit is not None and count > limit:
                raise DataError(
                    f"The dataset has more than limit={limit} rows. Raise the limit, or call limit({limit}) first."
                )
        return formats.to_pandas(concat_rows(found)) if found else self.schema().empty_table().to_pandas()

    # -- files

    def write_parquet(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        max_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **arrow_parquet_args: Any,
    ) -> None:
        """Write all rows to Parquet files in the directory (or bucket) ``path``.

        The files appear when all of them are whole. Files that are there stay (``mode="append"``), are removed
        afterwards (``"overwrite"``), or mean that nothing is done (``"ignore"``) or an error (``"error"``). ``on`` is
        as for :meth:`materialize`. Other arguments are those of ``pyarrow.parquet.write_table``.
        """
        from powertrain.data.output.writing import parquet_writer

        self._write(
            path,
            "parquet",
            parquet_writer(arrow_parquet_args),
            mode,
            filesystem,
            min_rows_per_file,
            max_rows_per_file,
            on,
        )

    def write_csv(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
        **arrow_csv_args: Any,
    ) -> None:
        """Write all rows to CSV files with a header line. Other arguments are those of ``pyarrow.csv.write_csv``; the
        rest is as for :meth:`write_parquet`."""
        from powertrain.data.output.writing import csv_writer

        self._write(path, "csv", csv_writer(arrow_csv_args), mode, filesystem, min_rows_per_file, None, on)

    def write_json(
        self,
        path: str,
        *,
        filesystem: Any = None,
        min_rows_per_file: int | None = None,
        mode: str = "append",
        on: str | None = None,
    ) -> None:
        """Write all rows to files of one JSON object per line. Times and decimals become text, NaN becomes null. The
        rest is as for :meth:`write_parquet`."""
        from powertrain.data.output.writing import json_writer

        self._write(path, "json", json_writer(), mode, filesystem, min_rows_per_file, None, on)

    def _write(
        self,
        path: str,
        suffix: str,
        write: Callable[[pa.Table, str], None],
        mode: str,
        filesystem: Any,
        fewest: int | None,
        most: int | None,
        on: str | None,
    ) -> None:
        from powertrain.data.output.writing import write_files

        with closing(self._tables(checked_place(on))) as tables:
            write_files(
                self._plan,
                tables,
                self.schema,
                path,
                suffix=suffix,
                write=write,
                mode=mode,
                filesystem=filesystem,
                min_rows_per_file=fewest,
                max_rows_per_file=most,
            )

    # -- how plans change

    def _then(self, operation: Operation) -> Dataset:
        return Dataset(self._plan.then(operation))

    def _projected(self, project: Callable[[Source], Source], operation: Operation) -> Dataset:
        """Other columns: chosen by the source where nothing was done to its rows yet, which may save reading them."""
        parts = tuple(
            dataclasses.replace(part, operations=(*part.operations, operation))
            if part.operations
            else Part(project(part.source))
            for part in self._plan.parts
        )
        return Dataset(dataclasses.replace(self._plan, parts=parts))

    def _with_blocks(self, blocks: tuple[Block, ...]) -> Dataset:
        return Dataset(dataclasses.replace(self._plan, blocks=blocks))

    def _with_sources(self, wrap: Callable[[Source], Source]) -> Dataset:
        """Other sources, of which all blocks count. A plan that some blocks were picked of hands only those on."""
        parts = [dataclasses.replace(part, source=wrap(part.source)) for part in picked(self._plan)]
        return Dataset(dataclasses.replace(self._plan, parts=tuple(parts), blocks=None))

    def _sampled(self, inspected: Inspected, kept: int) -> tuple[Dataset, Dataset]:
        """``kept`` rows from everywhere, and the others."""
        from powertrain.data.plan.prepared import seed_of_data
        from powertrain.data.sources.filtered import SampledSource

        seed = self._plan.seed if self._plan.seed is not None else seed_of_data(inspected)
        parts = picked(self._plan)
        counts = [sum(block.rows for block in part.source.inspect().blocks) for part in parts]
        halves = []
        for complement in (False, True):
            sampled = [
                dataclasses.replace(
                    part, source=SampledSource(part.source, Fraction(take, max(count, 1)), seed, complement)
                )
                for part, count, take in zip(parts, counts, cutting.shares(counts, kept), strict=True)
            ]
            halves.append(Dataset(dataclasses.replace(self._plan, parts=tuple(sampled), blocks=None)))
        return halves[0], halves[1]

    def _countable(self) -> Dataset:
        """The same rows where row numbers mean something: in a fixed order, exactly counted."""
        if not self._plan.shuffled and self._inspected().is_exact:
            return self
        return self.materialize()

    def _shuffled_like(self, other: Dataset) -> Dataset:
        """The same rows, shuffled for each epoch if ``other`` is, by its seed."""
        plan = other._plan
        return Dataset(dataclasses.replace(self._plan, shuffled=plan.shuffled, seed=plan.seed))

    def _pieces(self, counted: Dataset, cuts: Sequence[int]) -> list[Dataset]:
        """``counted``, which has the rows of this dataset, cut there; each shuffled for each epoch if this one is."""
        found = cutting.pieces(counted._inspected().blocks, cuts)
        return [counted._with_blocks(blocks)._shuffled_like(self) for blocks in found]

    def _inspected(self) -> Inspected:
        return self._plan.inspected()

    # -- how rows are read

    def _stream(self, few: int | None = None) -> Generator[Rows, None, None]:
        """Batches of all rows, in order; of ``few`` rows where only the first are wanted."""
        from powertrain.data.loading.loader import stream
        from powertrain.data.output.tables import batch_rows

        inspected = self._inspected()
        size = batch_rows(inspected)
        plan = self._plan
        if few is not None and not plan.shuffled:  # a shuffled order depends on how many are read at a time
            size = max(1, min(few, size))
            if inspected.is_exact:
                plan = dataclasses.replace(plan, blocks=cutting.between(inspected.blocks, 0, few))
        self._newest = execution = Execution(repr(self), len(inspected.blocks))
        return execution.watch(stream(plan, batch_rows=size, observe=execution.observe))

    def _row_dicts(self, few: int | None = None) -> Iterator[Row]:
        from powertrain.data.rows.formats import row_dicts

        with closing(self._stream(few)) as stream:
            for rows in stream:
                yield from row_dicts(rows)

    def _tables(self, on: str | None, few: int | None = None) -> Generator[pa.Table, None, None]:
        """As :meth:`_stream`, as tables; computed by the tasks of a cluster where ``on`` names one."""
        from powertrain.data.output.tables import table_of

        if on is None:
            with closing(self._stream(few)) as stream:
                for rows in stream:
                    yield table_of(rows)
            return
        from powertrain.data.ray.tasks import tables_by_tasks

        self._newest = execution = Execution(repr(self), len(self._inspected().blocks))
        made: Any = tables_by_tasks(self._plan)  # counted like rows: tables have a length and bytes too
        with closing(execution.watch(made)) as tables:
            yield from tables  # type: ignore[misc]

    def _kept(
        self, limit: int | None = None, sizes: Sequence[int] | None = None, on: str | None = None
    ) -> Dataset:
        """All rows, or the first ``limit``, in files of this process, in blocks of these sizes if there are any."""
        from powertrain.data.output.materialized import BLOCK_BYTES, materialize
        from powertrain.data.output.tables import first_rows, pieces_by_bytes, pieces_by_rows

        seeded = self._seeded()
        with closing(seeded._tables(on, limit)) as stream:
            tables: Iterable[pa.Table] = stream
            if limit is not None:
                tables = first_rows(tables, limit)
            pieces = pieces_by_bytes(tables, BLOCK_BYTES) if sizes is None else pieces_by_rows(tables, sizes)
            source = materialize(seeded._plan, pieces, seeded.schema)
            self._newest = seeded._newest
        return Dataset(Plan((Part(source),)))

    def _seeded(self) -> Dataset:
        """The same dataset with a seed, so that keeping its rows again gives the same rows in the same order."""
        from powertrain.data.plan.prepared import seed_of_data

        if self._plan.seed is not None:
            return self
        return Dataset(dataclasses.replace(self._plan, seed=seed_of_data(self._inspected())))

    def _alone(self) -> DataShard:
        from powertrain.data.shard import DataShard

        self._newest = Execution(repr(self), len(self._inspected().blocks))
        return DataShard.alone(self._plan, self._newest)


def _checked_test_size(test_size: Any) -> int | float:
    size = number("test_size", test_size, "must be a number of rows, or a fraction between 0 and 1.")
    if isinstance(size, float) and not 0 < size < 1:
        raise DataError(
            f"test_size={shown(test_size)} is a fraction and must lie between 0 and 1; 1 and more is an int."
        )
    return size
