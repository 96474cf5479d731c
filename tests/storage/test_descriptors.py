"""Files and directories by descriptor: a link is never followed, and never taken for what it leads to."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.other_user import OtherUser

from powertrain.errors import StorageError
from powertrain.run.metrics.spool import Spool
from powertrain.run.record.journal import Journal
from powertrain.run.record.lease import Lease
from powertrain.storage import open_storage
from powertrain.storage.base import TEMPORARY_PREFIX
from powertrain.storage.files import descriptors
from powertrain.storage.local import LocalStorage
from powertrain.trace.store import _OpenPart


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    directory = tmp_path / "outside"
    (directory / "inner").mkdir(parents=True)
    (directory / "file").write_bytes(b"private")
    (directory / "inner" / "file").write_bytes(b"private")
    return directory


@pytest.mark.parametrize("below", [0, 1, 2])
def test_a_link_at_any_depth_is_not_followed(tmp_path: Path, outside: Path, below: int) -> None:
    parts = ["a", "b", "file"]
    place = tmp_path / "base"
    place.joinpath(*parts[:below]).mkdir(parents=True)
    target = outside / "file" if below == 2 else outside
    place.joinpath(*parts[: below + 1]).symlink_to(target)
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT):
        with pytest.raises(OSError, match="symbolic link") as refused:
            descriptors.open_below(place.joinpath(*parts), 3, flags)
        assert refused.value.errno == errno.ELOOP
    assert sorted(os.listdir(outside)) == ["file", "inner"]


def test_a_pipe_or_a_directory_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    with pytest.raises(OSError, match="not a regular file"):
        descriptors.open_below(tmp_path / "pipe", 1)
    with pytest.raises(IsADirectoryError):
        descriptors.open_below(tmp_path / "directory", 1)


def test_removing_a_tree_leaves_what_its_links_lead_to(tmp_path: Path, outside: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "deep" / "deeper").mkdir(parents=True)
    (tree / "deep" / "link").symlink_to(outside)
    (tree / "deep" / "deeper" / "link").symlink_to(outside / "file")
    descriptors.remove_tree(tree)
    descriptors.remove_tree(tree)
    assert not tree.exists()
    assert (outside / "inner" / "file").read_bytes() == b"private"


def test_removing_a_link_removes_the_link(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "link").symlink_to(outside)
    descriptors.remove_tree(tmp_path / "link")
    assert not os.path.lexists(tmp_path / "link")
    assert (outside / "inner" / "file").exists()


def test_a_tree_of_another_owner_is_left(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    descriptors.remove_tree(tmp_path / "tree", owner=os.geteuid() + 1)
    assert (tmp_path / "tree").is_dir()


def test_removing_while_a_directory_is_swapped_for_a_link_removes_nothing_else(
    tmp_path: Path, outside: Path
) -> None:
    """Another process swaps a directory inside the tree for a link, over and over."""
    done = threading.Event()

    def swap() -> None:
        number = 0
        while not done.is_set():
            number += 1
            try:
                os.rename(tmp_path / "tree" / "a", tmp_path / f"moved-{number}")
                os.symlink(outside, tmp_path / "tree" / "a")
                os.unlink(tmp_path / "tree" / "a")
                os.mkdir(tmp_path / "tree" / "a")
            except OSError:
                continue

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(300):
            (tmp_path / "tree" / "a" / "b").mkdir(parents=True, exist_ok=True)
            descriptors.remove_quietly(tmp_path / "tree")
    except OSError:
        pass  # the swapper was faster than mkdir
    finally:
        done.set()
        swapper.join()
    assert (outside / "inner" / "file").read_bytes() == b"private"
    assert (outside / "file").read_bytes() == b"private"


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """No more than 60 descriptors above those that are open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 60, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def make_deep(tmp_path: Path) -> Iterator[Callable[[Path, int], None]]:
    """Makes so many directories below another, a file and a link in each."""

    def make(top: Path, depth: int) -> None:
        top.mkdir(parents=True)
        at = os.open(top, os.O_RDONLY)
        for _ in range(depth):
            os.mkdir("d", dir_fd=at)
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
            os.symlink("..", "link", dir_fd=at)
            below = os.open("d", os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(at)

    yield make
    subprocess.run(["rm", "-rf", tmp_path], check=True)  # pytest itself cannot remove them


@pytest.mark.usefixtures("few_descriptors")
@pytest.mark.parametrize("depth", [31, 32, 33, 34, 70, 1200])
def test_a_tree_of_any_depth_is_removed_with_few_descriptors(
    tmp_path: Path, depth: int, make_deep: Callable[[Path, int], None]
) -> None:
    make_deep(tmp_path / "run" / "deep", depth)
    (tmp_path / "run" / "deep" / "d" / "second" / "d").mkdir(parents=True)
    opened = os.listdir("/proc/self/fd")
    open_storage(tmp_path / "run").delete_tree("deep")
    assert os.listdir(tmp_path / "run") == []
    assert os.listdir("/proc/self/fd") == opened


def test_removing_stops_where_a_deep_directory_is_moved_away_meanwhile(
    tmp_path: Path,
    outside: Path,
    make_deep: Callable[[Path, int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ".." of the moved directory is one that was not to be removed."""
    make_deep(tmp_path / "tree", 40)
    remove = os.rmdir

    def move_then_remove(name: str, *, dir_fd: int) -> None:
        monkeypatch.setattr(os, "rmdir", remove)
        deep = tmp_path.joinpath("tree", *["d"] * 8)
        os.rename(deep, outside / "inner" / "moved")
        remove(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "rmdir", move_then_remove)
    opened = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="moved while it was being removed"):
        descriptors.remove_tree(tmp_path / "tree")
    assert (outside / "inner" / "file").read_bytes() == b"private"
    assert os.listdir("/proc/self/fd") == opened


def test_listing_refuses_directories_that_are_nested_too_deep(
    tmp_path: Path, make_deep: Callable[[Path, int], None]
) -> None:
    storage = open_storage(tmp_path / "run")
    make_deep(tmp_path / "run" / "bad", 1200)
    storage.put("/".join(["good", *["d"] * 63, "key"]), b"x")
    opened = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="nested more than 64 levels deep") as refused:
        storage.list("bad")
    assert refused.value.errno == errno.ENAMETOOLONG
    assert [entry.size for entry in storage.list("good")] == [1]
    assert os.listdir("/proc/self/fd") == opened


def test_sweeping_leaves_directories_that_are_nested_too_deep(
    tmp_path: Path, make_deep: Callable[[Path, int], None]
) -> None:
    make_deep(tmp_path / "run" / "bad", 1200)
    left = tmp_path / "run" / "good" / f"{TEMPORARY_PREFIX}gone.1.x"
    left.parent.mkdir()
    left.touch()
    os.utime(left, (0, 0))
    assert open_storage(tmp_path / "run").sweep() == 1
    assert not left.exists()


def test_appending_gives_a_link_or_a_second_name_up_for_a_new_file(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "symbolic").symlink_to(outside / "file")
    os.link(outside / "file", tmp_path / "hard")
    for name in ("symbolic", "hard", "new"):
        descriptor = descriptors.open_for_append(tmp_path / name, 1)
        os.write(descriptor, b"log")
        os.close(descriptor)
        assert (tmp_path / name).read_bytes() == b"log"
    assert (outside / "file").read_bytes() == b"private"


def append_to_log(path: str) -> str:
    try:
        os.close(descriptors.open_log(path))
    except OSError as error:
        return type(error).__name__
    return ""


def test_a_log_that_may_not_be_opened_is_not_replaced(shared_directory: Path, other_user: OtherUser) -> None:
    log = shared_directory / "logs" / "rank-0.log"
    log.parent.mkdir()
    log.parent.chmod(0o777)
    log.write_text("what was trained")
    log.chmod(0o644)
    assert other_user.run(append_to_log, str(log)) == "PermissionError"
    assert log.read_text() == "what was trained"


@pytest.mark.parametrize(
    "write",
    [
        lambda run: Journal(open_storage(run), 1),
        lambda run: os.close(descriptors.open_log(f"{run}/logs/attempt-0/rank-0.log")),
        lambda run: Spool(open_storage(run), 1).append([b"x"], 1),
        lambda run: _OpenPart(open_storage(run), 1).append(b"x"),
        lambda run: Lease.take(open_storage(run)).__enter__(),
    ],
    ids=["journal", "log", "metrics", "telemetry", "lease"],
)
def test_files_of_a_run_whose_directory_became_a_link_are_not_written(
    tmp_path: Path, outside: Path, write: Callable[[Path], object]
) -> None:
    before = sorted(outside.rglob("*"))
    run = tmp_path / "run"
    run.symlink_to(outside)
    with pytest.raises((OSError, StorageError)):
        write(run)
    assert sorted(outside.rglob("*")) == before


@given(
    names=st.sets(st.text("ab/", min_size=1, max_size=7).filter(lambda name: "//" not in name), max_size=6)
)
def test_listing_finds_what_was_put_and_nothing_behind_links(
    tmp_path_factory: pytest.TempPathFactory, names: set[str]
) -> None:
    root = tmp_path_factory.mktemp("base")
    storage = open_storage(root / "run")
    put = []
    for name in sorted({name.strip("/") for name in names} - {""}):
        try:
            storage.put(name, b"x")
            put.append(name)
        except OSError:
            continue  # a part of it is a file already
    (root / "run").mkdir(exist_ok=True)
    (root / "other").mkdir()
    (root / "other" / "hidden").write_bytes(b"private")
    (root / "run" / "link").symlink_to(root / "other")
    listed = [entry.key for entry in storage.list()]
    assert [key for key in listed if key != "link"] == sorted(put)
    assert "link/hidden" not in listed


def test_a_run_below_a_storage_path_that_is_a_link_works(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    run = open_storage(tmp_path / "runs").child("run")
    run.put("a/b", b"value")
    assert (tmp_path / "disk" / "run" / "a" / "b").read_bytes() == b"value"
    assert run.get("a/b") == b"value"


def test_every_operation_on_a_linked_directory_is_refused(tmp_path: Path, outside: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.put("real/key", b"value")
    (tmp_path / "run" / "link").symlink_to(outside)
    source = tmp_path / "source"
    source.write_bytes(b"new")
    attempts = {
        "put": lambda: storage.put("link/file", b"new"),
        "put_if_absent": lambda: storage.put_if_absent("link/new", b"new"),
        "put_file": lambda: storage.put_file("link/file", source),
        "put_file_if_absent": lambda: storage.put_file_if_absent("link/new", source),
        "adopt": lambda: storage.adopt("link/file", source),
        "move": lambda: storage.move("real/key", "link/file"),
        "get": lambda: storage.get("link/file"),
        "get_file": lambda: storage.get_file("link/file", tmp_path / "copy"),
        "digest": lambda: storage.digest("link/file"),
        "modified": lambda: storage.modified("link/file"),
        "delete": lambda: storage.delete("link/file"),
        "list": lambda: storage.list("link"),
        "delete_tree": lambda: storage.delete_tree("link/inner"),
    }
    for attempt in attempts.values():
        with pytest.raises(OSError, match="symbolic link"):
            attempt()
    storage.delete_tree("link")
    assert not os.path.lexists(tmp_path / "run" / "link")
    assert (outside / "file").read_bytes() == (outside / "inner" / "file").read_bytes() == b"private"
    assert sorted(os.listdir(outside)) == ["file", "inner"]
