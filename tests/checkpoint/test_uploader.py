"""Uploads: files become durable in storage with their hashes, failures are reported and retried."""

from __future__ import annotations

import json
import os
import queue
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import fs

from powertrain.checkpoint import uploader
from powertrain.checkpoint.staging import Staging, source_of
from powertrain.checkpoint.uploader import ShareUploader, pause_before_retry
from powertrain.errors import StorageError
from powertrain.storage import Storage, boundaries, open_storage
from powertrain.storage.adapter import FilesystemStorage
from powertrain.storage.local import digest_of
from powertrain.wire.from_controller import Drop, UploadShare
from powertrain.wire.from_worker import ShareUploaded, UploadTrouble
from powertrain.wire.values import FilePart

Told = queue.SimpleQueue[Any]


class Node:
    """One node's staging area, its storage and an uploader between them."""

    def __init__(
        self,
        root: Path,
        timeout: float = 30.0,
        storage: Storage | None = None,
        lease: tuple[int, str] = (0, ""),
    ) -> None:
        self.storage = storage or open_storage(root / "storage")
        self.staging = Staging(str(root / "storage" / ".staging"), 0, 0)
        self.told: Told = queue.SimpleQueue()
        self.uploader = ShareUploader(
            lambda: self.storage, self.told.put, timeout, pause=lambda seconds: None, lease=lease
        )

    def stage(self, row: int = 1, **files: str) -> UploadShare:
        directory = self.staging.new_directory()
        for name, content in files.items():
            Path(directory, name).write_text(content)
        part = self.staging.stage(row, directory)
        names = [file.name for file in part.files]
        return UploadShare(attempt=0, row=row, rank=0, checkpoint=f"c{row}", staged=part.staged, names=names)

    def answer(self) -> Any:
        return self.told.get(timeout=10)


@pytest.fixture
def node(tmp_path: Path) -> Any:
    node = Node(tmp_path)
    yield node
    node.uploader.close()


def test_a_share_is_renamed_into_storage_with_its_hashes_and_is_gone(node: Node) -> None:
    order = node.stage(a="1", b="22")
    inode = source_of(order.staged, "a").stat().st_ino
    node.uploader.upload(order)
    told = node.answer()
    final = node.storage.local_path("checkpoints/c1/a")
    assert final is not None
    assert final.stat().st_ino == inode
    assert told == ShareUploaded(
        attempt=0,
        row=1,
        rank=0,
        files=[
            FilePart(name=name, size=digest.size, xxh3=digest.xxh3)
            for name in ("a", "b")
            for digest in [digest_of(node.storage.local_path(f"checkpoints/c1/{name}") or "")]
        ],
    )
    assert not os.path.exists(order.staged)


def test_only_the_files_that_count_are_uploaded(node: Node) -> None:
    order = node.stage(a="1", b="2")
    node.uploader.upload(UploadShare(**{**_fields(order), "names": ["b"]}))
    node.answer()
    assert [entry.key for entry in node.storage.list("checkpoints")] == ["checkpoints/c1/b"]
    assert not os.path.exists(order.staged)


def test_a_share_nothing_of_which_counts_is_only_removed(node: Node) -> None:
    order = node.stage(a="1")
    node.uploader.upload(UploadShare(**{**_fields(order), "names": []}))
    assert node.answer().files == []
    assert not os.path.exists(order.staged)


def test_a_link_to_shared_memory_is_copied_and_the_memory_stays(node: Node, tmp_path: Path) -> None:
    order = node.stage(a="1")
    segment = tmp_path / "segment"
    segment.write_text("state")
    os.symlink(segment, source_of(order.staged, "state"))
    node.uploader.upload(UploadShare(**{**_fields(order), "names": ["a", "state"]}))
    node.answer()
    assert node.storage.get("checkpoints/c1/state") == b"state"
    assert segment.exists()


def test_a_repeated_upload_order_is_harmless(node: Node) -> None:
    order = node.stage(a="1")
    node.uploader.upload(order)
    first = node.answer()
    node.uploader.upload(order)  # as after the death of an uploader that had not reported it yet
    assert node.answer() == first


def test_storage_that_refuses_is_tried_again_and_what_it_says_is_reported(node: Node) -> None:
    refusals = iter([OSError(5, "Input/output error"), OSError(28, "No space left on device")])

    def refuse(kind: str, target: str) -> None:
        if kind == "rename" and "checkpoints" in target and (error := next(refusals, None)):
            raise error

    order = node.stage(a="1")
    boundaries.install(refuse)
    try:
        node.uploader.upload(order)
        told = [node.answer() for _ in range(3)]
    finally:
        boundaries.install(None)
    assert [type(message) for message in told] == [UploadTrouble, UploadTrouble, ShareUploaded]
    assert "Input/output error" in told[0].reason
    assert "No space left" in told[1].reason
    assert told[2].error == ""


def test_storage_that_keeps_refusing_is_given_up_at_the_deadline_and_the_share_stays(tmp_path: Path) -> None:
    node = Node(tmp_path, timeout=0.0)
    order = node.stage(a="1")
    _refuse(node, OSError(5, "Input/output error"))
    node.uploader.upload(order)
    told = node.answer()
    node.uploader.close()
    assert "Input/output error" in told.error
    assert source_of(order.staged, "a").read_text() == "1"


