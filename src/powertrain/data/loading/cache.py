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
#: Changes with the form of the cached files, so that no version reads those of another.
_FORM = 1
#: A source gives larger blocks than this in several batches, so that no more has to be in memory at a time.
_LARGEST_BATCH = 64 * 2**20
#: Decoding takes this many times the bytes of the result (m): what was read, what comes of it, and its room to grow.
_DECODING_TAKES = 4
#: Arrow's allocator keeps what was freed until it is told; it is, whenever so many bytes were decoded.
_GIVE_BACK_EVERY = 64 * 2**20
#: Blocks that were decoded ahead and never asked for are let go of beyond this many: a loop may leave an epoch early.
_MOST_UNOPENED = 256


@dataclass
class Counters:
    """What a store has done. Read at any time, from any thread."""

    #: How often each (part, block) was decoded by this process.
    decoded: Counter[Key] = field(default_factory=Counter)
    #: Blocks that were found in the node's cache instead.
    hits: int = 0
    #: Bytes that were decoded.
    bytes: int = 0


@dataclass(frozen=True)
class _Part:
    """One source, as the store sees it."""

    source: Source
    columns: Sequence[str] | None
    facts: SourceFacts
    #: The same for the same rows and columns, in any process that this boot of the machine starts.
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
        """About how much memory it takes to decode a block."""
        return _DECODING_TAKES * min(self.facts.blocks[block].nbytes, _LARGEST_BATCH)


