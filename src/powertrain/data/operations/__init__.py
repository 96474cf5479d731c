"""What is done to rows on their way to the user: as values that travel, and the one who does it.

An :class:`Operation` is a value: a function with its arguments, names of columns. A :class:`Runner` does a sequence of
them to rows, on the thread that asks or in processes of its own, and the outcome is the same at any number of threads,
processes and ranks.
"""

from __future__ import annotations

import difflib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from powertrain.data.arguments import shortened, shown
from powertrain.data.operations.calls import Call, FunctionFailed, Setting, name_of
from powertrain.data.plan.order import Ints
from powertrain.data.operations.returned import (
    check_row,
    drawn,
    from_batch,
    kind_of,
    length_of_batch,
    no_rows,
    quoted,
    rows_of_dicts,
)
from powertrain.data.rows.rows import Rows
from powertrain.data.sources.base import IMAGES
from powertrain.data.operations.stages import Applied, Apply, Operation, Piece, Stage, Threads
from powertrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.compute as pc

    from powertrain.data.loading.pixels import KeptColumn, KeptImages

#: Rows of a batch where the user does not say.
BATCH_SIZE = 1024
_FORMATS = ("numpy", "pandas", "pyarrow")


# --------------------------------------------------------------------------- functions of the user's


@dataclass(frozen=True, eq=False)
class _WithFunction(Operation):
    """An operation that calls ``fn(argument, *fn_args, **fn_kwargs)``.

    A class is instantiated once per process (on threads: once per rank, and called by one thread at a time) with its
    constructor arguments. A function that has a parameter ``rng`` is given a generator that belongs to the row, or to
    the first row of the batch.
    """

    verb: ClassVar[str]

    fn: Callable[..., Any]
    fn_args: tuple[Any, ...] = ()
    fn_kwargs: Mapping[str, Any] = field(default_factory=dict)
    fn_constructor_args: tuple[Any, ...] = ()
    fn_constructor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int = 0

    def __post_init__(self) -> None:
        if not callable(self.fn) or not _gives_callables(self.fn):
            raise ConfigError(
                f"{self.verb} needs a function, or a class whose instances can be called, not {shown(self.fn)}."
            )
        if not isinstance(self.fn, type) and (self.fn_constructor_args or self.fn_constructor_kwargs):
            raise ConfigError(
                f"{self.name} was given constructor arguments, but {name_of(self.fn)} is not a class. Pass them as "
                "fn_args or fn_kwargs."
            )
        if (
            isinstance(self.concurrency, bool)
            or not isinstance(self.concurrency, int)
            or self.concurrency < 0
        ):
            raise ConfigError(
                f"{self.name}: concurrency is {self.concurrency!r}, and must be a number of processes, or 0 for none."
            )

    @property
    def name(self) -> str:
        return f"{self.verb}({name_of(self.fn)})"

    def begin(self) -> Apply:
        call = Call(
            self.fn, self.fn_args, self.fn_kwargs, self.fn_constructor_args, self.fn_constructor_kwargs
        )
        return lambda piece, setting: self._applied(call, piece, setting)

    @abstractmethod
    def _applied(self, call: Call, piece: Piece, setting: Setting) -> Applied: ...


def _gives_callables(fn: Any) -> bool:
    return not isinstance(fn, type) or any("__call__" in vars(kind) for kind in fn.__mro__)


@dataclass(frozen=True, eq=False)
class MapRows(_WithFunction):
    """Each row, a dict, becomes the dict that the function returns."""

    verb: ClassVar[str] = "map"

    def _applied(self, call: Call, piece: Piece, setting: Setting) -> Applied:
        numbers = piece.rows.numbers
        made: list[Mapping[str, Any]] = []
        for index, returned in _each_row(call, piece, setting):
            check_row(call, returned, made, numbers[index : index + 1])
            made.append(returned)
        return Applied(rows_of_dicts(call, made, numbers, piece.rows))


