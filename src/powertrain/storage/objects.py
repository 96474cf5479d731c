"""Storage in a bucket of an object store: S3 and its likes, Google Cloud Storage, Azure.

A put is whole or not there, and durable when the store answers: object stores guarantee that. Two starts are
distinguished by conditional writes. obstore makes the requests; its settings and the retries are here:

- A transient failure (no connection, no reply, a server's error, "slow down") is retried with random exponential
  backoff, until the storage's ``timeout``; then it is an ``OSError``.
- A permanent failure (no such bucket, refused credentials, a wrong region) is a :class:`StorageError` at once.
- Each request has a timeout of its own, so that a hanging server is noticed. The timeout doubles when it is reached, so
  that a slow line gets its file through in the end.

Parts of an upload that broke off stay in the bucket, unseen and paid for; obstore can neither list nor abort them.
A lifecycle rule of the bucket that aborts incomplete multipart uploads removes them; ``sweep`` does not.
"""

from __future__ import annotations

import errno
import os
import random
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import xxhash

from powertrain.errors import StorageError
from powertrain.storage.addresses import Address, client_settings, parse, without_secrets
from powertrain.storage.base import (
    TEMPORARY_PREFIX,
    TIMEOUT_S,
    Entry,
    FileDigest,
    StoredPart,
    check_key,
    is_abandoned,
    temporary_name,
    too_large,
)
from powertrain.storage.boundaries import crossing
from powertrain.storage.clients import client_for
from powertrain.storage.failures import TryAgain, names_missing_bucket, passing_reason

#: Seconds that one request may take at first, and at most.
REQUEST_TIMEOUT_S = 30.0
_LONGEST_REQUEST_TIMEOUT_S = 600.0
#: Pauses between attempts grow from the first to the second of these.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 15.0
#: Files and values up to this size go up, and parts come down, in one request.
PART_BYTES = 16 << 20
#: Stores take at most 10,000 parts of one object.
_MOST_PARTS = 9_000
#: Parts of one file on their way at the same time.
_CONCURRENT = 4
#: The object's attribute with its writer: a letters-only name, because Azure accepts no other.
_WRITER = "powertrainwriter"

_T = TypeVar("_T")
_OnRetry = Callable[[str, float], None]


