"""What every storage must do, whatever it is made of."""

from __future__ import annotations

import errno
import os
import pickle
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from tests.s3_server import S3Server

from powertrain.errors import StorageError
from powertrain.storage import Storage, boundaries, objects, open_storage, probe
from powertrain.storage.adapter import FilesystemStorage
from powertrain.storage.base import TEMPORARY_PREFIX

KINDS = ("local", "s3", "pyarrow", "fsspec-local", "fsspec-memory")
#: Larger values go to object stores in parts, of which S3 wants none smaller.
PART_BYTES = 5 << 20
#: Those that decide races themselves.
DECIDING = ("local", "s3")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(kind: str, tmp_path: Path, s3: S3Server) -> Callable[[], Storage]:
    """Each call opens the same place again."""
    name = f"run-{secrets.token_hex(4)}"
    if kind == "local":
        return lambda: open_storage(tmp_path / name)
    if kind == "s3":
        return lambda: open_storage(s3.uri(f"runs/{name}"), timeout=20)
    if kind == "pyarrow":
        from pyarrow import fs

        return lambda: FilesystemStorage(fs.LocalFileSystem(), str(tmp_path / name))
    import fsspec

    root = str(tmp_path / name) if kind == "fsspec-local" else f"/{name}"
    filesystem = fsspec.filesystem("file" if kind == "fsspec-local" else "memory")
    return lambda: FilesystemStorage(filesystem, root)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "PART_BYTES", PART_BYTES)


@pytest.fixture
def storage(make: Callable[[], Storage]) -> Storage:
    return make()


def keys(storage: Storage, prefix: str = "") -> list[str]:
    return [entry.key for entry in storage.list(prefix)]


def test_a_value_above_the_limit_is_not_read(storage: Storage) -> None:
    for size in (3, PART_BYTES + 1):
        data = secrets.token_bytes(size)
        storage.put("a/b", data)
        assert storage.get("a/b", limit=size) == data
        with pytest.raises(OSError, match=f"more than {size - 1:,} bytes") as refused:
            storage.get("a/b", limit=size - 1)
        assert refused.value.errno == errno.EFBIG
    with pytest.raises(FileNotFoundError):
        storage.get("a/c", limit=10)


def test_a_range_is_read_without_the_rest(storage: Storage) -> None:
    storage.put("a/b", b"0123456789")
    assert storage.get_range("a/b", 2, 3) == (b"234", 10)
    assert storage.get_range("a/b", 7, 100) == (b"789", 10)
    assert storage.get_range("a/b", 10, 5) == storage.get_range("a/b", 99, 5) == (b"", 10)
    assert storage.get_range("a/b", 0, 0) == (b"", 10)
    with pytest.raises(FileNotFoundError):
        storage.get_range("a/c", 0, 1)
    with pytest.raises(FileNotFoundError):
        storage.get_range("a", 0, 1)


def test_directories_are_the_first_parts_of_longer_keys(storage: Storage) -> None:
    assert storage.directories() == []
    for key in ("run b/journal/1", "run b/checkpoints/a/b/c", "a%20/x", "file"):
        storage.put(key, b"")
    assert storage.directories() == ["a%20", "run b"]
    assert storage.child("run b").directories() == ["checkpoints", "journal"]


def test_put_replaces_and_get_gives_the_newest(storage: Storage) -> None:
    storage.put("a/b", b"one")
    storage.put("a/b", b"two")
    assert storage.get("a/b") == b"two"
    storage.put("a/empty", b"")
    assert storage.get("a/empty") == b""
    assert storage.list("a") == [("a/b", 3), ("a/empty", 0)]


def test_an_absent_key_is_file_not_found_and_leaves_no_file(storage: Storage, tmp_path: Path) -> None:
    storage.put("a/b", b"x")
    reads: list[Callable[[str], object]] = [
        storage.get,
        storage.digest,
        storage.modified,
        lambda key: storage.get_file(key, tmp_path / "got"),
        lambda key: storage.move(key, "elsewhere"),
    ]
    for read in reads:
        for key in ("c", "a/c"):
            with pytest.raises(FileNotFoundError):
                read(key)
    for key in ("a", "a/b/c"):
        with pytest.raises(FileNotFoundError):
            storage.get(key)
    assert not (tmp_path / "got").exists()
    assert keys(storage) == ["a/b"]


