"""The rows of a plan, read in order by one process: streamed, taken, counted, written, or kept in files."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import optional_whole, whole
from powertrain.data.dataset_arguments import checked_batch_format, checked_place
from powertrain.data.loading.execution import Execution
from powertrain.data.plan import cutting
from powertrain.data.plan.plan import Part, Plan
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from powertrain.data.epochs import EpochReader
    from powertrain.data.rows.rows import Rows

Row = dict[str, Any]


def describe(plan: Plan) -> str:
    """Return a plan in one line, as the ``repr`` of its dataset."""
    parts = [type(part.source).__name__.removesuffix("Source").lower() for part in plan.parts]
    operations = [operation.name for operation in plan.parts[0].operations]
    shuffled = ["shuffled"] if plan.shuffled else []
    shuffled += [f"mixed by {list(plan.mixture.weights)}"] if plan.mixture is not None else []
    return f"Dataset({', '.join([' + '.join(dict.fromkeys(parts)), *operations, *shuffled])})"


class PlanReader:
    """Reads the rows of a plan, and keeps the statistics of the newest reading."""

    __slots__ = ("newest", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        #: The newest reading; None before the first.
        self.newest: Execution | None = None

    def stats(self, name: str | None = None) -> str:
        """Return the cost of the newest reading as text, headed by the name of the dataset."""
        head = "" if name is None else f"{name}: "
        if self.newest is None:
            return f"{head}{describe(self.plan)} has not been read yet."
        return head + self.newest.text()

    def explained(self) -> str:
        """Return the plan as text: sources, operations and order."""
        lines = []
        for number, part in enumerate(self.plan.parts):
            source = type(part.source).__name__.removesuffix("Source")
            lines.append(f"{source}" if len(self.plan.parts) == 1 else f"{number}: {source}")
            lines += [f"  {operation.name}" for operation in part.operations]
        order = "shuffled in each epoch" if self.plan.shuffled else "in the order of the data"
        if self.plan.mixture is not None:
            order = (
                f"mixed by the weights {', '.join(f'{weight:.3g}' for weight in self.plan.mixture.weights)}"
            )
        return "\n".join([*lines, f"order: {order}"])

    def input_files(self) -> list[str]:
        """Return the files of all sources, in order."""
        from powertrain.data.sources.base import layers_of

        found: dict[str, None] = {}
        for part in self.plan.parts:
            part.source.inspect()
            for layer in layers_of(part.source):
                files = [getattr(each, "file", each) for each in getattr(layer, "_files", ())]
                found.update(dict.fromkeys(file.shown for file in files if hasattr(file, "shown")))
        return list(found)

    def _begin(self) -> Execution:
        self.newest = Execution(describe(self.plan), len(self.plan.inspected().blocks))
        return self.newest

    # -- streams

    def stream(self, few: int | None = None) -> Generator[Rows, None, None]:
        """Return batches of all rows, in order; of ``few`` rows where only the first are needed."""
        from powertrain.data.loading.loader import stream
        from powertrain.data.output.tables import batch_rows

        inspected = self.plan.inspected()
        size = batch_rows(inspected)
        plan = self.plan
        if few is not None and plan.is_plain:  # a shuffled order depends on how many are read at a time
            size = max(1, min(few, size))
            if inspected.is_exact:
                plan = dataclasses.replace(plan, blocks=cutting.between(inspected.blocks, 0, few))
        execution = self._begin()
        return execution.watch(stream(plan, batch_rows=size, observe=execution.observe))

    def row_dicts(self, few: int | None = None) -> Iterator[Row]:
        """Yield each row as a dict, in order."""
        from powertrain.data.rows.formats import row_dicts

        with closing(self.stream(few)) as stream:
            for rows in stream:
                yield from row_dicts(rows)

    def tables(self, on: str | None, few: int | None = None) -> Generator[pa.Table, None, None]:
        """Yield the rows as tables; computed by the tasks of a cluster where ``on`` names one."""
        from powertrain.data.output.tables import table_of

        if on is None:
            with closing(self.stream(few)) as stream:
                for rows in stream:
                    yield table_of(rows)
            return
        from powertrain.data.ray.tasks import tables_by_tasks

        execution = self._begin()
        made: Any = tables_by_tasks(self.plan)  # counted like rows: tables have a length and bytes too
        with closing(execution.watch(made)) as tables:
            yield from tables  # type: ignore[misc]

    def epochs(self) -> EpochReader:
        """Return a reader of epochs, for a process without other ranks."""
        from powertrain.data.epochs import EpochReader

        return EpochReader.alone(self.plan, self._begin())

    # -- metadata

    def count(self) -> int:
        """Return the number of rows: known from the files, or found by running functions that change it."""
        inspected = self.plan.inspected()
        if inspected.is_exact:
            return inspected.rows
        return sum(len(rows) for rows in self.stream())

    def schema(self) -> pa.Schema:
        """Return columns and types; where functions make them, those of the first row, which is computed for it."""
        from powertrain.data.output.tables import declared_schema, schema_to_write, table_of

        declared = declared_schema(self.plan)
        if declared is not None:
            return declared
        for rows in self.stream(1):
            return schema_to_write(self.plan, table_of(rows).schema)
        return self.plan.parts[0].source.inspect().schema

    def size_bytes(self) -> int:
        """Return the approximate bytes of the sources' rows once decoded."""
        facts = [part.source.inspect().blocks for part in self.plan.parts]
        return sum(
            facts[block.part][block.index].nbytes * block.rows // max(facts[block.part][block.index].rows, 1)
            for block in self.plan.inspected().blocks
        )

    # -- rows in memory

    def take(self, limit: int) -> list[Row]:
        """Return the first ``limit`` rows."""
        limit = min(whole("limit", limit, 0), sys.maxsize)
        return list(itertools.islice(self.row_dicts(limit), limit))

    def take_all(self, limit: int | None) -> list[Row]:
        """Return all rows, of which there may be at most ``limit``."""
        limit = optional_whole("limit", limit, 0)
        rows: list[Row] = []
        for row in self.row_dicts():
            if limit is not None and len(rows) >= limit:
                raise DataError(
                    f"The dataset has more than limit={limit} rows. Raise the limit, or use take({limit})."
                )
            rows.append(row)
        return rows

    def take_batch(self, batch_size: int, batch_format: str | None) -> Any:
        """Return the first ``batch_size`` rows as one batch."""
        from powertrain.data.rows import formats
        from powertrain.data.rows.gather import concat_rows

        form = checked_batch_format(batch_format)
        batch_size = min(whole("batch_size", batch_size, 1), sys.maxsize)
        found: list[Rows] = []
        for rows in self.stream(batch_size):
            found.append(rows)
            if sum(map(len, found)) >= batch_size:
                break
        if not found:
            raise DataError("The dataset has no rows to take. Check its paths and filters.")
        batch = concat_rows(found).between(0, batch_size)
        make = {"numpy": formats.to_numpy, "pandas": formats.to_pandas, "pyarrow": formats.to_arrow}
        return make[form](batch)

    def to_pandas(self, limit: int | None) -> pd.DataFrame:
        """Return all rows as one DataFrame; there may be at most ``limit``."""
        from powertrain.data.rows import formats
        from powertrain.data.rows.gather import concat_rows

        limit = optional_whole("limit", limit, 0)
        found: list[Rows] = []
        count = 0
        for rows in self.stream():
            found.append(rows)
            count += len(rows)
            if limit is not None and count > limit:
                raise DataError(
                    f"The dataset has more than limit={limit} rows. Raise the limit, or call limit({limit}) first."
                )
        return formats.to_pandas(concat_rows(found)) if found else self.schema().empty_table().to_pandas()

    # -- files

    def write(
        self,
        path: str,
        suffix: str,
        write: Callable[[pa.Table, str], None],
        *,
        mode: str,
        filesystem: Any,
        min_rows_per_file: int | None,
        max_rows_per_file: int | None = None,
        on: str | None,
        **layout: Any,
    ) -> None:
        """Write all rows to files: see ``Dataset.write_parquet``; ``write_files`` takes ``layout``."""
        from powertrain.data.output.writing import write_files

        with closing(self.tables(checked_place(on))) as tables:
            write_files(
                self.plan,
                tables,
                self.schema,
                path,
                suffix=suffix,
                write=write,
                mode=mode,
                filesystem=filesystem,
                min_rows_per_file=min_rows_per_file,
                max_rows_per_file=max_rows_per_file,
                **layout,
            )

    def materialize(
        self, limit: int | None = None, sizes: Sequence[int] | None = None, on: str | None = None
    ) -> Plan:
        """Keep all rows, or the first ``limit``, in files of this process, in blocks of ``sizes`` where given."""
        from powertrain.data.output.materialized import BLOCK_BYTES, materialize
        from powertrain.data.output.tables import first_rows, pieces_by_bytes, pieces_by_rows
        from powertrain.data.plan.changing import with_seed

        seeded = PlanReader(with_seed(self.plan))
        with closing(seeded.tables(on, limit)) as stream:
            tables: Iterable[pa.Table] = stream
            if limit is not None:
                tables = first_rows(tables, limit)
            pieces = pieces_by_bytes(tables, BLOCK_BYTES) if sizes is None else pieces_by_rows(tables, sizes)
            source = materialize(seeded.plan, pieces, seeded.schema)
            self.newest = seeded.newest
        return Plan((Part(source),))
