"""Statistics of reading a dataset."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from powertrain.data.loading.loader import Loader
    from powertrain.data.rows.rows import Rows


class Execution:
    """One reading of a dataset: its progress, and where the time went."""

    def __init__(self, name: str, blocks: int) -> None:
        self.name, self.blocks = name, blocks
        self.rows = self.nbytes = 0
        #: Seconds since the beginning, and the share of them spent waiting for rows.
        self.seconds = self.waited = 0.0
        self.is_whole = False
        self.decoded = self.hits = self.decoded_bytes = 0
        self.images_decoded = self.images_found = 0
        #: Seconds of all threads together, by operation.
        self.operations: dict[str, float] = {}
        self._loader: Loader | None = None
        self.began = time.perf_counter()

    def count(self, rows: int, nbytes: int) -> None:
        """Record a batch that was handed out."""
        self.rows += rows
        self.nbytes += nbytes

    def observe(self, loader: Loader) -> None:
        """Take the statistics of this loader at the end."""
        self._loader = loader

    def watch(self, stream: Iterator[Rows]) -> Generator[Rows, None, None]:
        """Yield the same rows, counted."""
        start = time.perf_counter()
        try:
            while True:
                asked = time.perf_counter()
                rows = next(stream, None)
                self.waited += time.perf_counter() - asked
                if rows is None:
                    self.is_whole = True
                    return
                self.count(len(rows), rows.nbytes)
                yield rows
        finally:
            self.seconds = time.perf_counter() - start
            self._ask()
            self._loader = None  # it holds blocks
            stream.close()  # type: ignore[attr-defined]

    def _ask(self) -> None:
        """Update the statistics from the loader."""
        if self._loader is None:
            return
        counters = self._loader.store.counters
        self.decoded, self.hits = sum(counters.decoded.values()), counters.hits
        self.decoded_bytes = counters.bytes
        self.images_decoded, self.images_found = self._loader.images_decoded, self._loader.images_found
        self.operations = {}
        for runner in self._loader.runners:
            for name, seconds in runner.seconds:
                self.operations[name] = self.operations.get(name, 0.0) + seconds

    def text(self) -> str:
        """Return the statistics up to now as text."""
        self._ask()
        so_far = "" if self.is_whole else ", not read to its end"
        lines = [
            f"{self.name}: {self.rows:,} rows, {_size(self.nbytes)} in {self.seconds:.2f} s{so_far}",
            f"  blocks: {self.blocks:,}; decoded {self.decoded:,} ({_size(self.decoded_bytes)}), "
            f"from the cache {self.hits:,}",
            f"  waited for rows: {self.waited:.2f} s",
        ]
        if self.images_decoded or self.images_found:
            lines.append(f"  images: decoded {self.images_decoded:,}, from the cache {self.images_found:,}")
        lines += [f"  {name}: {seconds:.2f} s on all threads" for name, seconds in self.operations.items()]
        return "\n".join(lines)


def _size(nbytes: int) -> str:
    """Return bytes in a readable unit."""
    size = float(nbytes)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
