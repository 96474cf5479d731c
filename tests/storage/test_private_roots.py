"""Directories for sockets and scratch files, on a machine where another user has made them first."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.other_user import OtherUser

from powertrain.checkpoint.staging import Staging
from powertrain.config.data import DataConfig
from powertrain.data.loading import scratch
from powertrain.engine.local import runtime_directories
from powertrain.errors import EngineError
from powertrain.run.record import directories, shipping
from powertrain.run.remote import protocol
from powertrain.storage import open_storage
from powertrain.storage.files import ownership, private_roots

NAME = f"powertrain-{os.getuid()}"


@pytest.fixture
def shared(shared_directory: Path) -> Iterator[Path]:
    """The directory for temporary files of all users."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(shared_directory))
        patch.delenv("XDG_RUNTIME_DIR", raising=False)
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(private_roots, "_reported", set())
        patch.setattr(private_roots, "_notices", {})
        yield shared_directory
    tempfile.tempdir = None


@pytest.fixture
def own_files(tmp_path: Path) -> Path:
    """A directory of the user with something in it."""
    directory = tmp_path / "own" / "thesis"
    directory.mkdir(parents=True)
    (directory / "chapter").write_text("private")
    return directory.parent


def make_links(root: str, links: dict[str, str]) -> None:
    for name, target in links.items():
        os.makedirs(os.path.join(root, os.path.dirname(name)), exist_ok=True)
        os.symlink(target, os.path.join(root, name))


def test_a_data_cache_that_leads_elsewhere_deletes_nothing_there(
    shared: Path, own_files: Path, other_user: OtherUser, tmp_path: Path
) -> None:
    storage = open_storage(tmp_path / "runs")
    usual = Path(directories.data_cache_directory(storage, DataConfig(), "mine"))
    assert usual.is_relative_to(shared / NAME)
    if usual.parents[2].exists():
        usual.parents[2].rmdir()
    other_user.run(make_links, str(shared / NAME), {f"data/{usual.parent.name}": str(own_files)})
    blocks = directories.data_cache_directory(storage, DataConfig(), "mine")
    os.close(directories.own_data_cache(blocks))
    assert (own_files / "thesis" / "chapter").read_text() == "private"
    assert not Path(blocks).is_relative_to(shared / NAME)
    assert Path(blocks).parents[2].stat().st_mode & 0o777 == 0o700
    directories.remove_data_cache(blocks)


def test_a_named_cache_directory_whose_subdirectory_is_taken_is_passed_over(
    shared: Path, own_files: Path, other_user: OtherUser, tmp_path: Path
) -> None:
    storage, config = open_storage(tmp_path / "runs"), DataConfig(cache_dir=shared)
    taken = Path(directories.data_cache_directory(storage, config, "mine")).parent
    other_user.run(make_links, str(shared), {taken.name: str(own_files)})
    blocks = directories.data_cache_directory(storage, config, "mine")
    os.close(directories.own_data_cache(blocks))
    assert (own_files / "thesis" / "chapter").read_text() == "private"
    assert [notice for notice in private_roots.take_notices() if str(taken) in notice]
    directories.remove_data_cache(blocks)


def test_scratch_directories_of_datasets_are_made_where_others_cannot_read_them(
    shared: Path, other_user: OtherUser
) -> None:
    other_user.run(os.makedirs, str(shared / NAME / "data"))
    made = scratch.Scratch()
    try:
        Path(made.path, "rows").write_text("private")
        with pytest.raises(PermissionError):
            other_user.run(os.listdir, made.path)
    finally:
        made.close()


def test_a_planted_spool_is_not_shipped(
    shared: Path, own_files: Path, other_user: OtherUser, tmp_path: Path
) -> None:
    storage = open_storage(tmp_path / "bucket")
    spool = Path(directories.spool_directory(storage))
    if spool.parents[1].exists():
        spool.parents[1].rmdir()
    planted = {f"spool/{spool.name}/left/journal/0001-000001.jsonl": str(own_files / "thesis" / "chapter")}
    other_user.run(make_links, str(shared / NAME), planted)
    with shipping.spools_below(directories.spool_directory(storage)) as (_, abandoned):
        for directory in abandoned:
            shipping.Shipped(storage, directory).close()
        assert abandoned == []
    assert storage.list() == []


@contextlib.contextmanager
def listening_as_forged_run(root: str) -> Iterator[None]:
    os.makedirs(f"{root}/forged-1-x")
    card = '{"name": "forged", "path": "/runs/forged", "pid": 1}'
    Path(root, "forged-1-x", "control.json").write_text(card)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(f"{root}/forged-1-x/control.sock")
        server.listen()
        yield


def test_a_forged_run_is_not_listed(shared: Path, other_user: OtherUser) -> None:
    with other_user.holding(listening_as_forged_run, str(shared / NAME)):
        assert [run.card.name for run in protocol.live_runs(private_roots.runtime_root())] == []


def test_a_process_of_another_user_is_not_asked(shared: Path, other_user: OtherUser) -> None:
    elsewhere = shared / "elsewhere"
    with (
        other_user.holding(listening_as_forged_run, str(elsewhere)),
        pytest.raises(PermissionError, match="another user"),
    ):
        list(protocol.send_request(elsewhere / "forged-1-x", protocol.Describe()))


