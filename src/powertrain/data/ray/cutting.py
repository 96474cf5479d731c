"""Cut a stream of Ray blocks into batches, with rows mixed across a buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from powertrain.data.rows.rows import Rows

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa


T = TypeVar("T")


def cut_rows(
    pieces: Iterable[Rows],
    size: int,
    *,
    keeps_rest: bool = True,
    window: int = 0,
    random: np.random.Generator | None = None,
) -> Iterator[Rows]:
    """Yield the same rows in batches of ``size``, then one of the rest if ``keeps_rest``.

    With ``random`` each batch is drawn from at least ``window`` rows more than it has, as long as there are as many.
    """
    held: list[Rows] = []
    # Half a window more is awaited before rows are drawn again, which limits the moves of each row.
    enough = size + window + window // 2
    for piece in pieces:
        held.append(piece)
        count = sum(map(len, held))
        if count >= enough:
            batches = (count - window) // size
            whole = _mixed(held, random)
            yield from (whole.between(at * size, (at + 1) * size) for at in range(batches))
            held = [whole.between(batches * size, count)]
    count = sum(map(len, held))
    if count:
        whole = _mixed(held, random)
        ends = range(size, count + 1, size) if count >= size else range(0)
        yield from (whole.between(end - size, end) for end in ends)
        if count % size and keeps_rest:
            yield whole.between(count - count % size, count)


def _mixed(held: list[Rows], random: np.random.Generator | None) -> Rows:
    from powertrain.data.rows.gather import concat_rows, take_rows

    whole = concat_rows(held) if len(held) > 1 else held[0]
    return whole if random is None else take_rows(whole, random.permutation(len(whole)))


def _numbered(tables: Iterable[pa.Table]) -> Iterator[Rows]:
    """Yield rows, numbered in the order of arrival: errors name them so."""
    import numpy as np

    from powertrain.data.rows.formats import from_arrow

    first = 0
    for table in tables:
        if table.num_rows:
            yield from_arrow(table, np.arange(first, first + table.num_rows))
            first += table.num_rows


@dataclass(frozen=True)
class StreamCut(Generic[T]):
    """How an epoch is cut into batches, and how each is converted."""

    #: Rows of this rank's batches.
    rows: int
    keeps_rest: bool
    convert: Callable[[Rows], T]
    #: Number of prefetched batches; 0 makes each batch on request.
    prefetch: int
    #: Rows beyond a batch that it is drawn from; None where rows stay in Ray's order.
    window: int | None = None
    seed: int | None = None

    def batches(self, tables: Iterable[pa.Table], epoch: int) -> Iterator[Rows]:
        import numpy as np

        random = None
        if self.window is not None:
            random = np.random.default_rng(None if self.seed is None else [self.seed, epoch])
        window = self.window or 0
        return cut_rows(
            _numbered(tables), self.rows, keeps_rest=self.keeps_rest, window=window, random=random
        )
