"""Every element is written once, each rank finds its share alone, and any number of ranks reads what others wrote."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from powertrain.checkpoint.state import files
from powertrain.checkpoint.state import pieces as state_pieces
from powertrain.checkpoint.state.dcp import StateReader, StateWriter, read_into
from powertrain.checkpoint.state.files import FileLayout, copy_all, write_file
from powertrain.checkpoint.state.pieces import SharePlanner, TensorPiece, cut_rows, file_name
from powertrain.errors import CheckpointError

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPES = st.sampled_from(
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex128]
)


def numbers(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))) % 120).to(dtype).reshape(shape)


def write(directory: Path, state: dict[str, torch.Tensor], world_size: int) -> list[FileLayout]:
    """Write ``state``, which all ranks have alike, as each rank would."""
    layouts = []
    for rank in range(world_size):
        planner = SharePlanner(rank, world_size)
        planner.set_up_planner(state, None, rank == 0)
        planner.create_local_plan()
        layout = FileLayout(planner.pieces.values(), rank, world_size)
        write_file(
            directory / file_name(rank), layout, [piece.of(state[piece.name]) for piece in layout.pieces]
        )
        layouts.append(layout)
    return layouts


# -- shares


@given(
    tensors=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3 * 2**20)), max_size=12),
    parts=st.integers(1, 9),
)
def test_every_row_belongs_to_exactly_one_part(tensors: list[tuple[int, int]], parts: int) -> None:
    taken = [cut_rows(tensors, parts, part) for part in range(parts)]
    for number, (rows, _) in enumerate(tensors):
        owners = [row for cuts in taken for row in range(*cuts[number])]
        assert sorted(owners) == list(range(rows))


@given(
    tensors=st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 2**20)), min_size=1, max_size=40),
    parts=st.integers(1, 9),
)
def test_parts_differ_by_no_more_than_what_is_not_cut(tensors: list[tuple[int, int]], parts: int) -> None:
    total = sum(rows * width for rows, width in tensors)
    for part in range(parts):
        cuts = cut_rows(tensors, parts, part)
        size = sum((stop - start) * width for (start, stop), (_, width) in zip(cuts, tensors, strict=True))
        assert abs(size - total / parts) <= 2 * state_pieces._CUT_FROM_BYTES


@given(
    state=st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(SHAPES, DTYPES), max_size=6),
    world_size=st.integers(1, 5),
    cut_from=st.sampled_from([1, 16, 2**22]),
)
def test_what_any_number_of_ranks_wrote_reads_back_whole(
    state: dict[str, Any], world_size: int, cut_from: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("state")
    tensors = {name: numbers(*form) for name, form in state.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_pieces, "_CUT_FROM_BYTES", cut_from)
        layouts = write(directory, tensors, world_size)
    written = sum(piece.bytes for layout in layouts for piece in layout.pieces)
    assert written == sum(tensor.nbytes for tensor in tensors.values())
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_into(StateReader(directory), targets)
    assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
    shutil.rmtree(directory)


def test_a_rank_computes_the_same_share_whatever_order_its_tensors_come_in() -> None:
    state = {name: numbers((7, size)) for name, size in (("a", 3), ("b", 5), ("c", 400_000))}

    def pieces(names: str) -> dict[Any, TensorPiece]:
        planner = SharePlanner(1, 3)
        planner.set_up_planner({name: state[name] for name in names}, None, False)
        planner.create_local_plan()
        return planner.pieces

    assert pieces("abc") == pieces("cba")
    assert pieces("abc")


# -- the form of a file


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    state = {
        "model.weight": numbers((4, 3)),
        "model.half": numbers((2,), torch.bfloat16),
        "step": torch.tensor(7),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 5),
    }
    write(tmp_path, state, 1)
    loaded = load_file(tmp_path / file_name(0))
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)


def test_parts_of_a_tensor_are_named_by_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_pieces, "_CUT_FROM_BYTES", 1)
    write(tmp_path, {"weight": numbers((4, 3))}, 2)
    for rank, rows in ((0, "0:2"), (1, "2:4")):
        with safe_open(tmp_path / file_name(rank), "pt") as file:
            assert list(file.keys()) == [f"weight[{rows},0:3]"]
            table = json.loads(file.metadata()["powertrain"])
            assert (table["rank"], table["world_size"]) == (rank, 2)


def test_the_header_depends_on_the_form_alone() -> None:
    def layout(value: float) -> FileLayout:
        planner = SharePlanner(0, 1)
        planner.set_up_planner({"a": torch.full((3,), value), "b": torch.full((5,), value)}, None, True)
        planner.create_local_plan()
        return FileLayout(planner.pieces.values(), 0, 1)

    assert layout(1.0).header == layout(2.0).header
    assert len(layout(1.0).header) % 64 == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_copies_reach_their_places_however_the_source_lies_in_memory(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "THREAD_FROM_BYTES", 1)
    large = torch.rand(1000, 700)
    sources = [large, large.t(), large[::2], torch.tensor(3.5), large.to(torch.complex64).conj(), large[:0]]
    views = [torch.full(source.shape, -1, dtype=source.dtype) for source in sources]
    copy_all(views, sources, threads)
    assert all(torch.equal(view, source) for view, source in zip(views, sources, strict=True))


# -- torch's own entry points


def test_dcp_save_and_load_work_with_our_storage(tmp_path: Path) -> None:
    state = {"weight": numbers((6, 2)), "bias": numbers((3,))}
    targets = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group
        dcp.save(state, storage_writer=StateWriter(tmp_path), no_dist=True)
        dcp.load(targets, storage_reader=StateReader(tmp_path), no_dist=True)
    assert all(torch.equal(targets[name], state[name]) for name in state)
    assert [path.name for path in tmp_path.iterdir()] == [file_name(0)], (
        "no metadata of torch's, which is a pickle"
    )


def test_dcp_save_of_what_is_not_a_tensor_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(dcp.api.CheckpointException, match="nothing has to be pickled"):
            dcp.save({"epoch": 3}, storage_writer=StateWriter(tmp_path), no_dist=True)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    planner = SharePlanner(0, 1)
    planner.set_up_planner({"table": torch.eye(3).to_sparse()}, None, True)
    with pytest.raises(CheckpointError, match=r"'table' is a sparse tensor.*to_dense"):
        planner.create_local_plan()


# -- damage


def damaged(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        StateReader(directory).read_metadata()
    return str(caught.value)


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(state_pieces, "_CUT_FROM_BYTES", 1)
    write(tmp_path, {"weight": numbers((4, 3)), "bias": numbers((8,))}, 2)
    return tmp_path


def test_a_missing_rank_is_noticed(two_ranks: Path) -> None:
    (two_ranks / file_name(1)).unlink()
    assert "rank-00001.safetensors is missing" in damaged(two_ranks)


def test_a_file_that_is_too_short_is_noticed(two_ranks: Path) -> None:
    path = two_ranks / file_name(1)
    path.write_bytes(path.read_bytes()[:-1])
    assert "by its header it should have" in damaged(two_ranks)


def test_a_file_of_another_save_is_noticed(two_ranks: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    write(other, {"weight": numbers((4, 3)), "bias": numbers((8,))}, 3)
    shutil.copy(other / file_name(1), two_ranks / file_name(1))
    assert "another save" in damaged(two_ranks)


def test_a_part_that_no_rank_wrote_is_noticed(two_ranks: Path) -> None:
    weight = numbers((4, 3))
    planner = SharePlanner(1, 2)
    planner.set_up_planner({"weight": weight}, None, False)  # rank 1 as if it had no bias
    planner.create_local_plan()
    layout = FileLayout(planner.pieces.values(), 1, 2)
    (two_ranks / file_name(1)).unlink()
    write_file(two_ranks / file_name(1), layout, [piece.of(weight) for piece in layout.pieces])
    assert re.search(r"of the tensor 'weight' \d+ of 12 elements are there", damaged(two_ranks))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        struct.pack("<Q", 2**60),
        struct.pack("<Q", 4) + b"null",
        struct.pack("<Q", 20) + b'{"__metadata__": {}}',
        struct.pack("<Q", 5) + b"\xff\xfe{}[",
    ],
)
def test_something_else_in_place_of_a_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / file_name(0)).write_bytes(content)
    assert "the header of rank-00000.safetensors cannot be read" in damaged(tmp_path)


@contextlib.contextmanager
def released_later(path: Path) -> Iterator[None]:
    """Whoever waits for a writer of the pipe goes on after a while, and finds nothing."""

    def release() -> None:
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    timer = threading.Timer(5, release)
    timer.start()
    yield
    timer.cancel()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
@pytest.mark.parametrize("behind_link", [False, True])
def test_a_pipe_or_a_directory_in_place_of_a_file_is_refused_at_once(
    two_ranks: Path, make: Callable[[Path], None], behind_link: bool
) -> None:
    path = two_ranks / file_name(1)
    path.unlink()
    other = two_ranks / "other" if behind_link else path
    make(other)
    if behind_link:
        path.symlink_to(other)
    with released_later(other):
        assert re.search(
            r"loaded: rank-00001.safetensors cannot be read \((not a regular file|Is a directory)\)",
            damaged(two_ranks),
        )


def test_a_file_of_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr(files, "SCHEMA", 99)
        write(tmp_path, {"weight": numbers((2,))}, 1)
    assert "schema 99" in damaged(tmp_path)


def test_parts_that_overlap_are_noticed() -> None:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )

    def chunk(offset: int, size: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([offset]), torch.Size([size]))

    def tensor(*chunks: ChunkStorageMetadata) -> TensorStorageMetadata:
        return TensorStorageMetadata(TensorProperties(), torch.Size([6]), list(chunks))

    assert files.hole_in(tensor(chunk(0, 2), chunk(2, 4))) is None
    assert files.hole_in(tensor(chunk(0, 3), chunk(2, 3))) == "two parts overlap"
    assert "outside" in str(files.hole_in(tensor(chunk(0, 3), chunk(4, 3))))
