"""A rank's decoded blocks: mapped from the node's cache or kept in memory, decoded ahead on threads."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import pyarrow as pa

from powertrain.data.loading.cache_files import (
    Batches,
    CacheDirectory,
    GivenUp,
    Making,
    NoRoom,
    sweep,
    this_boot,
)
from powertrain.data.sources.base import Source, SourceFacts
from powertrain.errors import DataError
from powertrain.text.loggers import module_logger

__all__ = ["BlockStore", "Counters", "sweep"]

_logger = module_logger(__name__)
#: (part, block of its source).
Key = tuple[int, int]
#: Version of the cached files' format; a process never reads files of another version.
_FORM = 1
#: A source yields larger blocks than this in several batches, which bounds the memory in use at a time.
_LARGEST_BATCH = 64 * 2**20
#: Decoding takes this many times the bytes of the result (measured): the input, the output, and its room to grow.
_DECODING_TAKES = 4
#: Arrow's allocator keeps freed memory until it is released explicitly: after every so many decoded bytes.
_RELEASE_BYTES = 64 * 2**20
#: Prefetched blocks that were never opened are released beyond this many: a loop may leave an epoch early.
_MOST_UNOPENED = 256


@dataclass
class Counters:
    """Counters of a store's work. Readable at any time, from any thread."""

    #: Number of times that this process decoded each (part, block).
    decoded: Counter[Key] = field(default_factory=Counter)
    #: Blocks found in the node's cache instead of being decoded.
    hits: int = 0
    #: Decoded bytes.
    bytes: int = 0


@dataclass(frozen=True)
class _Part:
    """One source of the store."""

    source: Source
    columns: Sequence[str] | None
    facts: SourceFacts
    #: Identical for the same rows and columns in every process of this boot of the machine.
    identity: str

    @classmethod
    def of(cls, source: Source, columns: Sequence[str] | None) -> _Part:
        facts = source.inspect()
        digest = hashlib.blake2b(digest_size=16)
        what = (_FORM, this_boot(), type(source).__qualname__, source.cache_key, columns and list(columns))
        digest.update(repr(what).encode())
        digest.update(facts.schema.serialize())
        return cls(source, columns, facts, digest.hexdigest())

    @property
    def is_cached(self) -> bool:
        return not (self.source.in_memory or self.source.cheap_to_decode)

    def file_name(self, block: int) -> str:
        return f"{self.identity}-{block}"

    def rows(self, block: int) -> int:
        return self.facts.blocks[block].rows

    def decoding_bytes(self, block: int) -> int:
        """Return the approximate memory that decoding a block takes."""
        return _DECODING_TAKES * min(self.facts.blocks[block].nbytes, _LARGEST_BATCH)


