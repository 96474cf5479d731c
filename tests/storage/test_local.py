from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import StorageError
from powertrain.storage import Storage, boundaries, check_key, open_storage, probe
from powertrain.storage import base as base_module
from powertrain.storage import local as local_module
from powertrain.storage.base import TEMPORARY_PREFIX
from powertrain.storage.local import LocalStorage, digest_of


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def leftovers(directory: Path) -> list[Path]:
    return list(directory.rglob(TEMPORARY_PREFIX + "*"))


def test_put_replaces_and_get_gives_the_newest(storage: Storage) -> None:
    storage.put("a/b", b"one")
    storage.put("a/b", b"two")
    assert storage.get("a/b") == b"two"


def test_get_of_an_absent_key_or_a_directory_is_file_not_found(storage: Storage) -> None:
    storage.put("a/b", b"x")
    for key in ("c", "a", "a/b/c"):
        with pytest.raises(FileNotFoundError):
            storage.get(key)


def test_put_if_absent_keeps_the_first_value(storage: Storage) -> None:
    assert storage.put_if_absent("k", b"first")
    assert not storage.put_if_absent("k", b"second")
    assert storage.get("k") == b"first"


def test_put_if_absent_works_without_hard_links(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert storage.put_if_absent("k", b"first")
    assert not storage.put_if_absent("k", b"second")
    assert storage.get("k") == b"first"


def _claim(root: str, name: str, barrier: object, won: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    for number in range(50):
        if open_storage(root).put_if_absent(f"claims/{number}", name.encode()):
            won.put((number, name))  # type: ignore[attr-defined]
    won.put(None)  # type: ignore[attr-defined]


def test_of_several_processes_exactly_one_wins_each_put_if_absent(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, won = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_claim, args=(str(tmp_path), f"p{i}", barrier, won)) for i in range(3)]
    for worker in workers:
        worker.start()
    results, finished = [], 0
    while finished < 3:
        item = won.get(timeout=30)
        finished += item is None
        results += [item] if item else []
    for worker in workers:
        worker.join(30)
    assert sorted(number for number, _ in results) == list(range(50))
    storage = open_storage(tmp_path)
    assert all(storage.get(f"claims/{number}") == name.encode() for number, name in results)


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, (1 << 20) + 17])
@pytest.mark.parametrize("digest", [True, False])
def test_put_file_stores_the_same_bytes_and_their_digest(
    storage: Storage, tmp_path: Path, size: int, digest: bool
) -> None:
    data = os.urandom(size)
    source = tmp_path / "source"
    source.write_bytes(data)
    result = storage.put_file("f", source, digest=digest)
    assert storage.get("f") == data
    assert result.size == size
    assert result.xxh3 == (xxhash.xxh3_128_hexdigest(data) if digest else "")
    assert digest_of(source) == (size, xxhash.xxh3_128_hexdigest(data))