def ask_without_looking(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(b'{"type": "describe"}\n')
            return connection.recv(1000)
    return b""


def test_a_run_does_not_answer_another_user(shared: Path, other_user: OtherUser) -> None:
    directory = runtime_directories.make_runtime_directory("mine")
    card = protocol.Card(name="mine", path="/runs/mine", pid=os.getpid())
    asked = []

    def answer(question: protocol.Request, client: protocol.ControlClient) -> None:
        asked.append(question)
        client.answer("yes")

    try:
        with protocol.listening(directory, card, answer):
            for path in (directory.parent, directory, directory / "control.sock"):
                path.chmod(0o777)  # as if the modes had failed to keep others out
            assert other_user.run(ask_without_looking, str(directory / "control.sock")) == b""
            assert asked == []
            told = list(protocol.send_request(directory, protocol.Describe()))[-1]
            assert isinstance(told, protocol.Answer)
            assert told.ok
    finally:
        runtime_directories.remove_runtime_directory(directory)


def test_a_taken_root_is_passed_over_and_every_process_uses_the_same_other_one(
    shared: Path, other_user: OtherUser
) -> None:
    other_user.run(os.mkdir, str(shared / NAME))
    mine = runtime_directories.make_runtime_directory("mine")
    try:
        assert mine.parent != shared / NAME
        assert private_roots.runtime_root() == mine.parent
        [notice] = private_roots.take_notices()
        assert f"belongs to uid {other_user.uid}" in notice
        assert str(mine.parent) in notice
    finally:
        runtime_directories.remove_runtime_directory(mine)
    assert private_roots.take_notices() == []


def test_a_root_of_one_run_is_swept_only_when_its_processes_are_gone(shared: Path) -> None:
    usual = private_roots.runtime_root()
    with private_roots.root_of_one_run(usual) as first:
        with private_roots.root_of_one_run(usual) as second:
            assert first.is_dir()
            (second / "left").mkdir()  # as a kept spool is
        assert second.is_dir()
        with private_roots.root_of_one_run(usual) as third:
            assert (first.is_dir(), second.exists(), third.is_dir()) == (True, False, True)


def test_checkpoints_that_storage_did_not_take_outlive_the_runs_that_follow(shared: Path) -> None:
    usual = private_roots.lasting_root()
    with private_roots.root_of_one_run(usual) as root:
        staging = root / "staging" / "start"
        (staging / "attempt-0").mkdir(parents=True)
        directories.remove_unless_needed(str(staging), [str(staging / "attempt-0")])
    with private_roots.root_of_one_run(usual):
        assert (staging / "attempt-0").is_dir()


def test_a_node_does_not_use_a_root_that_another_user_has(shared: Path, other_user: OtherUser) -> None:
    root = shared / f"{NAME}-run-0123abcd"
    other_user.run(os.mkdir, str(root), 0o777)
    with pytest.raises(EngineError, match=f"belongs to uid {other_user.uid}"):
        private_roots.hold_root(root)


@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_directory_of_another_user_holds_no_root(shared: Path, other_user: OtherUser, mode: int) -> None:
    other_user.run(os.mkdir, str(shared / "theirs"))
    other_user.run(os.chmod, str(shared / "theirs"), mode)
    assert "belongs to uid" in ownership.why_unsafe(shared / "theirs" / NAME)


def test_a_directory_that_all_can_write_to_without_a_sticky_bit_holds_no_root(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert "no sticky bit" in ownership.why_unsafe(tmp_path / "open" / NAME)


def test_links_count_only_where_others_can_write(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert ownership.why_unsafe(tmp_path / "link" / "x") == ""
    (shared / "link").symlink_to(tmp_path / "real")
    assert "symbolic link" in ownership.why_unsafe(shared / "link" / "x")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    assert "circle" in ownership.why_unsafe(tmp_path / "circle" / "x")


def make_open_directory(path: str) -> None:
    os.mkdir(path)
    os.chmod(path, 0o777)


def test_a_directory_that_another_user_makes_between_check_and_mkdir_is_refused(
    shared: Path, other_user: OtherUser, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = shared / NAME
    check = ownership.why_not_private

    def check_and_lose_the_race(path: Path) -> str:
        reason = check(path)
        if not root.exists():
            other_user.run(make_open_directory, str(root))
        return reason

    monkeypatch.setattr(private_roots, "why_not_private", check_and_lose_the_race)
    with pytest.raises(EngineError, match=f"belongs to uid {other_user.uid}"):
        private_roots.make_private(root)
    with pytest.raises(EngineError, match=f"belongs to uid {other_user.uid}"):
        private_roots.hold_root(root)


def test_a_root_that_a_run_holds_is_not_removed_while_it_is_empty(shared: Path) -> None:
    root = shared / NAME
    staging = root / "staging" / "mine"
    with private_roots.holding_root(staging):
        other = root / "data" / "theirs"
        other.mkdir(parents=True)
        other.rmdir()
        private_roots.remove_empty_parents(other)
        assert [*root.iterdir()] == []
    assert not root.exists()


def test_staging_in_a_root_that_was_replaced_is_refused(shared: Path, other_user: OtherUser) -> None:
    """By a cleaner of temporary files and then another user, in the middle of a run."""
    root = shared / NAME
    staging = Staging(str(root / "staging" / "mine"), 0, 0)
    other_user.run(make_open_directory, str(root))
    with pytest.raises(EngineError, match=f"belongs to uid {other_user.uid}"):
        staging._make_own()
    assert [*root.iterdir()] == []