def test_a_refusal_that_is_final_is_not_tried_again(node: Node) -> None:
    order = node.stage(a="1")
    _refuse(node, StorageError("The bucket 'b' does not exist."))
    node.uploader.upload(order)
    assert "does not exist" in node.answer().error


def test_a_staged_file_that_is_gone_is_reported_at_once(node: Node) -> None:
    order = node.stage(a="1")
    source_of(order.staged, "a").unlink()
    node.uploader.upload(order)
    assert "No such file" in node.answer().error


def test_a_share_that_was_dropped_is_removed_and_not_reported(tmp_path: Path) -> None:
    node = Node(tmp_path)
    order = node.stage(a="1")
    waiting: queue.SimpleQueue[None] = queue.SimpleQueue()
    go_on: queue.SimpleQueue[None] = queue.SimpleQueue()
    node.uploader._pause = lambda seconds: (waiting.put(None), go_on.get(timeout=10))[1]
    _refuse(node, OSError(5, "Input/output error"))
    node.uploader.upload(order)
    assert isinstance(node.answer(), UploadTrouble)
    waiting.get(timeout=10)
    node.uploader.drop(Drop(attempt=0, row=1, rank=0, staged=order.staged))
    go_on.put(None)
    node.uploader.close()
    assert not os.path.exists(order.staged)
    assert node.told.empty()


def test_a_share_that_stays_can_be_given_back_after_it_was_uploaded(node: Node, tmp_path: Path) -> None:
    order = msgspec.structs.replace(node.stage(a="1", b="22"), keeps=True)
    node.uploader.upload(order)
    assert not node.answer().error
    assert node.storage.get("checkpoints/c1/b") == b"22"

    back = tmp_path / "users" / "directory"
    node.uploader.drop(Drop(attempt=0, row=1, rank=0, staged=order.staged, back=str(back)))
    assert {path.name: path.read_text() for path in back.iterdir()} == {"a": "1", "b": "22"}
    assert not os.path.exists(order.staged)


def put_lease(storage: Storage, token: str) -> None:
    storage.put("lease/0001", json.dumps({"token": token}).encode())


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploader, "_THREADS", 1)


@pytest.mark.usefixtures("one_thread")
def test_no_further_file_of_a_share_goes_into_a_directory_that_another_start_has_made(tmp_path: Path) -> None:
    node = Node(tmp_path, lease=(1, "mine"))
    put_lease(node.storage, "mine")
    order = node.stage(a="1", b="2", c="3")

    def replace_run(kind: str, target: str) -> None:
        if kind == "rename" and target.endswith("c1/b"):
            boundaries.install(None)
            node.storage.delete_tree("checkpoints")
            put_lease(node.storage, "another")
            node.storage.put("checkpoints/c1/c", b"another start's")

    boundaries.install(replace_run)
    try:
        node.uploader.upload(order)
        while isinstance(told := node.answer(), UploadTrouble):
            pass
    finally:
        boundaries.install(None)
        node.uploader.close()
    assert "taken over" in told.error
    assert [entry.key for entry in node.storage.list("checkpoints")] == ["checkpoints/c1/c"]
    assert node.storage.get("checkpoints/c1/c") == b"another start's"


@pytest.mark.usefixtures("one_thread")
def test_a_lease_that_cannot_be_read_is_read_again_before_anything_is_uploaded(tmp_path: Path) -> None:
    node = Node(tmp_path, lease=(1, "mine"))
    put_lease(node.storage, "another")
    refusals, get = iter([OSError(5, "Input/output error")]), node.storage.get

    def refuse_once(key: str, **options: Any) -> bytes:
        if error := next(refusals, None):
            raise error
        return get(key, **options)

    node.storage.get = refuse_once  # type: ignore[method-assign]
    node.uploader.upload(node.stage(a="1"))
    trouble, told = node.answer(), node.answer()
    node.uploader.close()
    assert "Input/output error" in trouble.reason
    assert "taken over" in told.error
    assert node.storage.list("checkpoints") == []


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("interval", "looks"), [(60.0, 1), (0.0, 3)])
def test_a_store_is_asked_for_the_lease_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float, looks: int
) -> None:
    monkeypatch.setattr(uploader, "_LEASE_INTERVAL_S", interval)
    storage = FilesystemStorage(fs.LocalFileSystem(), str(tmp_path / "storage"))
    node = Node(tmp_path, storage=storage, lease=(1, "mine"))
    put_lease(storage, "mine")
    asked, get = [], storage.get

    def counted(key: str, **options: Any) -> bytes:
        asked.append(key)
        return get(key, **options)

    monkeypatch.setattr(storage, "get", counted)
    node.uploader.upload(node.stage(a="1", b="2", c="3"))
    assert node.answer().error == ""
    node.uploader.close()
    assert asked == ["lease/0001"] * looks


@given(st.integers(0, 1000), st.floats(0, 1))
def test_pauses_grow_to_a_limit(tries: int, chance: float) -> None:
    pause = pause_before_retry(tries, chance)
    assert 0.0 < pause <= 15.0
    assert pause <= pause_before_retry(tries + 1, 1.0)


def _fields(order: UploadShare) -> dict[str, Any]:
    return {name: getattr(order, name) for name in order.__struct_fields__}


def _refuse(node: Node, error: Exception) -> None:
    def adopt(*_: Any) -> None:
        raise error

    node.storage.adopt = adopt  # type: ignore[attr-defined]
