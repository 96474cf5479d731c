"""The interface of an operation on all rows, and its result as a source that is computed when it is first needed."""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from powertrain.data.output.materialized import MaterializedSource, keep
from powertrain.data.plan.plan import Part, Plan
from powertrain.data.sources.base import Source, SourceFacts
from powertrain.data.whole.database import Database
from powertrain.data.whole.inputs import Input
from powertrain.errors import DataError


@dataclass(frozen=True)
class QueryResult:
    """The rows of a query, as blocks, and their types where there are none."""

    blocks: Iterable[pa.Table]
    schema: pa.Schema
    #: What functions of the user made, if only some columns are theirs: it identifies the result too.
    made_by_functions: pa.Table | None = None


class Query(ABC):
    """One operation on all rows of one or two plans. A value: frozen, pickled by cloudpickle."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Name for messages: "sort()"."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """Text that differs for queries with different rows or another order, but for functions of the user."""

    @property
    def calls_functions(self) -> bool:
        """True where functions of the user make the rows, so that only the rows themselves identify the result."""
        return False

    @abstractmethod
    def compute(self, inputs: Sequence[Input], database: Database) -> QueryResult:
        """Return the result. Its order, and where its blocks end, follow from the rows alone."""


class WholeDataSource(Source):
    """The result of a query: computed once, when it is inspected, and kept in files of this process.

    Its fingerprint follows from those of its inputs, the query and the numbers of rows, and, but for functions of the
    user, not from its values: sums of floats differ in their last digits from one computation to the next.
    """

    cheap_to_decode = True

    def __init__(self, query: Query, plans: Sequence[Plan]) -> None:
        self._query: Query | None = query
        self._name, self._plans = query.name, tuple(plans)
        self._inners = tuple(part.source for plan in plans for part in plan.parts)
        self._kept: MaterializedSource | None = None
        self._computing = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name != "_computing"}
        if self._kept is not None:  # a copy reads the result, and needs neither inputs nor functions
            state.update(_query=None, _plans=(), _inners=())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _computing=threading.Lock())

    def inspect(self) -> SourceFacts:
        return self._result().inspect()

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        return self._result().read(block, columns)

    def name_row(self, block: int, row: int) -> str:
        number = sum(facts.rows for facts in self.inspect().blocks[:block]) + row
        return f"row {number} of the result of {self._name}"

    def publish(self, directory: str) -> Source:
        """Link the files below ``directory``: engines with several machines copy what lies there to each of them."""
        try:
            return self._result().linked(directory)
        except OSError as error:
            raise DataError(
                f"The result of {self._name} could not be put into {directory!r} for the workers: "
                f"{error.strerror or error}. Free space there, or choose another storage path."
            ) from error

    def _result(self) -> MaterializedSource:
        with self._computing:
            if self._kept is None:
                assert self._query is not None, "a copy without a result has the query"
                self._kept = self._computed(self._query)
            return self._kept

    def _computed(self, query: Query) -> MaterializedSource:
        with Database(query.name) as database:
            inputs = [Input(plan) for plan in self._plans]
            result = query.compute(inputs, database)
            kept = keep(result.blocks, lambda: result.schema)
        facts = kept.inspect()
        digest = hashlib.blake2b(digest_size=16, person=b"powertrain.whole")
        digest.update(repr((query.name, query.identity)).encode())
        digest.update(repr([each.fingerprint for each in inputs]).encode())
        digest.update(repr([block.rows for block in facts.blocks]).encode())
        digest.update(repr([(field.name, str(field.type)) for field in facts.schema]).encode())
        if query.calls_functions:
            digest.update(facts.fingerprint.encode())
        if result.made_by_functions is not None:
            digest.update(_bytes_of(result.made_by_functions))
        return kept.described(digest.hexdigest())


def _bytes_of(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks())
    return memoryview(sink.getvalue())


def plan_of(query: Query, *plans: Plan) -> Plan:
    """Return the plan of a query's result, of which nothing is computed yet."""
    return Plan((Part(WholeDataSource(query, plans)),))