def test_put_if_absent_keeps_the_first_value(storage: Storage) -> None:
    assert storage.put_if_absent("deep/k", b"first")
    assert not storage.put_if_absent("deep/k", b"second")
    assert storage.get("deep/k") == b"first"


@pytest.mark.parametrize("kind", DECIDING, indirect=True)
def test_of_many_writers_exactly_one_wins_each_key(make: Callable[[], Storage]) -> None:
    barrier = threading.Barrier(6)

    def claim(writer: int) -> list[int]:
        storage = make()
        barrier.wait()
        return [number for number in range(8) if storage.put_if_absent(f"claims/{number}", b"%d" % writer)]

    with ThreadPoolExecutor(6) as pool:
        won = list(pool.map(claim, range(6)))
    assert sorted(number for numbers in won for number in numbers) == list(range(8))
    storage = make()
    assert all(
        storage.get(f"claims/{number}") == b"%d" % w for w, numbers in enumerate(won) for number in numbers
    )


@pytest.mark.parametrize("size", [0, 1, PART_BYTES, 2 * PART_BYTES + 17])
def test_files_go_in_and_come_out_with_their_digest(storage: Storage, tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)
    expected = (size, xxhash.xxh3_128_hexdigest(data))
    assert storage.put_file("d/f", tmp_path / "source") == expected
    assert storage.put_file("d/g", tmp_path / "source", digest=False) == (size, "")
    assert storage.digest("d/f") == storage.digest("d/g") == expected
    assert storage.list("d") == [("d/f", size), ("d/g", size)]
    target = tmp_path / "not" / "there" / "yet"
    storage.get_file("d/f", target)
    assert target.read_bytes() == data
    assert os.listdir(target.parent) == ["yet"]
    assert storage.get("d/f") == data


@pytest.mark.parametrize("size", [10, PART_BYTES + 17])
def test_put_file_if_absent_leaves_a_taken_key_alone(storage: Storage, tmp_path: Path, size: int) -> None:
    one, two = os.urandom(size), os.urandom(size)
    (tmp_path / "one").write_bytes(one)
    (tmp_path / "two").write_bytes(two)
    assert storage.put_file_if_absent("k", tmp_path / "one") == (size, xxhash.xxh3_128_hexdigest(one))
    assert storage.put_file_if_absent("k", tmp_path / "two") is None
    assert storage.digest("k") == (size, xxhash.xxh3_128_hexdigest(one))
    assert storage.list() == [("k", size)]


