"""Which rank writes which piece of a tensor: the plan of a save. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Partial

from powertrain.errors import CheckpointError

#: The directory of a checkpoint in which all of this lies.
STATE_DIRECTORY = "state"
#: The version of the files' form that this code writes and reads.
SCHEMA = 1
#: The key of our table among the notes of a safetensors header.
TABLE = "powertrain"
#: Tensors smaller than this are never cut.
_CUT_FROM_BYTES = 4 * 2**20
#: From this size on bytes are copied by the C library, which is faster than torch's own loop.
BLOCK_FROM_BYTES = 64 * 2**10
#: Another thread is worth its start when it has at least so much to copy.
THREAD_FROM_BYTES = 4 * 2**20
#: Headers end on a multiple of this, so that every tensor is aligned for its type.
ALIGNMENT = 64
#: A longer header is invalid (safetensors' own limit).
HEADER_LIMIT = 100_000_000

#: safetensors' name of each type; others are written as bytes, their type in our table.
DTYPE_NAMES = {
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
    """Return the name of a rank's tensors inside :data:`STATE_DIRECTORY`."""
    return f"rank-{rank:05d}.safetensors"


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
    """Return the ranks that have the same part of ``tensor`` as this one, in a fixed order.

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
class TensorPiece:
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
        return volume_of(self.sizes) * self.dtype.itemsize

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
        """Return this piece of ``tensor``, without a copy."""
        local = local_part(tensor)
        return local if self.rows is None else local[self.rows[0] : self.rows[1]]


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``. To be called without gradients."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SharePlanner(DefaultSavePlanner):
    """Torch's save planner, without its collective: replicated tensors are distributed by :func:`cut_rows`.

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
        self.pieces: dict[MetadataIndex, TensorPiece] = {}

    def create_local_plan(self) -> SavePlan:
        items = create_default_local_save_plan(self.state_dict, self.is_coordinator).items
        lines: dict[tuple[int, ...], list[TensorPiece]] = {}
        for item in items:
            tensor = self.state_dict[item.index.fqn]
            refuse_unwritable(item, tensor)
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

    def _holders_of(self, piece: TensorPiece, tensor: torch.Tensor) -> tuple[int, ...]:
        if piece.name in self._own:
            return (self._rank,)
        together = self._together.get((piece.name, piece.offsets, piece.sizes))
        return holders(tensor, self._world_size) if together is None else together

    def _share(self, line: list[TensorPiece], together: tuple[int, ...]) -> list[TensorPiece]:
        """Return this rank's cut of the pieces that the ranks ``together`` have alike."""
        line = sorted(line, key=lambda piece: piece.name)
        sizes = [(_rows(piece), piece.bytes // _rows(piece)) for piece in line]
        cuts = cut_rows(sizes, len(together), together.index(self._rank))
        shares = [_cut(piece, start, stop) for piece, (start, stop) in zip(line, cuts, strict=True)]
        return [piece for piece in shares if piece is not None]


def _rows(piece: TensorPiece) -> int:
    """Return the number of rows into which a piece can be cut; one where it has no dimension or no row."""
    return max(1, piece.sizes[0]) if piece.sizes else 1


def _cut(piece: TensorPiece, start: int, stop: int) -> TensorPiece | None:
    """Return rows [start, stop) of a piece; ``None`` where nothing is left to write."""
    if start >= stop:
        return None
    if not piece.bytes:  # a tensor without elements is written; a rank's empty share of another is not
        return None if volume_of(piece.shape) else piece
    if (start, stop) == (0, _rows(piece)):
        return piece
    return replace(
        piece,
        offsets=(piece.offsets[0] + start, *piece.offsets[1:]),
        sizes=(stop - start, *piece.sizes[1:]),
        rows=(start, stop),
    )


def piece_of(item: WriteItem, tensor: torch.Tensor) -> TensorPiece:
    """Return this rank's whole part of ``tensor``, which ``item`` of torch's plan describes."""
    data = item.tensor_data
    assert data is not None
    return TensorPiece(
        name=item.index.fqn,
        dtype=data.properties.dtype,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        sharded=isinstance(tensor, DTensor),
    )


def _narrowed(item: WriteItem, index: MetadataIndex, piece: TensorPiece) -> WriteItem:
    assert item.tensor_data is not None
    chunk = ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=torch.Size(piece.sizes))
    return replace(item, index=index, tensor_data=replace(item.tensor_data, chunk=chunk))


def refuse_unwritable(item: WriteItem, tensor: Any) -> None:
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


def volume_of(sizes: Sequence[int]) -> int:
    volume = 1
    for size in sizes:
        volume *= size
    return volume