class ObjectStorage:
    """A prefix of a bucket as storage.

    ``on_retry(reason, waited)`` is called before each retry, with the failure and the seconds since the operation
    began. It may be set at any time, children inherit it, and a pickled storage comes back without it.
    """

    lacks: tuple[str, ...] = ()

    def __init__(
        self,
        uri: str | Address,
        *,
        timeout: float = TIMEOUT_S,
        request_timeout: float = REQUEST_TIMEOUT_S,
        on_retry: _OnRetry | None = None,
    ) -> None:
        self._address = parse(uri) if isinstance(uri, str) else uri
        self._timeout, self._request_timeout = timeout, request_timeout
        self.on_retry = on_retry
        self._settings = client_settings(self._address, os.environ)

    def __repr__(self) -> str:
        return f"ObjectStorage({self._shown!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_reopened, (self._address, self._timeout, self._request_timeout))

    @property
    def uri(self) -> str:
        return self._address.uri

    @property
    def _shown(self) -> str:
        return without_secrets(self.uri)

    def local_path(self, key: str) -> None:
        check_key(key)

    def child(self, prefix: str) -> ObjectStorage:
        return self._like(self._address.child(check_key(prefix)), self._timeout, self._request_timeout)

    def within(self, timeout: float) -> ObjectStorage:
        return self._like(self._address, timeout, min(self._request_timeout, timeout / 2))

    def _like(self, address: Address, timeout: float, request_timeout: float) -> ObjectStorage:
        return ObjectStorage(
            address, timeout=timeout, request_timeout=request_timeout, on_retry=self.on_retry
        )

    # -- writing

    def put(self, key: str, data: bytes) -> None:
        import obstore

        name = self._name(key)
        crossing("put", self._full(key))
        large = len(data) > PART_BYTES
        self._persist(
            lambda client: obstore.put(client, name, data, use_multipart=large, chunk_size=PART_BYTES),
            in_parts=large,
        )

    def put_if_absent(self, key: str, data: bytes) -> bool:
        name = self._name(key)
        crossing("put", self._full(key))
        return self._create(name, data)

    def put_file(self, key: str, path: str | Path, *, digest: bool = True) -> FileDigest:
        name = self._name(key)
        with open(path, "rb", buffering=0) as source:
            crossing("put", self._full(key))
            return self._upload(name, source, digest)

    def put_file_if_absent(self, key: str, path: str | Path) -> FileDigest | None:
        name = self._name(key)
        with open(path, "rb", buffering=0) as source:
            if os.fstat(source.fileno()).st_size <= PART_BYTES:
                data = _read_all(source)
                crossing("put", self._full(key))
                created = self._create(name, data)
                return FileDigest(len(data), xxhash.xxh3_128_hexdigest(data)) if created else None
            if self._exists(name):
                return None
            temporary = f"{name.rpartition('/')[0]}/{temporary_name()}".removeprefix("/")
            crossing("put", self._full(key))
            result = self._upload(temporary, source, True)
            created = self._copy_if_absent(temporary, name)
            self._delete([temporary])
            return result if created else None

    def move(self, source: str, key: str) -> None:
        import obstore

        old, new = self._name(source), self._name(key)
        crossing("put", self._full(key))
        self._persist(lambda client: obstore.copy(client, old, new), key=source)
        crossing("delete", self._full(source))
        self._delete([old])

    def _upload(self, name: str, source: BinaryIO, digest: bool) -> FileDigest:
        """Upload a file from its start, hashing it on the way. A retry begins at the start again."""
        import obstore

        size = os.fstat(source.fileno()).st_size
        part = max(PART_BYTES, -(-size // _MOST_PARTS))
        sent = FileDigest(0, "")

        def attempt(client: Any) -> None:
            nonlocal sent
            source.seek(0)
            hasher = xxhash.xxh3_128() if digest else None
            if size <= PART_BYTES:
                data = _read_all(source)
                obstore.put(client, name, data, use_multipart=False)
                sent = FileDigest(len(data), xxhash.xxh3_128_hexdigest(data) if digest else "")
                return
            parts = _Parts(source, hasher, part)
            obstore.put(client, name, iter(parts), chunk_size=part, max_concurrency=_CONCURRENT)
            sent = FileDigest(parts.size, hasher.hexdigest() if hasher else "")

        self._persist(attempt, in_parts=size > PART_BYTES)
        return sent

    def _create(self, name: str, data: bytes) -> bool:
        """Put an object if absent. After a lost reply, the object's mark identifies its writer."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mark = secrets.token_hex(16)

        def attempt(client: Any) -> bool:
            try:
                obstore.put(client, name, data, mode="create", attributes={_WRITER: mark})
                return True
            except (AlreadyExistsError, PreconditionError):
                return self._is_marked(client, name, mark)

        return self._persist(attempt)

    def _is_marked(self, client: Any, name: str, mark: str) -> bool:
        """Return True when the object that stands in the way is the one we made in an attempt whose reply was lost."""
        import obstore

        try:
            found = obstore.get(client, name, options={"head": True})
        except FileNotFoundError:
            raise TryAgain("two writers were in each other's way") from None
        return found.attributes.get(_WRITER) == mark

    def _copy_if_absent(self, source: str, name: str) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        tried = False

        def attempt(client: Any) -> bool:
            nonlocal tried
            try:
                obstore.copy(client, source, name, overwrite=False)
                return True
            except (AlreadyExistsError, PreconditionError):
                # A copy carries no mark, so an object that a lost answer may have made is compared by its bytes.
                return tried and self._same_content(source, name)
            finally:
                tried = True

        return self._persist(attempt)

    def _same_content(self, one: str, other: str) -> bool:
        return self._digest_of(one) == self._digest_of(other)

    # -- reading

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        return b"".join(self._content(self._name(key), key, limit))

    def get_range(self, key: str, start: int, length: int) -> StoredPart:
        import obstore

        name = self._name(key)

        def attempt(client: Any) -> StoredPart:
            size = int(obstore.head(client, name)["size"])
            if start >= size or length <= 0:  # stores refuse an empty range
                return StoredPart(b"", size)
            options: Any = {"range": (start, min(start + length, size))}
            return StoredPart(bytes(obstore.get(client, name, options=options).bytes()), size)

        return self._persist(attempt, key=key)

    def get_file(self, key: str, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / temporary_name()
        try:
            with open(temporary, "xb", buffering=0) as file:
                for piece in self._content(self._name(key), key):
                    _write_all(file, piece)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def digest(self, key: str) -> FileDigest:
        return self._digest_of(self._name(key), key)

    def _digest_of(self, name: str, key: str = "") -> FileDigest:
        hasher, size = xxhash.xxh3_128(), 0
        for piece in self._content(name, key):
            hasher.update(piece)
            size += len(piece)
        return FileDigest(size, hasher.hexdigest())

    def modified(self, key: str) -> float:
        import obstore

        name = self._name(key)
        meta = self._persist(lambda client: obstore.head(client, name), key=key)
        return float(meta["last_modified"].timestamp())

    def list(self, prefix: str = "") -> list[Entry]:
        entries = (Entry(key, meta["size"]) for key, meta in self._listing(prefix))
        return sorted(entry for entry in entries if not _is_temporary(entry.key))

    def directories(self) -> Sequence[str]:
        import obstore

        top = _encoded(self._address.prefix)
        found = self._persist(lambda client: obstore.list_with_delimiter(client, top or None))
        names = (_decoded(path.rstrip("/").rpartition("/")[2]) for path in found["common_prefixes"])
        return sorted(name for name in names if not _is_temporary(name))

    def _exists(self, name: str) -> bool:
        import obstore

        try:
            self._persist(lambda client: obstore.head(client, name), key=name)
        except FileNotFoundError:
            return False
        return True

    def _listing(self, prefix: str) -> Sequence[tuple[str, Any]]:
        """Return (key, object info) of every object below ``prefix``, unfinished ones too."""
        import obstore

        top = self._name(prefix) if prefix else _encoded(self._address.prefix)

        def attempt(client: Any) -> Sequence[Any]:
            return [meta for batch in obstore.list(client, top or None) for meta in batch]

        root = f"{_encoded(self._address.prefix)}/".removeprefix("/")
        return [(_decoded(meta["path"].removeprefix(root)), meta) for meta in self._persist(attempt)]

    def _content(self, name: str, key: str, limit: int | None = None) -> Iterator[bytes]:
        """Yield an object's bytes in order, a large one in several requests at a time; none of one above ``limit``."""
        import obstore

        def whole_or_meta(client: Any) -> tuple[bytes | None, Any]:
            result = obstore.get(client, name)
            small = result.meta["size"] <= PART_BYTES
            return (bytes(result.bytes()) if small else None), result.meta

        data, meta = self._persist(whole_or_meta, key=key)
        if limit is not None and meta["size"] > limit:
            raise too_large(key, limit)
        if data is not None:
            yield data
            return

        def fetch(start: int) -> bytes:
            options: Any = {
                "range": (start, min(start + PART_BYTES, meta["size"])),
                "if_match": meta["e_tag"],
            }
            return self._persist(
                lambda client: bytes(obstore.get(client, name, options=options).bytes()), key=key
            )

        pool = ThreadPoolExecutor(_CONCURRENT, thread_name_prefix="powertrain-fetch")
        try:
            yield from _in_order(pool, fetch, range(0, meta["size"], PART_BYTES))
        finally:
            pool.shutdown(cancel_futures=True)

    # -- forgetting

    def delete(self, key: str) -> None:
        name = self._name(key)
        crossing("delete", self._full(key))
        self._delete([name])

    def delete_tree(self, prefix: str) -> None:
        names = [meta["path"] for _, meta in self._listing(check_key(prefix))]
        crossing("delete", self._full(prefix))
        self._delete(names)

    def sweep(self) -> int:
        now, abandoned = time.time(), []
        for key, meta in self._listing(""):
            name = key.rpartition("/")[2]
            if _is_temporary(key) and is_abandoned(name, now - meta["last_modified"].timestamp()):
                abandoned.append(meta["path"])
        self._delete(abandoned)
        return len(abandoned)

    def _delete(self, names: Sequence[str]) -> None:
        import obstore

        def attempt(client: Any) -> None:
            try:
                obstore.delete(client, [*names])
            except FileNotFoundError as error:
                if names_missing_bucket(str(error)):
                    raise
                if len(names) > 1:  # some stores stop at the first absent one
                    for name in names:
                        _delete_one(client, name)

        if names:
            self._persist(attempt)

    # -- names

    def _name(self, key: str) -> str:
        return _encoded(self._full(check_key(key)))

    def _full(self, key: str) -> str:
        return f"{self._address.prefix}/{key}".removeprefix("/")

    # -- trying again

    def _persist(self, action: Callable[[Any], _T], *, key: str | None = None, in_parts: bool = False) -> _T:
        """Return the result of ``action`` for a client, with retries as in the module's docstring.

        With ``key`` a "not found" means that this key is absent; without, that the bucket is.
        """
        began, pause, patience = time.monotonic(), _FIRST_PAUSE, self._request_timeout
        while True:
            try:
                return action(client_for(self._settings, patience, in_parts))
            except _SourceFailed as error:
                raise error.reason from None
            except (StorageError, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of obstore's is no Exception
                reason = passing_reason(error, key, self._address)
            waited = time.monotonic() - began
            if waited >= self._timeout:
                raise OSError(
                    errno.ETIMEDOUT, f"no success within {self._timeout:g} s ({reason})", self._shown
                )
            if self.on_retry is not None:
                self.on_retry(reason, waited)
            time.sleep(min(random.uniform(pause / 2, pause), self._timeout - waited))
            pause = min(2 * pause, _LONGEST_PAUSE)
            if "no answer" in reason:
                patience = min(
                    2 * patience, _LONGEST_REQUEST_TIMEOUT_S, max(self._request_timeout, self._timeout / 2)
                )


def _reopened(address: Address, timeout: float, request_timeout: float) -> ObjectStorage:
    return ObjectStorage(address, timeout=timeout, request_timeout=request_timeout)


# --------------------------------------------------------------------------- bytes


class _SourceFailed(Exception):
    """The local file that was being sent could not be read: no fault of the store."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(str(reason))
        self.reason = reason


class _Parts:
    """A file's content in pieces, hashed as they are taken."""

    def __init__(self, source: BinaryIO, hasher: xxhash.xxh3_128 | None, length: int) -> None:
        self._source, self._hasher, self._length = source, hasher, length
        self.size = 0

    def __iter__(self) -> Iterator[bytes]:
        while piece := _read(self._source, self._length):
            if self._hasher is not None:
                self._hasher.update(piece)
            self.size += len(piece)
            yield piece


def _read(source: BinaryIO, length: int) -> bytes:
    try:
        return source.read(length)
    except OSError as error:
        raise _SourceFailed(error) from error


def _read_all(source: BinaryIO) -> bytes:
    pieces = []
    while piece := _read(source, PART_BYTES):
        pieces.append(piece)
    return b"".join(pieces)


def _write_all(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _in_order(pool: ThreadPoolExecutor, fetch: Callable[[int], bytes], starts: range) -> Iterator[bytes]:
    """Yield the result of ``fetch`` for each of ``starts``, in order, a few ahead of the reader."""
    pending: deque[Future[bytes]] = deque()
    for start in starts:
        pending.append(pool.submit(fetch, start))
        if len(pending) > _CONCURRENT:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _delete_one(client: Any, name: str) -> None:
    import obstore

    try:
        obstore.delete(client, name)
    except FileNotFoundError as error:
        if names_missing_bucket(str(error)):
            raise


# --------------------------------------------------------------------------- names of objects

#: Characters that object stores or their XML cannot carry; and a percent sign that would read as an escape of ours.
_UNFIT = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff\ufffe\uffff]|%(?=[0-9A-F]{2})")
_ESCAPE = re.compile(r"(?:%[0-9A-F]{2})+")


def _encoded(key: str) -> str:
    """Return the object's name for ``key``: itself, with percent signs only where it must."""
    return _UNFIT.sub(lambda match: "".join(f"%{byte:02X}" for byte in _bytes(match[0])), key)


def _decoded(name: str) -> str:
    """Return the key whose object has this name."""
    return _ESCAPE.sub(
        lambda match: bytes.fromhex(match[0].replace("%", "")).decode("utf-8", "surrogateescape"), name
    )


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(TEMPORARY_PREFIX)