class BlockStore:
    """Decoded blocks for one rank. Any thread may use it.

    A block is held from :meth:`open` (or from being prefetched) to :meth:`release`. Blocks in files are mapped and take
    no memory of this process; blocks that do not fit into files stay in memory within ``memory_bytes``, least recently
    used evicted first, and are decoded again on the next :meth:`open` after an eviction. Concurrent decoding takes at
    most half of ``memory_bytes``, but always one block; blocks awaited by a reader come before prefetched ones.
    """

    def __init__(
        self,
        parts: Sequence[Source],
        columns: Sequence[Sequence[str] | None],
        *,
        directory: str,
        disk_bytes: int,
        memory_bytes: int,
        threads: int,
        warn: Callable[[str], None] = _logger.warning,
    ) -> None:
        """``directory`` is shared by all present and later processes of the node that read the same data; with
        ``disk_bytes=0`` it is not touched. ``warn`` is called once when blocks have to stay in memory for lack of disk.
        """
        self._parts = [_Part.of(source, names) for source, names in zip(parts, columns, strict=True)]
        self._cache = CacheDirectory(directory, disk_bytes) if disk_bytes > 0 else None
        self._memory = _Memory(memory_bytes)
        self._warn = warn
        self._warned = False
        self.counters = Counters()
        self._most_threads = threads
        self._threads: list[threading.Thread] = []
        #: Guards the attributes below, and is notified of each change.
        self._changed = threading.Condition()
        self._held: dict[Key, Future[Batches]] = {}
        #: Prefetched blocks that were not opened yet, oldest first.
        self._unopened: OrderedDict[Key, None] = OrderedDict()
        self._wishes: deque[Key] = deque()
        self._wanted: frozenset[Key] = frozenset()
        #: Memory taken by each block being decoded, and the blocks that wait for memory.
        self._decoding: list[int] = []
        self._waiting: list[Key] = []
        self._closed = False
        #: Decoded bytes at the last release of memory.
        self._given_back = 0

    @property
    def directory(self) -> CacheDirectory | None:
        """The directory of the files; None where files are not allowed."""
        return self._cache

    def identity(self, part: int) -> str:
        """Return a key that is identical for the same rows of a part in every process of this boot of the machine."""
        return self._parts[part].identity

    def open(self, part: int, block: int) -> Batches:
        """Return the batches of a block, in order. Waits while another thread decodes it, else decodes it on this
        one."""
        key = (part, block)
        with self._changed:
            if self._closed:
                raise _closed()
            future = self._held.get(key)
            begun = future is not None
            if future is None:
                future = self._begin(key)
                if key in self._wishes:
                    self._wishes.remove(key)
            self._unopened.pop(key, None)
            self._memory.touch(key)
            self._changed.notify_all()
        if not begun:
            self._fill(key, future)
        return future.result()

    def prefetch(self, wanted: Sequence[Key]) -> None:
        """Prefetch these blocks on the store's threads, in this order. Replaces all earlier requests that have not
        begun yet."""
        with self._changed:
            if self._closed:
                raise _closed()
            self._wanted = frozenset(wanted)
            self._wishes = deque(key for key in dict.fromkeys(wanted) if key not in self._held)
            for key in reversed(wanted):
                self._memory.touch(key)
            while len(self._threads) < min(self._most_threads, len(self._wishes)):
                name = f"powertrain-decode-{len(self._threads)}"
                thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify_all()

    def release(self, part: int, block: int) -> None:
        """Release a block that is not needed soon. Its file stays if there is room for it."""
        with self._changed:
            self._drop((part, block))
        if self._cache is not None and self._parts[part].is_cached:
            self._cache.release(self._parts[part].file_name(block))

    def evicted(self, keys: Sequence[Key]) -> list[Key]:
        """Return the blocks among ``keys`` that were evicted from memory since they were opened."""
        with self._changed:
            if not self._memory.has_refused:
                return []
            return [key for key in keys if key not in self._held]

    def close(self) -> None:
        """Release all blocks and end the threads after their current batch. Files stay."""
        with self._changed:
            self._closed = True
            self._wishes.clear()
            self._held.clear()
            self._unopened.clear()
            self._memory.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- held blocks: called with self._changed held

    def _begin(self, key: Key) -> Future[Batches]:
        future: Future[Batches] = Future()
        self._held[key] = future
        return future

    def _drop(self, key: Key) -> None:
        self._held.pop(key, None)
        self._unopened.pop(key, None)
        self._memory.remove(key)
        self._changed.notify_all()

    def _keep(self, key: Key, future: Future[Batches], nbytes: int) -> None:
        """Hold a block that takes ``nbytes`` of memory, unless it was released while it was decoded."""
        if self._held.get(key) is not future:
            return
        if nbytes:
            for old in self._memory.add(key, nbytes, self._unopened):
                self._drop(old)
        while len(self._unopened) > _MOST_UNOPENED:
            self._drop(next(iter(self._unopened)))

    def _can_prefetch(self) -> bool:
        """Return whether a prefetch may begin: not if it would evict blocks prefetched before it."""
        waiting = sum(self._memory.size_of(key) for key in self._unopened if key in self._wanted)
        return bool(self._wishes) and waiting <= self._memory.most // 2

    # -- decoding

    def _work(self) -> None:
        """Decode requested blocks until the store is closed; the main function of its threads."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._can_prefetch())
                if self._closed:
                    return
                key = self._wishes.popleft()
                future = self._begin(key)
                self._unopened[key] = None
            self._fill(key, future)
            del future  # or the block would be held until the next request

    def _fill(self, key: Key, future: Future[Batches]) -> None:
        """Decode a block, or find it decoded. An error is raised to the present waiters only; a later call retries."""
        try:
            batches, nbytes = self._load(key)
        except BaseException as error:
            with self._changed:
                if self._held.get(key) is future:
                    self._drop(key)
            future.set_exception(_closed() if isinstance(error, GivenUp) else error)
            return
        with self._changed:
            self._keep(key, future, nbytes)
        future.set_result(batches)

    def _load(self, key: Key) -> tuple[Batches, int]:
        """Return the batches of a block and the memory that they take: none where they are mapped."""
        part, block = self._parts[key[0]], key[1]
        if not part.is_cached:
            return _collected(self._read(key))
        if self._cache is None or not part.rows(block):
            return self._into_memory(key)
        try:
            found = self._cache.find_or_begin(part.file_name(block), part.rows(block), lambda: self._closed)
        except NoRoom as reason:
            self._warn_of_full_disk(reason)
            return self._into_memory(key)
        if isinstance(found, Making):
            return self._into_file(key, found)
        with self._changed:
            self.counters.hits += 1
        return found, 0

    def _into_memory(self, key: Key) -> tuple[Batches, int]:
        with self._reserve_memory(key):
            return _collected(self._read(key))

    def _into_file(self, key: Key, making: Making) -> tuple[Batches, int]:
        with making, self._reserve_memory(key):
            batches = self._read(key)
            in_hand: list[pa.RecordBatch] = []
            try:
                for batch in batches:
                    in_hand = [batch]
                    making.append(batch)
                    in_hand = []
                    del batch  # frees memory for the next batch
                return making.finish(), 0
            except NoRoom as reason:
                self._warn_of_full_disk(reason)
                making.abandon()  # at once, for the processes that wait for it
                if making.batches:  # only present in the file
                    in_hand, batches = [], self._read(key)
                return _collected(chain(in_hand, batches))
            finally:
                self._give_memory_back()

    def _give_memory_back(self) -> None:
        """Release the memory freed by decoding. Not after every block, which would fault it in again each time."""
        with self._changed:
            if self.counters.bytes - self._given_back < _RELEASE_BYTES:
                return
            self._given_back = self.counters.bytes
        pa.default_memory_pool().release_unused()

    @contextmanager
    def _reserve_memory(self, key: Key) -> Iterator[None]:
        """Wait until there is memory to decode a block. A thread that got its memory never waits for another
        process."""
        takes = self._parts[key[0]].decoding_bytes(key[1])
        with self._changed:
            self._waiting.append(key)
            try:
                self._changed.wait_for(lambda: self._closed or self._has_memory_for(key, takes))
            finally:
                self._waiting.remove(key)
            self._decoding.append(takes)
        try:
            yield
        finally:
            with self._changed:
                self._decoding.remove(takes)
                self._changed.notify_all()

    def _has_memory_for(self, key: Key, takes: int) -> bool:
        if self._decoding and sum(self._decoding) + takes > self._memory.most // 2:
            return False
        return key not in self._unopened or all(other in self._unopened for other in self._waiting)

    def _read(self, key: Key) -> Iterator[pa.RecordBatch]:
        """Yield the batches of a block from its source.

        Raises:
            DataError: The rows differ from those inspected.
        """
        part, block = self._parts[key[0]], key[1]
        with self._changed:
            self.counters.decoded[key] += 1
        rows = 0
        for batch in part.source.read(block, part.columns):
            rows += batch.num_rows
            with self._changed:
                self.counters.bytes += batch.nbytes
                if self._closed:
                    raise GivenUp
            yield batch
            del batch
        if rows != part.rows(block):
            raise DataError(
                f"The data has changed while it was in use: there are {rows} rows in the block that begins with "
                f"{part.source.name_row(block, 0)}, and there were {part.rows(block)} when the dataset was inspected. "
                "Do not write to files that are being read, and start again."
            )

    def _warn_of_full_disk(self, reason: NoRoom) -> None:
        with self._changed:
            was_warned, self._warned = self._warned, True
        if not was_warned:
            self._warn(
                f"Decoded data cannot all be cached on disk: {reason}. Blocks without room are kept in memory (up to "
                f"{self._memory.most / 1e6:.0f} MB) and are decoded again when they are needed again, which is slower. "
                "Free disk space, or give DataConfig another cache_dir or larger cache_bytes."
            )


def _collected(batches: Iterable[pa.RecordBatch]) -> tuple[Batches, int]:
    kept = tuple(batches)
    return kept, sum(batch.nbytes for batch in kept)


class _Memory:
    """The blocks kept in memory, and the order of their eviction."""

    def __init__(self, most: int) -> None:
        self.most = most
        #: True after the first eviction.
        self.has_refused = False
        self._sizes: OrderedDict[Key, int] = OrderedDict()

    def size_of(self, key: Key) -> int:
        return self._sizes.get(key, 0)

    def touch(self, key: Key) -> None:
        """Mark a block as used: others are evicted first."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: Key) -> None:
        self._sizes.pop(key, None)

    def clear(self) -> None:
        self._sizes.clear()

    def add(self, key: Key, nbytes: int, spared: OrderedDict[Key, None]) -> list[Key]:
        """Add a block and return the blocks evicted for it: least recently used first, ``spared`` ones last."""
        self._sizes[key] = nbytes
        self._sizes.move_to_end(key)
        others = [old for old in self._sizes if old != key]
        surplus, gone = sum(self._sizes.values()) - self.most, []
        for old in sorted(others, key=lambda old: old in spared):  # sorting keeps the order of use
            if surplus <= 0:
                break
            surplus -= self._sizes[old]
            gone.append(old)
        self.has_refused |= bool(gone)
        return gone


def _closed() -> RuntimeError:
    return RuntimeError(
        "The store of decoded blocks is closed: no block can be opened any more. Make a new loader."
    )
