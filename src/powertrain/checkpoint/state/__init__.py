"""Sharded tensors on disk: who writes which part, one safetensors file per rank, and reading at any world size.

::

    state/rank-00000.safetensors    the tensors of rank 0; readable by any safetensors tool
    state/rank-00000.json           what is not a tensor, and which objects there are (powertrain.checkpoint.state.objects)

Every rank finds its share alone, without a collective; where ranks may hold different tensors, they exchange what they
hold before (``powertrain.checkpoint.parallel``). A shard is written by the rank that has it. What several
ranks have alike is laid end to end on one line of bytes, and the line is cut into as many pieces as there are ranks
that have it; large tensors are cut between rows, small ones stay whole. The header of each file says which part of
which tensor each entry is, so a reader joins the headers of all files into torch's own checkpoint metadata.

Torch's distributed checkpoint plans both ways (:class:`SharePlanner`, ``DefaultLoadPlanner``); the storage is ours
(:class:`StateWriter`, :class:`StateReader`), so ``dcp.save`` and ``dcp.load`` work with these files too. Nothing is
pickled.
"""

from __future__ import annotations

import bisect
import ctypes
import json
import os
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, Partial
from torch.futures import Future

from powertrain.errors import CheckpointError
from powertrain.storage.files.descriptors import open_regular

#: The directory of a checkpoint in which all of this lies.
STATE_DIRECTORY = "state"
#: The version of the files' form that this code writes and reads.
SCHEMA = 1
#: The key of our table among the notes of a safetensors header.
_TABLE = "powertrain"
#: Tensors smaller than this are never cut.
_CUT_FROM_BYTES = 4 * 2**20
#: From this size on bytes are copied by the C library, which is faster than torch's own loop.
_BLOCK_FROM_BYTES = 64 * 2**10
#: Another thread is worth its start when it has at least so much to copy.
_THREAD_FROM_BYTES = 4 * 2**20
#: Headers end on a multiple of this, so that every tensor is aligned for its type.
_ALIGNMENT = 64
#: Beyond this a header is not one that anybody wrote (safetensors' own limit).
_HEADER_LIMIT = 100_000_000

#: What safetensors calls each type; others are written as bytes, their type in our table.
_DTYPE_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


def file_name(rank: int) -> str:
    """The name of a rank's tensors inside :data:`STATE_DIRECTORY`."""
    return f"rank-{rank:05d}.safetensors"


# --------------------------------------------------------------------------- who writes what