@dataclass(frozen=True, eq=False)
class FlatMap(_WithFunction):
    """Each row, a dict, becomes the dicts that the function returns: none, one or more."""

    verb: ClassVar[str] = "flat_map"

    @property
    def keeps_count(self) -> bool:
        return False

    def _applied(self, call: Call, piece: Piece, setting: Setting) -> Applied:
        numbers = piece.rows.numbers
        made: list[Mapping[str, Any]] = []
        counts = np.zeros(len(piece.rows), np.int64)
        for index, returned in _each_row(call, piece, setting):
            row = numbers[index : index + 1]
            if isinstance(returned, (Mapping, str, bytes)) or not isinstance(returned, Iterable):
                raise call.returned(f"it returned {kind_of(returned)}, and must return a list of dicts", row)
            for one in drawn(call, returned, row):
                check_row(call, one, made, row)
                made.append(one)
                counts[index] += 1
        return Applied(rows_of_dicts(call, made, np.repeat(numbers, counts), piece.rows), counts)


@dataclass(frozen=True, eq=False)
class FilterRows(_WithFunction):
    """Rows stay for which the function returns something true."""

    verb: ClassVar[str] = "filter"

    @property
    def keeps_count(self) -> bool:
        return False

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return columns

    def _applied(self, call: Call, piece: Piece, setting: Setting) -> Applied:
        stays = np.zeros(len(piece.rows), bool)
        for index, returned in _each_row(call, piece, setting):
            try:
                stays[index] = bool(returned)
            except Exception:
                problem = f"it returned {kind_of(returned)}, which is neither true nor false"
                raise call.returned(problem, piece.rows.numbers[index : index + 1]) from None
        return _kept(piece.rows, stays)


@dataclass(frozen=True, eq=False)
class MapBatches(_WithFunction):
    """Batches of neighbours become the batches that the function returns, or yields."""

    batch_size: int = BATCH_SIZE
    #: What the function is given; it may return any of them.
    batch_format: str = "numpy"
    #: Whether it may return another number of rows than it was given: Ray Data's ``udf_modifying_row_count``.
    changes_count: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            isinstance(self.batch_size, bool)
            or not isinstance(self.batch_size, (int, np.integer))
            or self.batch_size < 1
        ):
            raise ConfigError(
                f"{self.name}: batch_size is {self.batch_size!r}, and must be a number of rows, 1 or more."
            )
        if self.batch_format not in _FORMATS:
            raise ConfigError(
                f"{self.name}: batch_format is {self.batch_format!r}, and must be one of {quoted(_FORMATS)}."
            )

    verb: ClassVar[str] = "map_batches"

    @property
    def keeps_count(self) -> bool:
        return not self.changes_count

    def _applied(self, call: Call, piece: Piece, setting: Setting) -> Applied:
        from powertrain.data.rows.gather import concat_rows

        numbers = piece.rows.numbers
        batch = _as_batch(piece.rows, self.batch_format)
        returned = call(batch, setting, numbers, piece.copy(0))
        batches = list(drawn(call, returned, numbers)) if isinstance(returned, Iterator) else [returned]
        lengths = [length_of_batch(call, made, numbers) for made in batches]
        count = sum(lengths)
        if count == len(numbers):
            counts, made_numbers = None, numbers
        elif self.changes_count:
            counts = np.diff(np.arange(len(numbers) + 1) * count // len(numbers))
            made_numbers = np.repeat(numbers, counts)
        else:
            raise call.returned(
                f"it returned {count} rows for {len(numbers)}, although it was said not to change their number",
                numbers,
            )
        ends = np.cumsum([0, *lengths])
        made_rows = [
            from_batch(call, made, made_numbers[start:end], numbers)
            for made, start, end in zip(batches, ends[:-1].tolist(), ends[1:].tolist(), strict=True)
            if end > start
        ]
        return Applied(
            concat_rows(made_rows) if len(made_rows) > 1 else (made_rows or [no_rows()])[0], counts
        )


def _each_row(call: Call, piece: Piece, setting: Setting) -> Iterator[tuple[int, Any]]:
    """What the function returns for each row, with the row's place."""
    from powertrain.data.rows.formats import row_dicts

    numbers = piece.rows.numbers
    for index, row in enumerate(row_dicts(piece.rows)):
        yield index, call(row, setting, numbers[index : index + 1], piece.copy(index))


def _as_batch(rows: Rows, batch_format: str) -> Any:
    from powertrain.data.rows import formats

    return {"numpy": formats.to_numpy, "pandas": formats.to_pandas, "pyarrow": formats.to_arrow}[
        batch_format
    ](rows)


def _kept(rows: Rows, stays: Any) -> Applied:
    from powertrain.data.rows.gather import take_rows

    if stays.all():
        return Applied(rows)
    return Applied(take_rows(rows, np.flatnonzero(stays)), stays.astype(np.int64))


# --------------------------------------------------------------------------- columns


@dataclass(frozen=True)
class FilterExpression(Operation):
    """Rows stay for which an Arrow expression holds; a null counts as false."""

    expression: pc.Expression

    @property
    def name(self) -> str:
        return f"filter({shortened(str(self.expression), 200)})"

    @property
    def keeps_count(self) -> bool:
        return False

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return columns

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: Piece, setting: Setting) -> Applied:
        import pyarrow as pa

        from powertrain.data.rows.formats import to_arrow
        from powertrain.data.sources.filtered import mask_of

        rows, text = piece.rows, str(self.expression)
        # A column that the expression uses is named in its text. The others, images perhaps, need not be converted.
        used = {name: column for name, column in rows.columns.items() if name in text}
        table = to_arrow(rows.with_columns(used or rows.columns))
        try:
            stays = mask_of(self.expression, table.combine_chunks().to_batches()[0])
        except (pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.name} cannot be computed: {error}. The columns are {quoted(rows.columns)}."
            ) from error
        return _kept(rows, stays)