def test_put_file_gives_the_digest_of_a_reflinked_copy(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cloned(source: int, target: int) -> bool:
        os.write(target, os.pread(source, 100, 0))
        return True

    monkeypatch.setattr(local_module, "_reflinked", cloned)
    (tmp_path / "source").write_bytes(b"content")
    assert storage.put_file("f", tmp_path / "source") == (7, xxhash.xxh3_128_hexdigest(b"content"))
    assert storage.put_file("g", tmp_path / "source", digest=False) == (7, "")
    assert storage.get("f") == storage.get("g") == b"content"


def test_put_file_if_absent_leaves_a_taken_key_alone(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"one")
    (tmp_path / "two").write_bytes(b"two")
    assert storage.put_file_if_absent("k", tmp_path / "one") == (3, xxhash.xxh3_128_hexdigest(b"one"))
    assert storage.put_file_if_absent("k", tmp_path / "two") is None
    assert storage.get("k") == b"one"


def test_get_file_makes_the_directory(storage: Storage, tmp_path: Path) -> None:
    storage.put("k", b"value")
    storage.get_file("k", tmp_path / "deep" / "er" / "file")
    assert (tmp_path / "deep" / "er" / "file").read_bytes() == b"value"


def test_move_replaces_and_leaves_nothing_behind(storage: Storage) -> None:
    storage.put("a/from", b"new")
    storage.put("b/to", b"old")
    storage.move("a/from", "b/to")
    assert storage.get("b/to") == b"new"
    assert [entry.key for entry in storage.list()] == ["b/to"]


def test_list_is_sorted_recursive_and_bounded_by_the_prefix(storage: Storage) -> None:
    for key in ("m/2", "m/10", "m/deep/1", "mm/1", "z"):
        storage.put(key, key.encode())
    assert storage.list("m") == [("m/10", 4), ("m/2", 3), ("m/deep/1", 8)]
    assert [entry.key for entry in storage.list()] == ["m/10", "m/2", "m/deep/1", "mm/1", "z"]
    assert storage.list("nothing") == []


def test_delete_and_delete_tree_accept_what_is_absent(storage: Storage) -> None:
    storage.put("a/b/c", b"1")
    storage.put("a/d", b"2")
    storage.delete("nothing")
    storage.delete_tree("nothing")
    storage.delete("a/d")
    assert [entry.key for entry in storage.list()] == ["a/b/c"]
    storage.delete_tree("a")
    assert storage.list() == []


def test_child_sees_the_same_values_from_below(storage: Storage) -> None:
    storage.put("runs/one/k", b"v")
    assert storage.child("runs/one").get("k") == b"v"
    assert storage.child("runs").local_path("one/k") == storage.local_path("runs/one/k")


def test_a_failed_write_leaves_the_old_value_and_no_temporary_file(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("k", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        storage.put("k", b"new")
    assert storage.get("k") == b"old"
    assert leftovers(tmp_path) == []


def test_sweep_removes_what_a_killed_writer_left_and_spares_the_live(
    storage: Storage, tmp_path: Path
) -> None:
    storage.put("d/k", b"v")
    script = (
        "import os, sys\n"
        "from powertrain.storage import open_storage\n"
        "os.replace = lambda *a, **k: os.kill(os.getpid(), 9)\n"
        "open_storage(sys.argv[1]).put('d/k', b'half')\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, storage.uri], check=False)
    assert killed.returncode == -9
    host = base_module.host_in_names()
    live = tmp_path / "run" / "d" / f"{TEMPORARY_PREFIX}{host}.{os.getpid()}.00"
    live.write_bytes(b"being written")
    assert len(leftovers(tmp_path)) == 2
    assert [entry.key for entry in storage.list()] == ["d/k"]
    assert storage.sweep() == 1
    assert leftovers(tmp_path) == [live]
    assert storage.get("d/k") == b"v"


def test_sweep_spares_a_fresh_write_of_another_host_and_takes_an_old_one(storage: Storage) -> None:
    storage.put("k", b"v")
    path = Path(storage.uri) / f"{TEMPORARY_PREFIX}elsewhere.1.00"
    path.write_bytes(b"")
    assert storage.sweep() == 0
    os.utime(path, (1, 1))
    assert storage.sweep() == 1


@pytest.mark.parametrize(
    "key", ["", "/", "/etc/passwd", "..", "a/../b", "a//b", "a/", "./a", "a\0b", TEMPORARY_PREFIX]
)
def test_keys_that_climb_out_are_refused(storage: Storage, key: str) -> None:
    for operation in (storage.get, storage.delete, storage.delete_tree, storage.local_path, storage.child):
        with pytest.raises(StorageError, match="not allowed"):
            operation(key)


@given(st.text(max_size=20))
def test_an_accepted_key_always_stays_inside(key: str) -> None:
    try:
        check_key(key)
    except StorageError:
        return
    inside = os.path.normpath(os.path.join("/top", key))
    assert inside.startswith("/top/")
    assert inside == "/top/" + key


def test_file_addresses_and_home_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_storage(f"file://{tmp_path}/with%20space").uri == str(tmp_path / "with space")
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        assert open_storage("~/runs").uri == str(tmp_path / "runs")
        patch.chdir(tmp_path)
        assert open_storage("runs").uri == str(tmp_path / "runs")


@pytest.mark.parametrize("address", ["hdfs://x/y", "file://elsewhere/x", ""])
def test_other_addresses_are_refused(address: str) -> None:
    with pytest.raises(StorageError):
        open_storage(address)


def test_probe_leaves_nothing_behind(storage: Storage) -> None:
    probe(storage)
    assert storage.list() == []


def test_probe_of_a_path_through_a_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="is a file: remove it") as caught:
            probe(open_storage(path))
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, "write permission"),
        (errno.EROFS, "Mount it writable"),
        (errno.ENOSPC, "Free some space"),
        (errno.EIO, "Check that the place exists"),
    ],
)
def test_probe_turns_a_refusal_into_one_sentence_and_a_fix(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refuse(self: LocalStorage, key: str, data: bytes) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(LocalStorage, "put", refuse)
    with pytest.raises(StorageError, match=says) as caught:
        probe(storage)
    assert storage.uri in str(caught.value)
    assert os.strerror(number) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_probe_of_a_directory_without_permission_says_so(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    with pytest.raises(StorageError, match="write permission"):
        probe(open_storage(closed / "run"))


def test_probe_notices_storage_that_gives_back_other_bytes(
    storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStorage, "get", lambda self, key, limit=None: b"garbage")
    with pytest.raises(StorageError, match="other bytes"):
        probe(storage)


# --------------------------------------------------------------------------- adopting and copying


@pytest.fixture
def local(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


def test_an_adopted_file_is_the_value_and_its_old_name_is_gone(local: LocalStorage, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.write_bytes(b"content")
    inode = staged.stat().st_ino
    local.put("deep/k", b"old")
    assert local.adopt("deep/k", staged) == (7, xxhash.xxh3_128_hexdigest(b"content"))
    assert not staged.exists()
    assert local.get("deep/k") == b"content"
    assert local.local_path("deep/k").stat().st_ino == inode


def test_adopting_again_after_a_crash_gives_the_same_answer(local: LocalStorage, tmp_path: Path) -> None:
    staged = tmp_path / "staged"
    staged.write_bytes(b"content")
    first = local.adopt("k", staged)
    assert local.adopt("k", staged) == first
    with pytest.raises(FileNotFoundError):
        local.adopt("never", staged)


def test_a_read_only_file_can_be_adopted(local: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "staged").write_bytes(b"content")
    (tmp_path / "staged").chmod(0o400)
    assert local.adopt("k", tmp_path / "staged").size == 7


def test_a_file_of_another_file_system_or_behind_a_link_is_not_adopted(
    local: LocalStorage, tmp_path: Path
) -> None:
    (tmp_path / "real").write_bytes(b"content")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic link") as caught:
        local.adopt("k", tmp_path / "link")
    assert caught.value.errno == errno.EXDEV
    elsewhere = Path("/dev/shm", f"powertrain-test-{os.getpid()}")
    if not elsewhere.parent.is_dir() or elsewhere.parent.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("this machine has no second file system at hand")
    elsewhere.write_bytes(b"content")
    try:
        with pytest.raises(OSError, match="cross-device") as caught:
            local.adopt("k", elsewhere)
        assert caught.value.errno == errno.EXDEV
        assert elsewhere.read_bytes() == b"content"
        assert local_module.copy_file(elsewhere, tmp_path / "copy") == 7
        assert (tmp_path / "copy").read_bytes() == b"content"
    finally:
        elsewhere.unlink()
    assert local.list() == []


def test_adopting_makes_the_file_durable_before_it_gets_its_name(local: LocalStorage, tmp_path: Path) -> None:
    (tmp_path / "staged").write_bytes(b"content")
    local.put("d/other", b"")
    steps: list[tuple[str, str]] = []
    boundaries.install(lambda kind, target: steps.append((kind, os.path.basename(target))))
    try:
        local.adopt("d/k", tmp_path / "staged")
    finally:
        boundaries.install(None)
    assert steps == [("fsync", "staged"), ("rename", "k"), ("fsync", tmp_path.name), ("fsync", "d")]


def test_a_put_crosses_its_boundaries_in_order(local: LocalStorage) -> None:
    local.put("d/before", b"")
    steps: list[str] = []
    boundaries.install(lambda kind, target: steps.append(kind))
    try:
        local.put("d/k", b"v")
        local.put_if_absent("d/l", b"v")
        local.delete("d/k")
        local.put("new/k", b"v")
    finally:
        boundaries.install(None)
    put = ["write", "write", "fsync", "rename", "fsync"]
    create = ["write", "write", "fsync", "link", "fsync"]
    assert steps == [*put, *create, "unlink", "fsync", "mkdir", "fsync", *put]


@pytest.mark.parametrize("refusing", [(), ("copy_file_range",), ("copy_file_range", "sendfile")])
@pytest.mark.parametrize("size", [0, 1, (3 << 20) + 5])
def test_copies_are_whole_by_whatever_means_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: tuple[str, ...], size: int
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "not between these")

    for name in refusing:
        monkeypatch.setattr(os, name, refuse)
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)
    assert local_module.copy_file(tmp_path / "source", tmp_path / "target") == size
    assert (tmp_path / "target").read_bytes() == data


def test_a_pseudo_file_that_says_it_is_empty_is_copied(tmp_path: Path) -> None:
    size = local_module.copy_file("/proc/self/status", tmp_path / "target")
    assert size == (tmp_path / "target").stat().st_size > 0


def test_a_kernel_copy_that_fails_half_way_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = iter([100])

    def full(source: int, target: int, count: int) -> int:
        for first in copied:
            return os.write(target, os.read(source, first))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    (tmp_path / "source").write_bytes(os.urandom(1000))
    with pytest.raises(OSError, match="No space"):
        local_module.copy_file(tmp_path / "source", tmp_path / "target")