def cut_rows(tensors: Sequence[tuple[int, int]], parts: int, part: int) -> list[tuple[int, int]]:
    """Which rows [start, stop) of each tensor, given as (rows, bytes of a row), belong to ``part`` of ``parts``.

    Over all parts every row of every tensor comes exactly once, and the parts' bytes differ by little more than
    the largest piece that is not cut. Each tensor has at least one row; a row may have no bytes.
    """
    total = sum(rows * width for rows, width in tensors)
    cuts = [total * number // parts for number in range(parts + 1)]
    taken, base = [], 0
    for rows, width in tensors:
        size = rows * width
        if size < _CUT_FROM_BYTES:
            owner = min(parts - 1, bisect.bisect_right(cuts, base + size // 2) - 1)
            taken.append((0, rows) if owner == part else (rows, rows))
        else:
            # The rows whose first byte lies between this part's cuts.
            start, stop = (min(rows, max(0, -((base - cut) // width))) for cut in cuts[part : part + 2])
            taken.append((start, stop))
        base += size
    return taken


def holders(tensor: torch.Tensor, world_size: int) -> tuple[int, ...]:
    """The ranks that have the same part of ``tensor`` as this one, in a fixed order.

    All ranks for a plain tensor. For a DTensor those that differ from this rank only where it is replicated; empty
    where this rank is not of its mesh.
    """
    if not isinstance(tensor, DTensor):
        return tuple(range(world_size))
    mesh = tensor.device_mesh
    here = mesh.get_coordinate()
    if here is None:
        return ()
    place = tuple(
        slice(None) if placement.is_replicate() else position
        for position, placement in zip(here, tensor.placements, strict=True)
    )
    return tuple(int(rank) for rank in mesh.mesh[place].flatten().tolist())


@dataclass(frozen=True)
class Piece:
    """Rows of this rank's own part of one tensor, as they go into its file."""

    name: str
    dtype: torch.dtype
    #: Shape of the whole tensor, and where in it this piece lies.
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    #: Which rows of this rank's local tensor it is; ``None`` for all.
    rows: tuple[int, int] | None = None
    #: True where the tensor was a DTensor.
    sharded: bool = False

    @property
    def bytes(self) -> int:
        return _volume(self.sizes) * self.dtype.itemsize

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's own where the tensor is whole."""
        if self.sizes == self.shape:
            return self.name
        where = ",".join(
            f"{offset}:{offset + size}" for offset, size in zip(self.offsets, self.sizes, strict=True)
        )
        return f"{self.name}[{where}]"

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This piece of ``tensor``, without a copy."""
        local = local_part(tensor)
        return local if self.rows is None else local[self.rows[0] : self.rows[1]]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of ``tensor``. To be called without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SharePlanner(DefaultSavePlanner):
    """Torch's save planner, without its collective: what several ranks have alike is shared out by :func:`cut_rows`.

    ``own`` names plain tensors that are this rank's alone; every rank writes its own. ``together`` has the ranks that
    hold a part, by its name, offsets and sizes; a part that is not in it is held by those that :func:`holders` finds.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        own: Iterable[str] = (),
        together: Mapping[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, ...]] | None = None,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._rank, self._world_size, self._own = rank, world_size, frozenset(own)
        self._together = together or {}
        self.pieces: dict[MetadataIndex, Piece] = {}

    def create_local_plan(self) -> SavePlan:
        items = create_default_local_save_plan(self.state_dict, self.is_coordinator).items
        lines: dict[tuple[int, ...], list[Piece]] = {}
        for item in items:
            tensor = self.state_dict[item.index.fqn]
            _refuse_unwritable(item, tensor)
            piece = piece_of(item, tensor)
            lines.setdefault(self._holders_of(piece, tensor), []).append(piece)
        pieces = [piece for together, line in lines.items() for piece in self._share(line, together)]
        by_name = {item.index.fqn: item for item in items}
        plan = []
        for piece in pieces:
            index = MetadataIndex(piece.name, piece.offsets)
            self.pieces[index] = piece
            plan.append(_narrowed(by_name[piece.name], index, piece))
        self.plan = SavePlan(plan)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.pieces[write_item.index].of(self.state_dict[write_item.index.fqn]).detach()

    def _holders_of(self, piece: Piece, tensor: torch.Tensor) -> tuple[int, ...]:
        if piece.name in self._own:
            return (self._rank,)
        together = self._together.get((piece.name, piece.offsets, piece.sizes))
        return holders(tensor, self._world_size) if together is None else together

    def _share(self, line: list[Piece], together: tuple[int, ...]) -> list[Piece]:
        """This rank's cut of the pieces that the ranks ``together`` have alike."""
        line = sorted(line, key=lambda piece: piece.name)
        sizes = [(_rows(piece), piece.bytes // _rows(piece)) for piece in line]
        cuts = cut_rows(sizes, len(together), together.index(self._rank))
        shares = [_cut(piece, start, stop) for piece, (start, stop) in zip(line, cuts, strict=True)]
        return [piece for piece in shares if piece is not None]


def _rows(piece: Piece) -> int:
    """How many rows a piece can be cut into; one where it has no dimension or no row."""
    return max(1, piece.sizes[0]) if piece.sizes else 1


def _cut(piece: Piece, start: int, stop: int) -> Piece | None:
    """Rows [start, stop) of a piece; ``None`` where nothing is left to write."""
    if start >= stop:
        return None
    if not piece.bytes:  # a tensor without elements is written; a rank's empty share of another is not
        return None if _volume(piece.shape) else piece
    if (start, stop) == (0, _rows(piece)):
        return piece
    return replace(
        piece,
        offsets=(piece.offsets[0] + start, *piece.offsets[1:]),
        sizes=(stop - start, *piece.sizes[1:]),
        rows=(start, stop),
    )


def piece_of(item: WriteItem, tensor: torch.Tensor) -> Piece:
    """The whole of what this rank has of ``tensor``, which ``item`` of torch's plan describes."""
    data = item.tensor_data
    assert data is not None
    return Piece(
        name=item.index.fqn,
        dtype=data.properties.dtype,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        sharded=isinstance(tensor, DTensor),
    )


def _narrowed(item: WriteItem, index: MetadataIndex, piece: Piece) -> WriteItem:
    assert item.tensor_data is not None
    chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
    return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def _refuse_unwritable(item: WriteItem, tensor: Any) -> None:
    name = item.index.fqn
    if item.type == WriteItemType.BYTE_IO:
        raise CheckpointError(
            f"{name!r} is a {type(tensor).__name__} and not a tensor: only tensors go into these files, so that "
            "nothing has to be pickled. powertrain.save_state keeps other values as well."
        )
    if isinstance(tensor, DTensor) and any(isinstance(placement, Partial) for placement in tensor.placements):
        raise CheckpointError(
            f"{name!r} is a DTensor whose parts still have to be added up (placements {tensor.placements}). Call "
            "redistribute() on it before it is saved."
        )
    if local_part(tensor.detach()).layout != torch.strided:
        raise CheckpointError(
            f"{name!r} is a sparse tensor ({tensor.layout}), which cannot be saved. Save tensor.to_dense()."
        )


def _volume(sizes: Sequence[int]) -> int:
    volume = 1
    for size in sizes:
        volume *= size
    return volume


# --------------------------------------------------------------------------- the form of a file


class Layout:
    """Where each piece lies in a rank's file, and the file's header. Fixed as long as the pieces are."""

    def __init__(self, pieces: Iterable[Piece], rank: int, world_size: int) -> None:
        # Wide types first: then each begins at a multiple of its own size without a hole between.
        self.pieces = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name, piece.offsets))
        header: dict[str, Any] = {"__metadata__": {}}
        table: dict[str, Any] = {"schema": SCHEMA, "rank": rank, "world_size": world_size, "pieces": {}}
        self.starts: list[int] = []
        end = 0
        for piece in self.pieces:
            self.starts.append(end)
            header[piece.key] = _entry(piece, end)
            table["pieces"][piece.key] = _row_of_table(piece)
            end += piece.bytes
        header["__metadata__"] = {"format": "pt", _TABLE: json.dumps(table)}
        self.header = _padded(json.dumps(header).encode())
        self.size = len(self.header) + end

    def views(self, content: torch.Tensor) -> list[torch.Tensor]:
        """The place of each piece in ``content``, the bytes of the whole file."""
        data = content[len(self.header) :]
        return [
            data[start : start + piece.bytes].view(piece.dtype).view(piece.sizes)
            for piece, start in zip(self.pieces, self.starts, strict=True)
        ]


def _entry(piece: Piece, start: int) -> dict[str, Any]:
    """A line of the safetensors header."""
    known = _DTYPE_NAMES.get(piece.dtype)
    shape = list(piece.sizes) if known is not None else [piece.bytes]
    return {"dtype": known or "U8", "shape": shape, "data_offsets": [start, start + piece.bytes]}


def _row_of_table(piece: Piece) -> list[Any]:
    dtype = str(piece.dtype).removeprefix("torch.")
    return [piece.name, dtype, piece.shape, piece.offsets, piece.sizes, piece.sharded]


def _padded(header: bytes) -> bytes:
    length = -(-(8 + len(header)) // _ALIGNMENT) * _ALIGNMENT - 8
    return struct.pack("<Q", length) + header.ljust(length)


def copy_all(views: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], threads: int = 1) -> None:
    """Copy each source into its view. Afterwards the sources may be changed.

    Copies from a GPU run on a stream of their own, one after the other without waiting in between; at full speed
    where the views are pinned memory. Large ones in main memory are copied by ``threads`` threads together.
    """
    blocks: list[tuple[int, int, int]] = []
    on_gpu: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for view, source in zip(views, sources, strict=True):
            if source.is_cuda:
                on_gpu.setdefault(source.device, []).append((view, source))
            elif view.nbytes >= _BLOCK_FROM_BYTES and _is_plain_memory(source):
                blocks.append((view.data_ptr(), source.data_ptr(), view.nbytes))
            else:
                view.copy_(source)
        streams = [_begin_copies(device, pairs) for device, pairs in on_gpu.items()]
    _move_blocks(blocks, threads)
    for stream in streams:
        stream.synchronize()


def _begin_copies(device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.cuda.Stream:
    """Queue the copies off one GPU; they are done when the stream is."""
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        for view, source in pairs:
            view.copy_(source, non_blocking=True)
    return stream


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """True where the tensor's bytes, in order, are its values."""
    return (
        tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    )


def _move_blocks(blocks: list[tuple[int, int, int]], threads: int) -> None:
    """Copy (to, from, bytes) blocks; each thread copies one slice of every block.

    The threads live for this one copy: a process that forks has none to lose, unlike with torch's own.
    """

    def move(part: int) -> None:
        for target, source, size in blocks:
            start, stop = size * part // threads, size * (part + 1) // threads
            ctypes.memmove(target + start, source + start, stop - start)

    threads = min(threads, 1 + sum(size for _, _, size in blocks) // _THREAD_FROM_BYTES)
    others = [threading.Thread(target=move, args=(part,)) for part in range(1, threads)]
    for thread in others:
        thread.start()
    move(0)
    for thread in others:
        thread.join()


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream for copies off this device, which sees all that was computed so far."""
    if device not in _side_streams:
        make: Any = torch.cuda.Stream
        _side_streams[device] = make(device)
    stream = _side_streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def write_file(path: str | os.PathLike[str], layout: Layout, sources: Sequence[torch.Tensor]) -> None:
    """Write a rank's file as a plain file."""
    with open(path, "xb", buffering=0) as file, torch.no_grad():
        _write_all(file, memoryview(layout.header))
        for source in sources:
            plain = source.detach().cpu().contiguous().flatten().view(torch.uint8)
            _write_all(file, plain.numpy().data)


def _write_all(file: Any, content: memoryview) -> None:
    while len(content):
        content = content[file.write(content) :]


# --------------------------------------------------------------------------- torch's storage interface


class StateWriter(StorageWriter):
    """Writes what a plan of torch's distributed checkpoint gives to this rank into ``directory``."""

    def __init__(self, directory: str | os.PathLike[str], rank: int = 0, world_size: int = 1) -> None:
        self._directory, self._rank, self._world_size = Path(directory), rank, world_size

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._directory = Path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        sources = {}
        for item in plan.items:
            source = planner.resolve_data(item)
            _refuse_unwritable(item, source)
            sources[piece_of(item, source)] = source
        layout = Layout(sources, self._rank, self._world_size)
        path = self._directory / file_name(self._rank)
        path.unlink(missing_ok=True)
        write_file(path, layout, [sources[piece] for piece in layout.pieces])
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(index=item.index, size_in_bytes=_item_bytes(item), storage_data=None)
                for item in plan.items
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to write: each file says itself what it holds."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return _volume(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class _Stored:
    """Where one piece lies: a file and the bytes [start, stop) in it."""

    path: Path
    start: int
    stop: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


class StateReader(StorageReader):
    """Reads the tensors in ``directory``, written by any number of ranks, as torch's load plans want them."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._directory = Path(checkpoint_id)
            self.__dict__.pop("files", None)

    @cached_property
    def files(self) -> StateFiles:
        """What lies in the directory; raises :class:`CheckpointError` where that is not a whole state."""
        return StateFiles.read(self._directory)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.files.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: a reader of one directory is ready."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        opened: dict[Path, torch.Tensor] = {}
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(f"{item.dest_index.fqn!r} is not a tensor in {self._directory}.")
            stored = self.files.stored[(item.storage_index.fqn, tuple(item.storage_index.offset or ()))]
            saved = _mapped(stored, opened)
            for dimension, (offset, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                saved = saved.narrow(dimension, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(saved)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isdir(checkpoint_id)


def _mapped(stored: _Stored, opened: dict[Path, torch.Tensor]) -> torch.Tensor:
    """The stored piece as a tensor over its file's pages."""
    if stored.start == stored.stop:
        return torch.empty(stored.sizes, dtype=stored.dtype)
    if stored.path not in opened:
        size = stored.path.stat().st_size
        opened[stored.path] = torch.from_file(str(stored.path), shared=False, size=size, dtype=torch.uint8)
    return opened[stored.path][stored.start : stored.stop].view(stored.dtype).view(stored.sizes)


@dataclass(frozen=True)
class StateFiles:
    """The joined headers of all ranks' files."""

    world_size: int
    metadata: Metadata
    stored: Mapping[tuple[str, tuple[int, ...]], _Stored]
    #: Names of tensors that were DTensors.
    sharded: frozenset[str]

    @classmethod
    def read(cls, directory: Path) -> StateFiles:
        """Raises :class:`CheckpointError` where a file or a part of a tensor is missing or damaged."""
        first = _read_table(directory, 0)
        world_size = first["world_size"]
        tensors: dict[str, TensorStorageMetadata] = {}
        stored: dict[tuple[str, tuple[int, ...]], _Stored] = {}
        sharded = set()
        for rank in range(world_size):
            table = first if rank == 0 else _read_table(directory, rank)
            if table["world_size"] != world_size:
                raise _damaged(directory, f"rank {rank}'s file is of another save than rank 0's")
            for piece, place in table["stored"]:
                if stored.setdefault((piece.name, piece.offsets), place) is not place:
                    continue  # two groups of ranks had the same part, and each has written it
                _join(tensors, piece, directory)
                if piece.sharded:
                    sharded.add(piece.name)
        for name, tensor in tensors.items():
            if (hole := hole_in(tensor)) is not None:
                raise _damaged(directory, f"of the tensor {name!r} {hole}")
        metadata = Metadata(
            state_dict_metadata=dict(tensors), storage_meta=StorageMeta(checkpoint_id=str(directory))
        )
        return cls(world_size, metadata, stored, frozenset(sharded))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name."""
        return {name: tuple(tensor.size) for name, tensor in self._tensors()}

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of each tensor by name."""
        return {name: tensor.properties.dtype for name, tensor in self._tensors()}

    def _tensors(self) -> list[tuple[str, TensorStorageMetadata]]:
        return [
            (name, cast(TensorStorageMetadata, one))
            for name, one in self.metadata.state_dict_metadata.items()
        ]


def _join(tensors: dict[str, TensorStorageMetadata], piece: Piece, directory: Path) -> None:
    whole = tensors.setdefault(
        piece.name,
        TensorStorageMetadata(
            properties=TensorProperties(dtype=piece.dtype), size=torch.Size(piece.shape), chunks=[]
        ),
    )
    if tuple(whole.size) != piece.shape or whole.properties.dtype != piece.dtype:
        raise _damaged(
            directory,
            f"the tensor {piece.name!r} is {whole.properties.dtype} of shape {tuple(whole.size)} in one file and "
            f"{piece.dtype} of shape {piece.shape} in another",
        )
    chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
    whole.chunks.append(chunk)


def hole_in(tensor: TensorStorageMetadata) -> str | None:
    """Why the chunks do not make up the whole tensor, ``None`` where they do.

    Chunks with distinct places inside the tensor, that do not overlap and together have its volume, fill it.
    """
    chunks = sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets))
    for chunk in chunks:
        spans = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in spans):
            return f"a part lies outside its shape {tuple(tensor.size)}"
    here, needed = sum(_volume(chunk.sizes) for chunk in chunks), _volume(tensor.size)
    if here != needed:
        return f"{here:,} of {needed:,} elements are there"
    if any(_overlap(one, other) for one, other in _neighbours(chunks)):
        return "two parts overlap"
    return None


def _neighbours(
    chunks: list[ChunkStorageMetadata],
) -> Iterable[tuple[ChunkStorageMetadata, ChunkStorageMetadata]]:
    """Pairs that could overlap: in the order of their offsets, until one begins after the other's last row."""
    for number, chunk in enumerate(chunks):
        if not chunk.offsets:
            yield from ((chunk, other) for other in chunks[number + 1 :])
            continue
        end = chunk.offsets[0] + chunk.sizes[0]
        for other in chunks[number + 1 :]:
            if other.offsets[0] >= end:
                break
            yield chunk, other


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in spans)


def _read_table(directory: Path, rank: int) -> dict[str, Any]:
    """Our table in the header of a rank's file, with ``stored``: each piece and where it lies."""
    path = directory / file_name(rank)
    try:
        with open(open_regular(path), "rb") as file:  # a staged file is a link to its segment
            size = os.fstat(file.fileno()).st_size
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length <= _HEADER_LIMIT else {}
        table: dict[str, Any] = json.loads(header["__metadata__"][_TABLE])
        if table["schema"] != SCHEMA:
            raise CheckpointError(
                f"{path} has schema {table['schema']!r}, and this version of Powertrain reads schema {SCHEMA}. Use "
                "the version that wrote it."
            )
        table["stored"] = [
            _stored_piece(path, 8 + length, key, row, header) for key, row in table["pieces"].items()
        ]
        end = max((place.stop for _, place in table["stored"]), default=8 + length)
    except FileNotFoundError:
        missing = f"{path.name} is missing" if rank else f"there is no {path.name} in it"
        raise _damaged(directory, missing) from None
    except OSError as error:
        raise _damaged(directory, f"{path.name} cannot be read ({error.strerror or error})") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(directory, f"the header of {path.name} cannot be read ({error!r})") from error
    if size != end:
        raise _damaged(directory, f"{path.name} has {size:,} bytes, and by its header it should have {end:,}")
    return table


def _stored_piece(
    path: Path, data: int, key: str, row: list[Any], header: dict[str, Any]
) -> tuple[Piece, _Stored]:
    name, dtype_name, shape, offsets, sizes, sharded = row
    dtype = getattr(torch, dtype_name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name} is not a tensor dtype")
    piece = Piece(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), sharded=bool(sharded))
    start, stop = header[key]["data_offsets"]
    if stop - start != piece.bytes or start < 0:
        raise ValueError(f"{key} has {stop - start} bytes instead of {piece.bytes}")
    return piece, _Stored(path, data + start, data + stop, dtype, piece.sizes)


def _damaged(directory: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The state in {directory} cannot be loaded: {why}. It is not a whole state that powertrain.save_state has "
        "written on all ranks; load another checkpoint."
    )


def read_into(reader: StateReader, targets: dict[str, torch.Tensor]) -> None:
    """Fill every target, a tensor or a DTensor of whatever layout, with what is stored under its name.

    Needs no other rank. The names must be there and the shapes must be equal.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad():
        planner.set_up_planner(targets, reader.read_metadata(), True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
        reader.read_data(plan, planner).wait()