@dataclass(frozen=True)
class SelectColumns(Operation):
    """Only these columns, in this order."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"select_columns({quoted(self.columns)})"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return {name: columns[name] for name in self.columns if name in columns}

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: Piece, setting: Setting) -> Applied:
        there = piece.rows.columns
        check_columns(self.name, self.columns, there)
        return Applied(piece.rows.with_columns({name: there[name] for name in self.columns}))


@dataclass(frozen=True)
class DropColumns(Operation):
    """All but these columns."""

    columns: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"drop_columns({quoted(self.columns)})"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return _without(columns, self.columns)

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: Piece, setting: Setting) -> Applied:
        there = piece.rows.columns
        check_columns(self.name, self.columns, there)
        return Applied(
            piece.rows.with_columns({name: there[name] for name in there if name not in self.columns})
        )


@dataclass(frozen=True, eq=False)
class RenameColumns(Operation):
    """Columns under other names, in the same order: a mapping of old to new, or the new names of all."""

    names: Mapping[str, str] | Sequence[str]

    @property
    def name(self) -> str:
        return "rename_columns"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        names = self.names
        if isinstance(names, Mapping):
            return {names.get(name, name): stored for name, stored in columns.items()}
        # Where some columns hold something else than what is stored, it is not known which place each has.
        return dict(zip(names, columns.values(), strict=True)) if len(names) == len(columns) else {}

    def begin(self) -> Apply:
        return self._applied

    def _applied(self, piece: Piece, setting: Setting) -> Applied:
        rows = piece.rows
        names = renamed(list(rows.columns), self.names)
        new_name = dict(zip(rows.columns, names, strict=True))
        return Applied(
            Rows(
                dict(zip(names, rows.columns.values(), strict=True)),
                rows.numbers,
                python_floats=frozenset(new_name[name] for name in rows.python_floats),
                lists=frozenset(new_name[name] for name in rows.lists),
            )
        )


def renamed(columns: Sequence[str], names: Mapping[str, str] | Sequence[str]) -> list[str]:
    """The new names of ``columns``. Raises :class:`DataError` unless each gets one of its own."""
    if isinstance(names, Mapping):
        check_columns("rename_columns", names, columns)
        new = [names.get(name, name) for name in columns]
    elif len(names) == len(columns):
        new = list(names)
    else:
        raise DataError(
            f"rename_columns was given {len(names)} names ({quoted(names)}) for {len(columns)} columns "
            f"({quoted(columns)}). Give one for each, or a dict of old to new names."
        )
    twice = sorted({name for name in new if new.count(name) > 1})
    if twice:
        raise DataError(f"rename_columns would give two columns the name {twice[0]!r}: {quoted(new)}.")
    return new


def _without(columns: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: stored for name, stored in columns.items() if name not in set(names)}


def check_columns(operation: str, wanted: Iterable[str], there: Iterable[str]) -> None:
    """Raise :class:`DataError` unless all ``wanted`` columns are there."""
    there = list(there)
    for name in wanted:
        if name not in there:
            near = difflib.get_close_matches(str(name)[:200], there, n=1)
            meant = f" Did you mean {near[0]!r}?" if near else ""
            raise DataError(
                f"{operation}: there is no column {shown(name)}; the columns are {quoted(there)}.{meant}"
            )


@dataclass(frozen=True)
class DecodeImages(Operation):
    """Columns of encoded images become arrays of pixels: (height, width, channels), or (height, width)."""

    columns: tuple[str, ...]
    #: (height, width) to scale every image to.
    size: tuple[int, int] | None = None
    #: Pillow's: "RGB", "L", …
    mode: str | None = None
    #: By column the pixels that this node has already. Only in a process that reads: it does not travel.
    kept: Mapping[str, KeptImages] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        from powertrain.data.operations.images import checked_mode, checked_size

        checked_mode(self.mode)
        checked_size(self.size)

    @property
    def name(self) -> str:
        return f"decoding images of {quoted(self.columns)}"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return _without(columns, self.columns)

    def begin(self) -> Apply:
        from powertrain.data.operations.images import require_pillow

        require_pillow()
        return self._applied

    def _applied(self, piece: Piece, setting: Setting) -> Applied:
        from powertrain.data.operations.images import BadImage, decode_column

        columns, numbers = dict(piece.rows.columns), piece.rows.numbers
        check_columns(self.name, self.columns, columns)
        for name in self.columns:
            kept = self.kept[name].of_rows(numbers) if name in self.kept else None
            try:
                columns[name] = decode_column(columns[name], self.size, self.mode, setting.over, kept)
            except BadImage as error:
                raise FunctionFailed(
                    f"the image in column {name!r} cannot be decoded: {error.problem}",
                    int(numbers[error.index]),
                    1,
                    error=error.__cause__,
                ) from error
        return Applied(piece.rows.with_columns(columns))


# --------------------------------------------------------------------------- doing it


def decoding_of(schema: pa.Schema) -> list[DecodeImages]:
    """What decodes the columns that hold encoded images by their mark: see ``sources.base.IMAGES``."""
    wishes: dict[tuple[tuple[int, int] | None, str | None], list[str]] = {}
    for field_ in schema:
        mark = (field_.metadata or {}).get(IMAGES)
        if mark is not None:
            wish = json.loads(mark)
            size = tuple(wish["size"]) if wish.get("size") else None
            wishes.setdefault((size, wish.get("mode")), []).append(field_.name)
    return [DecodeImages(tuple(columns), size, mode) for (size, mode), columns in wishes.items()]


def keeping_pixels(
    operations: Iterable[Operation], columns: Iterable[str], keep: Callable[[KeptColumn], KeptImages]
) -> list[Operation]:
    """The same operations, where images that are in the data as they are stored are decoded once and then ``keep``
    has them. ``columns`` are those of the source."""
    from powertrain.data.loading.pixels import KeptColumn

    stored: Mapping[str, str] = {name: name for name in columns}
    done: list[Operation] = []
    for operation in operations:
        if isinstance(operation, DecodeImages):
            kept = {
                name: keep(KeptColumn(stored[name], operation.size, operation.mode))
                for name in operation.columns
                if name in stored
            }
            done.append(replace(operation, kept=kept))
        else:
            done.append(operation)
        stored = operation.stored(stored)
    return done


class Runner:
    """Does operations to rows, one after the other. Any thread may ask; several do.

    ``name_row`` says where a row is, for messages. ``local_world_size`` ranks share the processes of a node;
    ``threads`` is how many threads images are decoded on. Nothing is started before it is needed.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        *,
        seed: int,
        name_row: Callable[[int], str],
        local_world_size: int = 1,
        threads: int = 1,
    ) -> None:
        self._seed, self._name_row = seed, name_row
        self._threads = Threads(threads)
        self._stages = [
            Stage(operation, position, max(1, operation.concurrency // max(1, local_world_size)))
            for position, operation in enumerate(operations)
        ]

    @property
    def processes(self) -> int:
        """How many processes of its own work for it at once, at most."""
        return max((stage.processes for stage in self._stages), default=0)

    @property
    def keeps_threads_busy(self) -> bool:
        """True where all it does is spread over its threads already: asking from several threads would not help."""
        return all(isinstance(stage.operation, DecodeImages) for stage in self._stages)

    @property
    def does_anything(self) -> bool:
        """False where rows come out as they go in."""
        return bool(self._stages)

    @property
    def batch_size(self) -> int | None:
        """Rows must be given in whole neighbourhoods of this many: see ``EpochOrder.chunk``; None for any rows."""
        sizes = [s.operation.batch_size for s in self._stages if s.operation.batch_size is not None]
        return max(sizes, default=None)

    @property
    def seconds(self) -> list[tuple[str, float]]:
        """Name of each operation, and how long it has taken so far, over all threads."""
        return [(stage.operation.name, stage.seconds) for stage in self._stages]

    def run(self, rows: Rows, epoch: int) -> Applied:
        """``rows`` after all operations. Raises :class:`DataError`.

        Where no row is left the rest of the operations is not done, and the columns are those up to there.
        """
        count = len(rows)
        origin: Ints | None = None
        for stage in self._stages:
            if len(rows) == 0:
                break
            setting = Setting(self._seed, epoch, stage.position, over=self._threads.map)
            applied = self._blamed(stage, rows, setting)
            rows = applied.rows
            if applied.counts is not None:
                origin = np.repeat(np.arange(count) if origin is None else origin, applied.counts)
        if origin is None:
            return Applied(rows)
        counts = np.bincount(origin, minlength=count).astype(np.int64)
        return Applied(rows, None if (counts == 1).all() else counts)

    def close(self) -> None:
        """End processes and threads. Calls that are under way raise :class:`DataError`."""
        for stage in self._stages:
            stage.close()
        self._threads.close()

    def _blamed(self, stage: Stage, rows: Rows, setting: Setting) -> Applied:
        from powertrain.data.operations.pool import PoolClosed

        try:
            return stage.run(rows, setting)
        except FunctionFailed as failure:
            cause = failure.error or failure.__cause__
            if failure.error is not None and failure.error.__traceback__ is None:
                # It came from another process, and its traceback with it, as text.
                failure.error.__cause__ = failure.__cause__
            raise DataError(failure.sentence(stage.operation.name, self._name_row)) from cause
        except PoolClosed as error:
            raise DataError(
                f"{stage.operation.name} was given up: the data that it works for was closed."
            ) from error
