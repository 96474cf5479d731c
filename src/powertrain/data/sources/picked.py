"""Some rows of another source, after a limit or a split, as a source of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from powertrain.data.plan.plan import Block
from powertrain.data.sources.base import BlockFacts, Source, SourceFacts
from powertrain.data.sources.remembering import RememberingSource

if TYPE_CHECKING:
    import pyarrow as pa


class PickedSource(RememberingSource):
    """The rows of ``blocks``, stretches of blocks of ``inner``, each a block here.

    Later steps may then count or filter rows without regard to the selection. A giant block that was cut into many is
    read from its beginning for each of them.
    """

    def __init__(self, inner: Source, blocks: Sequence[Block]) -> None:
        super().__init__()
        self._inner, self._blocks = inner, tuple(blocks)
        self.in_memory, self.cheap_to_decode = inner.in_memory, inner.cheap_to_decode

    def _inspect_data(self) -> SourceFacts:
        facts = self._inner.inspect()
        found = []
        for block in self._blocks:
            whole = facts.blocks[block.index]
            found.append(BlockFacts(block.rows, whole.nbytes * block.rows // max(whole.rows, 1)))
        picked = "".join(f"/{block.index}:{block.start}:{block.rows}" for block in self._blocks).encode()
        return facts.derived(
            lambda inner: hashlib.blake2b(inner.encode() + picked, digest_size=16).hexdigest(),
            blocks=tuple(found),
        )

    def read(self, block: int, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
        wanted = self._blocks[block]
        first, stop = 0, wanted.start + wanted.rows
        for batch in self._inner.read(wanted.index, columns):
            low, high = max(wanted.start - first, 0), min(stop - first, batch.num_rows)
            if low < high:
                yield batch.slice(low, high - low)
            first += batch.num_rows
            if first >= stop:
                return

    @property
    def cache_key(self) -> str:
        return f"{self.inspect().fingerprint}/{self._inner.cache_key}"

    def name_row(self, block: int, row: int) -> str:
        wanted = self._blocks[block]
        return self._inner.name_row(wanted.index, wanted.start + row)

    def select(self, columns: Sequence[str]) -> Source | None:
        inner = self._inner.select(columns)
        return None if inner is None else PickedSource(inner, self._blocks)

    def publish(self, directory: str) -> Source:
        return PickedSource(self._inner.publish(directory), self._blocks)