class BlockStore:
    """Decoded blocks for one rank. Any thread may use it.

    A block is held from :meth:`open` (or from being decoded ahead) to :meth:`release`. Blocks in files are mapped and
    take no memory of this process's own; blocks that could not be put into files are kept within ``memory_bytes``,
    those used last, and are decoded again when they are asked for after they had to go. So many blocks are decoded at
    once as take half of ``memory_bytes``, at least one; those that somebody waits for come before those decoded ahead.
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
        """``directory`` is shared by all processes of the node that read the same data, now and later; with
        ``disk_bytes=0`` it is not touched. ``warn`` is told, once, when blocks have to stay in memory for want of disk.
        """
        self._parts = [_Part.of(source, names) for source, names in zip(parts, columns, strict=True)]
        self._cache = CacheDirectory(directory, disk_bytes) if disk_bytes > 0 else None
        self._memory = _Memory(memory_bytes)
        self._warn = warn
        self._warned = False
        self.counters = Counters()
        self._most_threads = threads
        self._threads: list[threading.Thread] = []
        #: Guards all that follows, and is told when any of it changes.
        self._changed = threading.Condition()
        self._held: dict[Key, Future[Batches]] = {}
        #: Blocks decoded ahead that nobody has opened yet, those that were begun first before the others.
        self._unopened: OrderedDict[Key, None] = OrderedDict()
        self._wishes: deque[Key] = deque()
        self._wanted: frozenset[Key] = frozenset()
        #: The memory that each block takes which is being decoded, and the blocks that wait for their turn.
        self._decoding: list[int] = []
        self._waiting: list[Key] = []
        self._closed = False
        #: Of the decoded bytes, those after which memory was given back last.
        self._given_back = 0

    @property
    def directory(self) -> CacheDirectory | None:
        """Where files are kept; None where they may not be."""
        return self._cache

    def identity(self, part: int) -> str:
        """The same for the same rows of a part, in any process that this boot of the machine starts."""
        return self._parts[part].identity

    def open(self, part: int, block: int) -> Batches:
        """The batches of a block, in order. Waits until it is decoded; decodes it on this thread where nobody does."""
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

    def ahead(self, wanted: Sequence[Key]) -> None:
        """Begin to decode these blocks on the store's threads, the first one first. Replaces all earlier wishes that
        are not begun yet."""
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
        """Let go of a block that will not be needed soon. Its file stays, if there is room for it."""
        with self._changed:
            self._drop((part, block))
        if self._cache is not None and self._parts[part].is_cached:
            self._cache.let_go(self._parts[part].file_name(block))

    def gone(self, keys: Sequence[Key]) -> list[Key]:
        """Those of the blocks that had to leave memory for others since they were opened."""
        with self._changed:
            if not self._memory.has_refused:
                return []
            return [key for key in keys if key not in self._held]

    def close(self) -> None:
        """Let go of all blocks and end the threads, which finish the batch that they are at. Files stay."""
        with self._changed:
            self._closed = True
            self._wishes.clear()
            self._held.clear()
            self._unopened.clear()
            self._memory.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # -- which blocks are held: all of it with self._changed held

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
        """Hold a block that takes ``nbytes`` of memory, unless it was let go of while it was decoded."""
        if self._held.get(key) is not future:
            return
        if nbytes:
            for old in self._memory.add(key, nbytes, self._unopened):
                self._drop(old)
        while len(self._unopened) > _MOST_UNOPENED:
            self._drop(next(iter(self._unopened)))

    def _may_begin(self) -> bool:
        """Whether a wish may be begun: not where it would push out of memory what was decoded for the wishes before."""
        waiting = sum(self._memory.size_of(key) for key in self._unopened if key in self._wanted)
        return bool(self._wishes) and waiting <= self._memory.most // 2

    # -- decoding

    def _work(self) -> None:
        """The life of one of the store's threads."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._may_begin())
                if self._closed:
                    return
                key = self._wishes.popleft()
                future = self._begin(key)
                self._unopened[key] = None
            self._fill(key, future)
            del future  # or the block would be held until the next wish

    def _fill(self, key: Key, future: Future[Batches]) -> None:
        """Decode a block, or find it decoded. What goes wrong is told to who waits now; who comes later tries anew."""
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
        """The batches of a block and how many bytes of memory they take: none where they are mapped."""
        part, block = self._parts[key[0]], key[1]
        if not part.is_cached:
            return _collected(self._read(key))
        if self._cache is None or not part.rows(block):
            return self._into_memory(key)
        try:
            found = self._cache.find_or_begin(part.file_name(block), part.rows(block), lambda: self._closed)
        except NoRoom as reason:
            self._tell(reason)
            return self._into_memory(key)
        if isinstance(found, Making):
            return self._into_file(key, found)
        with self._changed:
            self.counters.hits += 1
        return found, 0

    def _into_memory(self, key: Key) -> tuple[Batches, int]:
        with self._turn(key):
            return _collected(self._read(key))

    def _into_file(self, key: Key, making: Making) -> tuple[Batches, int]:
        with making, self._turn(key):
            batches = self._read(key)
            in_hand: list[pa.RecordBatch] = []
            try:
                for batch in batches:
                    in_hand = [batch]
                    making.append(batch)
                    in_hand = []
                    del batch  # the source needs the room for the next one
                return making.finish(), 0
            except NoRoom as reason:
                self._tell(reason)
                making.abandon()  # at once, for those who wait for it
                if making.batches:  # they were in the file only
                    in_hand, batches = [], self._read(key)
                return _collected(chain(in_hand, batches))
            finally:
                self._give_memory_back()

    def _give_memory_back(self) -> None:
        """Let the allocator return what decoding has freed. Not after every block: each would fault it in again."""
        with self._changed:
            if self.counters.bytes - self._given_back < _GIVE_BACK_EVERY:
                return
            self._given_back = self.counters.bytes
        pa.default_memory_pool().release_unused()

    @contextmanager
    def _turn(self, key: Key) -> Iterator[None]:
        """Waits until there is memory to decode a block. Nobody who has a turn waits for another process."""
        takes = self._parts[key[0]].decoding_bytes(key[1])
        with self._changed:
            self._waiting.append(key)
            try:
                self._changed.wait_for(lambda: self._closed or self._is_turn_of(key, takes))
            finally:
                self._waiting.remove(key)
            self._decoding.append(takes)
        try:
            yield
        finally:
            with self._changed:
                self._decoding.remove(takes)
                self._changed.notify_all()

    def _is_turn_of(self, key: Key, takes: int) -> bool:
        if self._decoding and sum(self._decoding) + takes > self._memory.most // 2:
            return False
        return key not in self._unopened or all(other in self._unopened for other in self._waiting)

    def _read(self, key: Key) -> Iterator[pa.RecordBatch]:
        """The batches of a block as its source gives them. Raises DataError where they are not what was inspected."""
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

    def _tell(self, reason: NoRoom) -> None:
        with self._changed:
            told, self._warned = self._warned, True
        if not told:
            self._warn(
                f"Decoded data cannot all be cached on disk: {reason}. Blocks without room are kept in memory (up to "
                f"{self._memory.most / 1e6:.0f} MB) and are decoded again when they are needed again, which is slower. "
                "Free disk space, or give DataConfig another cache_dir or larger cache_bytes."
            )


def _collected(batches: Iterable[pa.RecordBatch]) -> tuple[Batches, int]:
    kept = tuple(batches)
    return kept, sum(batch.nbytes for batch in kept)


class _Memory:
    """Which blocks are kept in memory, and which have to go."""

    def __init__(self, most: int) -> None:
        self.most = most
        #: True once a block had to go.
        self.has_refused = False
        self._sizes: OrderedDict[Key, int] = OrderedDict()

    def size_of(self, key: Key) -> int:
        return self._sizes.get(key, 0)

    def touch(self, key: Key) -> None:
        """It is needed: others go first."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def remove(self, key: Key) -> None:
        self._sizes.pop(key, None)

    def clear(self) -> None:
        self._sizes.clear()

    def add(self, key: Key, nbytes: int, spared: OrderedDict[Key, None]) -> list[Key]:
        """Returns the blocks that have to go for a new one: those used longest ago, ``spared`` ones last."""
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
