"""Dataset: rows of files or memory and what is to be done to them, as a value that nothing is read for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data import splitting
from powertrain.data.arguments import column_names, flag, keyword_arguments, seed_number, whole
from powertrain.data.consuming import PlanReader, Row, describe
from powertrain.data.dataset_arguments import checked_batch_format, checked_place, function, parsed
from powertrain.data.plan.changing import filter_rows, project
from powertrain.data.plan.plan import Plan
from powertrain.data.plan.plan import union as union_of
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    import pyarrow.compute as pc
    import torch

    from powertrain.data.epochs import Batches
    from powertrain.data.operations.operation import Operation


class Dataset:
    """Rows in blocks, and what is to be done to each of them. Made by ``powertrain.data.read_...`` and ``from_...``.

    A dataset never changes: every method that transforms returns a new one, and nothing is read before rows, or
    facts about them, are asked for. Rows then stream through within a budget of memory, however many there are.
    """

    __slots__ = ("__weakref__", "_reader")

    def __init__(self, plan: Plan) -> None:
        self._reader = PlanReader(plan)

    @property
    def plan(self) -> Plan:
        """What this dataset stands for."""
        return self._reader.plan

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dataset, (self.plan,))

    def __repr__(self) -> str:
        return describe(self.plan)

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
        return Dataset(filter_rows(self.plan, parsed(condition)))

    def select_columns(self, cols: str | Sequence[str]) -> Dataset:
        """Only these columns, in this order. Others are not even read where the source can do without them."""
        from powertrain.data.operations.columns import SelectColumns
        from powertrain.data.sources.filtered import ProjectedSource

        names = column_names("select_columns", cols)
        return Dataset(
            project(self.plan, lambda source: ProjectedSource(source, names), SelectColumns(names))
        )

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
        return Dataset(
            project(self.plan, lambda source: WithoutColumnsSource(source, names), DropColumns(names))
        )

    def rename_columns(self, names: Mapping[str, str] | Sequence[str]) -> Dataset:
        """Columns under other names: a dict from old to new, or new names for all columns in order."""
        from powertrain.data.operations.columns import RenameColumns
        from powertrain.data.sources.filtered import ProjectedSource
        from powertrain.data.sources.relabeled import RelabeledSource

        if isinstance(names, Mapping):
            renames = keyword_arguments("rename_columns(): names", names)
            column_names("rename_columns", [*renames, *renames.values()])
            return Dataset(
                project(
                    self.plan,
                    lambda source: ProjectedSource(source, None, renames),
                    RenameColumns(renames),
                )
            )
        new = column_names("rename_columns", [names] if isinstance(names, str) else names)
        return Dataset(project(self.plan, lambda source: RelabeledSource(source, new), RenameColumns(new)))

    def random_shuffle(self, *, seed: int | None = None) -> Dataset:
        """In an order that is drawn anew for each epoch. Nothing is moved: rows are read in that order.

        Data in memory is permuted row by row. Of files blocks are permuted, and rows inside them; a batch has rows from
        64 places of the data. Without a seed a run draws one and keeps it, so that it resumes in the same order; which
        rows a limit or split of it picks then follows from the data, the same at every start of a program.
        """
        return Dataset(dataclasses.replace(self.plan, shuffled=True, seed=seed_number("seed", seed)))

    def union(self, *other: Dataset) -> Dataset:
        """The rows of this dataset, then those of the others. All must have the same columns."""
        for one in other:
            if not isinstance(one, Dataset):
                raise DataError(
                    f"union() takes datasets, and got a {type(one).__name__}. Give Dataset objects."
                )
        return Dataset(union_of([self.plan, *(one.plan for one in other)]))

    # -- fewer rows, other blocks

    def limit(self, limit: int) -> Dataset:
        """The first ``limit`` rows; of a shuffled dataset as many rows drawn from everywhere, the same in every epoch.

        Looks at the files to count rows. Where functions decide how many rows there are, the rows are computed and
        kept as :meth:`materialize` does, as far as they are needed.
        """
        plan = splitting.limit_rows(self._reader, limit)
        return self if plan is self.plan else Dataset(plan)

    def split(self, n: int, *, equal: bool = False) -> list[Dataset]:
        """``n`` datasets of consecutive rows, whose sizes differ by at most one; with ``equal`` by none, and rows that
        are left over are in none of them. See :meth:`split_at_indices` for what is computed."""
        return [Dataset(plan) for plan in splitting.split(self._reader, n, equal)]

    def split_at_indices(self, indices: Sequence[int]) -> list[Dataset]:
        """Datasets of the rows before, between and after these row numbers.

        Looks at the files to count rows; nothing is read or written but where the dataset is shuffled, or where
        functions decide how many rows there are. Then the rows are kept first as :meth:`materialize` does. Pieces of a
        shuffled dataset are shuffled too.
        """
        return [Dataset(plan) for plan in splitting.split_at_indices(self._reader, indices)]

    def split_proportionately(self, proportions: Sequence[float]) -> list[Dataset]:
        """Datasets of these proportions of the rows, and one more of the rest. See :meth:`split_at_indices`."""
        return [Dataset(plan) for plan in splitting.split_proportionately(self._reader, proportions)]

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
        train, test = splitting.train_test_split(self._reader, test_size, shuffle, seed)
        return Dataset(train), Dataset(test)

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
        return Dataset(splitting.repartition(self._reader, num_blocks, target_num_rows_per_block, shuffle))

    def materialize(self, *, on: str | None = None) -> Dataset:
        """Read and compute all rows once, and keep them in files of this machine that are gone with the dataset.

        What functions did is then done for all epochs, their random numbers too; a shuffled dataset is shuffled once,
        for good: by its seed, or by one that follows from the data. Counts are exact afterwards, so that batches are
        full and every epoch is exact. ``on="ray"`` computes the rows in tasks on all nodes of the Ray cluster that this
        process is connected to: the same rows, in the same order. Files must then be where every node sees them.
        """
        return Dataset(self._reader.materialize(on=checked_place(on)))

    # -- facts

    def count(self) -> int:
        """How many rows there are: known from the files, or by running functions that decide it."""
        return self._reader.count()

    def schema(self) -> pa.Schema:
        """Columns and their types; where functions make them, those of the first row, which is computed for it."""
        return self._reader.schema()

    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self.schema().names)

    def num_blocks(self) -> int:
        """How many blocks the rows are in: what is read, cached and shuffled as one."""
        return len(self.plan.inspected().blocks)

    def size_bytes(self) -> int:
        """About how many bytes the rows of the source take once decoded."""
        return self._reader.size_bytes()

    def stats(self) -> str:
        """What the newest reading of this dataset has cost, in words."""
        return self._reader.stats()

    # -- rows

    def take(self, limit: int = 20) -> list[Row]:
        """The first ``limit`` rows."""
        return self._reader.take(limit)

    def take_all(self, limit: int | None = None) -> list[Row]:
        """All rows; refuses if there are more than ``limit``."""
        return self._reader.take_all(limit)

    def take_batch(self, batch_size: int = 20, *, batch_format: str | None = "default") -> Any:
        """The first ``batch_size`` rows as one batch: see :meth:`iter_batches`."""
        return self._reader.take_batch(batch_size, batch_format)

    def show(self, limit: int = 20) -> None:
        """Print the first ``limit`` rows."""
        for row in self.take(limit):
            print(row)

    def iter_rows(self) -> Iterator[Row]:
        """Every row as a dict, in order."""
        return self._reader.row_dicts()

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
        from powertrain.data.iterating import iter_batches

        return iter_batches(
            self._reader.epochs(),
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
        from powertrain.data.iterating import iter_torch_batches

        return iter_torch_batches(
            self._reader.epochs(),
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
        return self._reader.to_pandas(limit)

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

        self._reader.write(
            path,
            "parquet",
            parquet_writer(arrow_parquet_args),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file,
            max_rows_per_file=max_rows_per_file,
            on=on,
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

        self._reader.write(
            path,
            "csv",
            csv_writer(arrow_csv_args),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file,
            max_rows_per_file=None,
            on=on,
        )

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

        self._reader.write(
            path,
            "json",
            json_writer(),
            mode=mode,
            filesystem=filesystem,
            min_rows_per_file=min_rows_per_file,
            max_rows_per_file=None,
            on=on,
        )

    # -- how plans change

    def _then(self, operation: Operation) -> Dataset:
        return Dataset(self.plan.then(operation))
