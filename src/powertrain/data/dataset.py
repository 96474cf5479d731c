"""Dataset: rows of files or memory and the operations on them, as a lazy value."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data import splitting
from powertrain.data.arguments import flag, whole
from powertrain.data.consuming import Row, describe
from powertrain.data.dataset_arguments import checked_batch_format, checked_place, function, parsed
from powertrain.data.methods.whole_data import WholeDataMethods
from powertrain.data.options.refused import METHODS, RefusesNames, missing_member
from powertrain.data.options.scheduling import take_ray_arguments
from powertrain.data.options.seeds import seed_of
from powertrain.data.plan.changing import filter_rows
from powertrain.data.readable import check_no_mixture
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pyarrow.compute as pc

    from powertrain.data.expressions.expr import Expr


class Dataset(WholeDataMethods, metaclass=RefusesNames):
    """Rows in blocks, and the operations on them. Made by ``powertrain.data.read_...`` and ``from_...``.

    A dataset never changes: every method that transforms returns a new one, and nothing is read before rows, or
    metadata, are requested. Rows then stream through within a memory budget, however many there are. Every method
    raises :class:`~powertrain.errors.DataError` for a wrong argument, and those that read also for unreadable data.

    Example::

        dataset = powertrain.data.read_parquet("data/train").filter("label < 5").random_shuffle(seed=1)
    """

    __slots__ = ("__weakref__",)
    _refused_names = METHODS

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dataset, (self.plan, self._name))

    def __repr__(self) -> str:
        return describe(self.plan) if self._name is None else f"{self._name}: {describe(self.plan)}"

    def __getattr__(self, name: str) -> Any:
        raise missing_member(type(self), name)

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
        fn: Callable[..., Row | Awaitable[Row]] | type[Any],
        *,
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        compute: Any = None,
        concurrency: int | tuple[int, ...] | None = None,
        **ray_remote_args: Any,
    ) -> Dataset:
        """Replace every row, a dict, by the dict that ``fn(row, *fn_args, **fn_kwargs)`` returns.

        Args:
            fn: A function, or a class, which is constructed once for each process that uses it. A parameter named
                ``rng`` gets a numpy generator that belongs to the row: the same numbers at any number of ranks.
            fn_args: Further positional arguments.
            fn_kwargs: Further keyword arguments.
            fn_constructor_args: Positional arguments of the constructor, for a class.
            fn_constructor_kwargs: Keyword arguments of the constructor, for a class.
            compute: ``ActorPoolStrategy(size=4)`` or ``TaskPoolStrategy(size=4)``, in place of ``concurrency=4``.
            concurrency: Number of processes on the machine; None runs it on the threads of the reading process. Of a
                range ``(fewest, most)`` the most.
            **ray_remote_args: Ray Data's arguments about scheduling, such as ``num_cpus``, without effect.

        Returns:
            The new dataset.

        Example::

            dataset.map(lambda row: {"length": len(row["text"])})
        """
        from powertrain.data.operations.functions import MapRows

        take_ray_arguments("map", ray_remote_args)
        given = function(
            "map", fn, fn_args, fn_kwargs, fn_constructor_args, fn_constructor_kwargs, concurrency, compute
        )
        return self._then(MapRows(**given))

    def map_batches(
        self,
        fn: Callable[..., Any],
        *,
        batch_size: int | str | None = None,
        batch_format: str | None = "default",
        zero_copy_batch: bool = True,
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        compute: Any = None,
        concurrency: int | tuple[int, ...] | None = None,
        udf_modifying_row_count: bool = True,
        **ray_remote_args: Any,
    ) -> Dataset:
        """Replace batches of rows by the batches that ``fn`` returns.

        Batches hold neighbours of one block and are the same at any number of ranks.

        Args:
            fn: A function or class, also an asynchronous one; it may return any batch format, and another number of
                rows, or yield several batches.
            batch_size: Rows of a batch, at most; None and "auto" for 1024.
            batch_format: ``"numpy"`` (a dict of arrays, the default), ``"pandas"`` or ``"pyarrow"``.
            fn_args: As for :meth:`map`, like the four below.
            fn_kwargs: Likewise.
            fn_constructor_args: Likewise.
            fn_constructor_kwargs: Likewise.
            compute: Likewise.
            concurrency: Likewise.
            udf_modifying_row_count: False promises an unchanged number of rows, so that :meth:`count`, :meth:`limit`
                and the splits need not run the function.
            zero_copy_batch: Accepted for compatibility: a function may always write to its batch.
            **ray_remote_args: As for :meth:`map`.

        Returns:
            The new dataset.

        Example::

            dataset.map_batches(lambda batch: {"x": batch["x"] / 255})
        """
        from powertrain.data.operations.functions import BATCH_SIZE, MapBatches

        take_ray_arguments("map_batches", ray_remote_args)
        if isinstance(batch_size, str) and batch_size in ("auto", "default"):
            batch_size = None
        flag("zero_copy_batch", zero_copy_batch)  # a function may always write to its batch
        given = function(
            "map_batches",
            fn,
            fn_args,
            fn_kwargs,
            fn_constructor_args,
            fn_constructor_kwargs,
            concurrency,
            compute,
        )
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
        compute: Any = None,
        concurrency: int | tuple[int, ...] | None = None,
        **ray_remote_args: Any,
    ) -> Dataset:
        """Replace every row by any number of rows that ``fn`` returns for it.

        An epoch is counted in rows of the source, so batches have as many rows as come of theirs. :meth:`materialize`
        gives batches of equal size.

        Args:
            fn: A function or class that returns rows, for example a list of dicts.
            fn_args: As for :meth:`map`, like the arguments below.
            fn_kwargs: Likewise.
            fn_constructor_args: Likewise.
            fn_constructor_kwargs: Likewise.
            compute: Likewise.
            concurrency: Likewise.
            **ray_remote_args: Likewise.

        Returns:
            The new dataset.

        Example::

            dataset.flat_map(lambda row: [{"word": word} for word in row["text"].split()])
        """
        from powertrain.data.operations.functions import FlatMap

        take_ray_arguments("flat_map", ray_remote_args)
        given = function(
            "flat_map",
            fn,
            fn_args,
            fn_kwargs,
            fn_constructor_args,
            fn_constructor_kwargs,
            concurrency,
            compute,
        )
        return self._then(FlatMap(**given))

    def filter(
        self,
        fn: Callable[..., bool] | type[Any] | Expr | pc.Expression | str | None = None,
        expr: Expr | pc.Expression | str | None = None,
        *,
        fn_args: Iterable[Any] | None = None,
        fn_kwargs: Mapping[str, Any] | None = None,
        fn_constructor_args: Iterable[Any] | None = None,
        fn_constructor_kwargs: Mapping[str, Any] | None = None,
        compute: Any = None,
        concurrency: int | tuple[int, ...] | None = None,
        **ray_remote_args: Any,
    ) -> Dataset:
        """Keep the rows for which ``fn(row)`` or an expression is true (null counts as false).

        Before any function an expression is counted once per block and exact: batches are full and epochs have an exact
        number of rows. A function, or an expression after one, leaves batches with fewer rows than requested.

        Args:
            fn: A function, a class, or an expression.
            expr: An expression (``col("label") == 3``), one of Arrow's or text (``"label == 3"``).
            fn_args: As for :meth:`map`, like the arguments below.
            fn_kwargs: Likewise.
            fn_constructor_args: Likewise.
            fn_constructor_kwargs: Likewise.
            compute: Likewise.
            concurrency: Likewise.
            **ray_remote_args: Likewise.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value, or both ``fn`` and ``expr`` are given.

        Example::

            dataset.filter("label == 3")
        """
        take_ray_arguments("filter", ray_remote_args)
        if (fn is None) == (expr is None):
            raise DataError(
                "filter() takes either a function or an expression. Give fn=... or expr=..., not both."
            )
        condition = expr if expr is not None else fn
        if callable(condition):
            from powertrain.data.operations.functions import FilterRows

            given = function(
                "filter",
                condition,
                fn_args,
                fn_kwargs,
                fn_constructor_args,
                fn_constructor_kwargs,
                concurrency,
                compute,
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

    # -- order

    def random_shuffle(
        self, *, seed: Any = None, num_blocks: int | None = None, **ray_remote_args: Any
    ) -> Dataset:
        """Return a dataset whose rows are shuffled anew for each epoch. Nothing is moved: rows are read in that order.

        Data in memory is permuted row by row. Of files, blocks are permuted, and rows inside them; a batch has rows
        from 64 places of the data.

        Args:
            seed: The seed. Without one a run draws one and keeps it, so that it resumes in the same order; the rows of
                a limit or split then follow from the data, the same at every start of a program.
            num_blocks: Accepted for compatibility, without effect: :meth:`repartition` changes blocks.
            **ray_remote_args: As for :meth:`map`.

        Raises:
            DataError: An argument has a wrong value, or the dataset is a mixture that ends with its shortest dataset.
        """
        take_ray_arguments("random_shuffle", ray_remote_args)
        check_no_mixture("random_shuffle", self.plan)
        return Dataset(
            dataclasses.replace(self.plan, shuffled=True, seed=seed_of("seed", seed), mixture=None)
        )

    def randomize_block_order(self, *, seed: Any = None) -> Dataset:
        """Return a dataset with the blocks in another order; rows within a block stay where they are.

        Nothing is read but the numbers of rows. For training prefer :meth:`random_shuffle`, which shuffles for each
        epoch and moves no data either.

        Args:
            seed: The seed; without one the order follows from the data.

        Returns:
            The new dataset.

        Raises:
            DataError: ``seed`` is not a whole number, or the data cannot be read.
        """
        return Dataset(splitting.randomize_blocks(self._reader, seed_of("seed", seed)))

    # -- fewer rows, other blocks

    def limit(self, limit: int) -> Dataset:
        """Return a dataset of the first rows; of a shuffled dataset as many, drawn evenly, the same in every epoch.

        Inspects the files to count rows. Where functions change the number of rows, the rows are computed and kept as
        :meth:`materialize` does, as far as they are needed.

        Args:
            limit: The number of rows, at most.

        Example::

            dataset.limit(1000)
        """
        plan = splitting.limit_rows(self._reader, limit)
        return self if plan is self.plan else Dataset(plan)

    def random_sample(self, fraction: float, *, seed: Any = None) -> Dataset:
        """Return a dataset of a share of the rows, drawn evenly from all blocks, in their order.

        Unlike in Ray Data the number of rows is exact. Where functions change the number of rows, the rows are kept
        first as :meth:`materialize` does.

        Args:
            fraction: The share, from 0 to 1.
            seed: The seed; without one the rows follow from the data, the same at every start of a program.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value.

        Example::

            dataset.random_sample(0.1)
        """
        return Dataset(splitting.random_sample(self._reader, fraction, seed_of("seed", seed)))

    def split(self, n: int, *, equal: bool = False, locality_hints: Any = None) -> list[Dataset]:
        """Split into datasets of consecutive rows, whose sizes differ by at most one; see :meth:`split_at_indices`.

        Args:
            n: The number of datasets.
            equal: Make all sizes equal; the remaining rows are in none of them.
            locality_hints: Accepted for compatibility, without effect.

        Returns:
            The ``n`` datasets, in the order of their rows.

        Example::

            first, second = dataset.split(2)
        """
        return [Dataset(plan) for plan in splitting.split(self._reader, n, equal)]

    def split_at_indices(self, indices: Sequence[int]) -> list[Dataset]:
        """Split into datasets of the rows before, between and after these row numbers.

        Inspects the files to count rows; rows are only read or written where the dataset is shuffled, or where
        functions change the number of rows. Then the rows are kept first as :meth:`materialize` does. Pieces of a
        shuffled dataset are shuffled too.

        Args:
            indices: Row numbers in ascending order.

        Returns:
            One dataset more than there are numbers.

        Example::

            head, tail = dataset.split_at_indices([1000])
        """
        return [Dataset(plan) for plan in splitting.split_at_indices(self._reader, indices)]

    def split_proportionately(self, proportions: Sequence[float]) -> list[Dataset]:
        """Split by these proportions of the rows; see :meth:`split_at_indices`.

        Args:
            proportions: Fractions, each above 0 and together below 1.

        Returns:
            A dataset for each proportion, and one of the rest.

        Example::

            train, valid, test = dataset.split_proportionately([0.8, 0.1])
        """
        return [Dataset(plan) for plan in splitting.split_proportionately(self._reader, proportions)]

    def train_test_split(
        self,
        test_size: int | float,
        *,
        shuffle: bool = False,
        seed: Any = None,
        stratify: str | None = None,
    ) -> tuple[Dataset, Dataset]:
        """Split into two datasets: one to train on, and one of the last ``test_size`` rows to test with.

        With ``shuffle``, or of a shuffled dataset, the test rows are drawn evenly from all blocks, and the two are
        shuffled too. Inspects the files to count rows; rows are only read or written where functions change their
        number: then they are kept first as :meth:`materialize` does.

        Args:
            test_size: A number of rows, or a fraction between 0 and 1.
            shuffle: Draw the test rows evenly.
            seed: The seed of that draw. Without one it follows from the data: the same data is split in the same way at
                every start of a program, so that a resumed run never trains on a test row.
            stratify: Refused: split each class by itself.

        Returns:
            The training rows and the test rows.

        Example::

            train, test = dataset.train_test_split(0.2, shuffle=True)
        """
        take_ray_arguments("train_test_split", {"stratify": stratify})
        train, test = splitting.train_test_split(self._reader, test_size, shuffle, seed_of("seed", seed))
        return Dataset(train), Dataset(test)

    def repartition(
        self,
        num_blocks: int | None = None,
        target_num_rows_per_block: int | None = None,
        *,
        strict: bool = False,
        shuffle: bool = False,
        keys: Sequence[str] | None = None,
        sort: bool = False,
    ) -> Dataset:
        """Return the same rows in another number of blocks, the unit of reading and shuffling.

        Where every new block lies within an old one, nothing is read. Otherwise, and where functions change the
        number of rows, the rows are written anew as :meth:`materialize` does.

        Args:
            num_blocks: The number of blocks.
            target_num_rows_per_block: Rows of a block, in place of ``num_blocks``.
            strict: Accepted for compatibility: blocks have exactly so many rows in any case.
            shuffle: Shuffle the rows too.
            keys: Columns: rows with equal values in them come into the same block. Computed like :meth:`sort`; up to
                ``num_blocks`` blocks, because parts without rows are none.
            sort: With ``keys``, sort the rows of each block by them.

        Raises:
            DataError: An argument has a wrong value.
        """
        flag("strict", strict)
        if keys is not None:
            if target_num_rows_per_block is not None or flag("shuffle", shuffle):
                raise DataError(
                    "repartition(keys=...) takes num_blocks, and neither rows of a block nor shuffle."
                )
            return self._by_keys(num_blocks, keys, flag("sort", sort))
        if flag("sort", sort):
            raise DataError("repartition(sort=True) sorts by keys=..., and none are given. Use sort().")
        return Dataset(splitting.repartition(self._reader, num_blocks, target_num_rows_per_block, shuffle))

    def materialize(self, *, on: str | None = None) -> Dataset:
        """Read and compute all rows once, and keep them in files of this machine that are removed with the dataset.

        Results of functions then hold for all epochs, with their random numbers; a shuffled dataset is shuffled once,
        by its seed, or by one that follows from the data. Counts are exact afterwards, so that batches are full and
        every epoch is exact.

        Args:
            on: ``"ray"`` computes the rows in tasks on all nodes of the connected Ray cluster: the same rows, in the
                same order. Every node must then see the files.

        Returns:
            The new dataset.
        """
        return Dataset(self._reader.materialize(on=checked_place(on)))