def test_a_missing_source_file_is_reported_and_nothing_is_stored(storage: Storage, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing-here"):
        storage.put_file("k", tmp_path / "nothing-here")
    assert storage.list() == []


def test_list_is_sorted_recursive_and_bounded_by_the_prefix(storage: Storage) -> None:
    for key in ("m/2", "m/10", "m/deep/1", "mm/1", "z"):
        storage.put(key, key.encode())
    assert storage.list("m") == [("m/10", 4), ("m/2", 3), ("m/deep/1", 8)]
    assert keys(storage) == ["m/10", "m/2", "m/deep/1", "mm/1", "z"]
    assert storage.list("nothing") == []
    assert storage.list("z") == []


def test_move_replaces_and_leaves_nothing_behind(storage: Storage) -> None:
    storage.put("a/from", b"new")
    storage.put("b/to", b"old")
    storage.move("a/from", "b/to")
    assert storage.get("b/to") == b"new"
    assert keys(storage) == ["b/to"]


def test_delete_and_delete_tree_accept_what_is_absent(storage: Storage) -> None:
    for key in ("a/b/c", "a/d", "ab"):
        storage.put(key, b"1")
    storage.delete("nothing")
    storage.delete_tree("nothing")
    storage.delete("a/d")
    assert keys(storage) == ["a/b/c", "ab"]
    storage.delete_tree("a")
    assert keys(storage) == ["ab"]


def test_modified_goes_by_the_storages_clock(storage: Storage) -> None:
    storage.put("k", b"1")
    assert abs(storage.modified("k") - time.time()) < 30


def test_a_child_a_copy_and_a_reopened_one_see_the_same_values(make: Callable[[], Storage]) -> None:
    storage = make()
    storage.put("runs/one/k", b"v")
    assert storage.child("runs/one").get("k") == b"v"
    assert storage.child("runs").child("one").list() == [("k", 1)]
    assert pickle.loads(pickle.dumps(storage)).get("runs/one/k") == b"v"
    assert storage.within(10).get("runs/one/k") == b"v"
    assert make().get("runs/one/k") == b"v"


@pytest.mark.parametrize("kind", DECIDING, indirect=True)
def test_the_address_opens_the_same_place_again(storage: Storage) -> None:
    child = storage.child("odd name/100%/what?")
    child.put("k", b"v")
    assert open_storage(child.uri).get("k") == b"v"
    assert keys(storage) == ["odd name/100%/what?/k"]


ODD = [
    "with space", " lead", "trail ", "100%", "a%20b", "%0A", "%%0A", "hash#", "what?", "q'\"x", "new\nline", "tab\t",
    "back\\slash", ".hidden", "..x", "ünï", "日本", "{x}^|~`<>&", "plus+", "a=b", "a:b;c,d@e$f!", "*", "del\x7f",
    "\x85", os.fsdecode(b"not-utf8-\xff"),
]  # fmt: skip


@pytest.mark.parametrize("kind", ["local", "s3", "pyarrow"], indirect=True)
def test_odd_names_round_trip(storage: Storage, kind: str, tmp_path: Path) -> None:
    names = [name for name in ODD if kind == "local" or kind == "s3" or name.isprintable()]
    for name in names:
        storage.put(f"odd/{name}/f", name.encode("utf-8", "surrogateescape"))
        storage.put(f"odd/{name}/{name}", b"2")
    assert keys(storage) == sorted(f"odd/{name}/{part}" for name in names for part in ("f", name))
    for name in names:
        assert storage.get(f"odd/{name}/f") == name.encode("utf-8", "surrogateescape")
        assert storage.list(f"odd/{name}") == sorted(
            [(f"odd/{name}/f", len(os.fsencode(name))), (f"odd/{name}/{name}", 1)]
        )
        assert storage.child(f"odd/{name}").get("f") == os.fsencode(name)
        storage.move(f"odd/{name}/f", f"moved/{name}")
        storage.delete(f"odd/{name}/{name}")
    assert keys(storage) == sorted(f"moved/{name}" for name in names)
    storage.delete_tree("moved")
    assert storage.list() == []


@pytest.mark.parametrize(
    "key", ["", "/", "/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", "a\0b", TEMPORARY_PREFIX]
)
def test_keys_that_climb_out_are_refused(storage: Storage, key: str) -> None:
    for operation in (storage.get, storage.delete, storage.delete_tree, storage.local_path, storage.child):
        with pytest.raises(StorageError, match="not allowed"):
            operation(key)
    with pytest.raises(StorageError, match="not allowed"):
        storage.put(key, b"")


def test_only_storage_that_decides_races_lacks_nothing(storage: Storage, kind: str) -> None:
    if kind in DECIDING:
        assert storage.lacks == ()
    else:
        assert any("both win" in sentence for sentence in storage.lacks)
        assert all(sentence.endswith(".") for sentence in storage.lacks)


def test_the_probe_passes_and_leaves_nothing(storage: Storage) -> None:
    probe(storage)
    assert storage.list() == []


def test_the_probe_notices_storage_that_cannot_decide_races(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(storage), "put_if_absent", lambda self, key, data: self.put(key, data) or True)
    with pytest.raises(StorageError, match="only if absent"):
        probe(storage)


def test_every_change_crosses_a_boundary_first(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"content")
    storage.put("there", b"")
    changes: list[Callable[[], object]] = [
        lambda: storage.put("k", b"v"),
        lambda: storage.put_if_absent("k", b"v"),
        lambda: storage.put_file("k", tmp_path / "source"),
        lambda: storage.put_file_if_absent("k", tmp_path / "source"),
        lambda: storage.move("there", "k"),
        lambda: storage.delete("there"),
    ]

    def refuse(kind: str, target: str) -> None:
        assert kind in boundaries.KINDS
        raise OSError(f"stopped at {kind}")

    for change in changes:
        boundaries.install(refuse)
        try:
            with pytest.raises(OSError, match="stopped at"):
                change()
        finally:
            boundaries.install(None)
    assert keys(storage) == ["there"]


def test_sweep_leaves_values_alone(storage: Storage) -> None:
    storage.put("d/k", b"v")
    assert storage.sweep() == 0
    assert keys(storage) == ["d/k"]
