"""State files on disk: one safetensors file per rank, its header, and the joined view of all of them."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import json
import os
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from powertrain.checkpoint.state.pieces import (
    ALIGNMENT,
    BLOCK_FROM_BYTES,
    DTYPE_NAMES,
    HEADER_LIMIT,
    SCHEMA,
    TABLE,
    THREAD_FROM_BYTES,
    TensorPiece,
    file_name,
    volume_of,
)
from powertrain.errors import CheckpointError
from powertrain.storage.files.descriptors import open_regular


class FileLayout:
    """The place of each piece in a rank's file, and the file's header. Fixed for given pieces."""

    def __init__(self, pieces: Iterable[TensorPiece], rank: int, world_size: int) -> None:
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
        header["__metadata__"] = {"format": "pt", TABLE: json.dumps(table)}
        self.header = _padded(json.dumps(header).encode())
        self.size = len(self.header) + end

    def views(self, content: torch.Tensor) -> list[torch.Tensor]:
        """Return the place of each piece in ``content``, the bytes of the whole file."""
        data = content[len(self.header) :]
        return [
            data[start : start + piece.bytes].view(piece.dtype).view(piece.sizes)
            for piece, start in zip(self.pieces, self.starts, strict=True)
        ]


def _entry(piece: TensorPiece, start: int) -> dict[str, Any]:
    """Return a line of the safetensors header."""
    known = DTYPE_NAMES.get(piece.dtype)
    shape = list(piece.sizes) if known is not None else [piece.bytes]
    return {"dtype": known or "U8", "shape": shape, "data_offsets": [start, start + piece.bytes]}


def _row_of_table(piece: TensorPiece) -> list[Any]:
    dtype = str(piece.dtype).removeprefix("torch.")
    return [piece.name, dtype, piece.shape, piece.offsets, piece.sizes, piece.sharded]


def _padded(header: bytes) -> bytes:
    length = -(-(8 + len(header)) // ALIGNMENT) * ALIGNMENT - 8
    return struct.pack("<Q", length) + header.ljust(length)


def copy_all(
    views: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    threads: int = 1,
    cuts: Sequence[int] = (),
) -> None:
    """Copy each source into its view. Afterwards the sources may be changed.

    Copies from a GPU run on a stream of their own, one after the other without waiting in between; at full speed
    where the views are pinned memory. None of them crosses one of the addresses ``cuts``, which ascend: between them
    lie pieces that were pinned one by one. Large tensors in main memory are copied by ``threads`` threads together.
    """
    blocks: list[tuple[int, int, int]] = []
    on_gpu: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    with torch.no_grad():
        for view, source in zip(views, sources, strict=True):
            if source.is_cuda:
                on_gpu.setdefault(source.device, []).append((view, source))
            elif view.nbytes >= BLOCK_FROM_BYTES and _is_plain_memory(source):
                blocks.append((view.data_ptr(), source.data_ptr(), view.nbytes))
            else:
                view.copy_(source)
        streams = [_begin_copies(device, pairs, cuts) for device, pairs in on_gpu.items()]
    _move_blocks(blocks, threads)
    for stream in streams:
        stream.synchronize()


def _begin_copies(
    device: torch.device, pairs: list[tuple[torch.Tensor, torch.Tensor]], cuts: Sequence[int]
) -> torch.cuda.Stream:
    """Queue the copies off one GPU; they are done when the stream is."""
    stream = _side_stream(device)
    with torch.cuda.stream(stream):
        for view, source in pairs:
            for part, part_of_source in cut_copy(view, source, cuts):
                part.copy_(part_of_source, non_blocking=True)
    return stream


def cut_copy(
    view: torch.Tensor, source: torch.Tensor, cuts: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a copy into ``view``, which is contiguous, as copies that do not cross any of the addresses ``cuts``."""
    begin = view.data_ptr()
    inner = cuts[bisect.bisect_right(cuts, begin) : bisect.bisect_left(cuts, begin + view.nbytes)]
    if not inner:
        yield view, source
        return
    plain = source.resolve_conj().resolve_neg().contiguous()
    places = [0, *(cut - begin for cut in inner), view.nbytes]
    target_bytes, source_bytes = (one.view(-1).view(torch.uint8) for one in (view, plain))
    for start, stop in itertools.pairwise(places):
        yield target_bytes[start:stop], source_bytes[start:stop]


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Return True where the tensor's bytes, in order, are its values."""
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

    threads = min(threads, 1 + sum(size for _, _, size in blocks) // THREAD_FROM_BYTES)
    others = [threading.Thread(target=move, args=(part,)) for part in range(1, threads)]
    for thread in others:
        thread.start()
    move(0)
    for thread in others:
        thread.join()


_side_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies off this device, which sees all that was computed so far."""
    if device not in _side_streams:
        make: Any = torch.cuda.Stream
        _side_streams[device] = make(device)
    stream = _side_streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def write_file(path: str | os.PathLike[str], layout: FileLayout, sources: Sequence[torch.Tensor]) -> None:
    """Write a rank's file as a plain file."""
    with open(path, "xb", buffering=0) as file, torch.no_grad():
        _write_all(file, memoryview(layout.header))
        for source in sources:
            plain = source.detach().cpu().contiguous().flatten().view(torch.uint8)
            _write_all(file, plain.numpy().data)


def _write_all(file: Any, content: memoryview) -> None:
    while len(content):
        content = content[file.write(content) :]


@dataclass(frozen=True)
class Stored:
    """The place of one piece: a file and the bytes [start, stop) in it."""

    path: Path
    start: int
    stop: int
    dtype: torch.dtype
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class StateFiles:
    """The joined headers of all ranks' files."""

    world_size: int
    metadata: Metadata
    stored: Mapping[tuple[str, tuple[int, ...]], Stored]
    #: Names of tensors that were DTensors.
    sharded: frozenset[str]

    @classmethod
    def read(cls, directory: Path) -> StateFiles:
        """Raises :class:`CheckpointError` where a file or a part of a tensor is missing or damaged."""
        first = _read_table(directory, 0)
        world_size = first["world_size"]
        tensors: dict[str, TensorStorageMetadata] = {}
        stored: dict[tuple[str, tuple[int, ...]], Stored] = {}
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


def _join(tensors: dict[str, TensorStorageMetadata], piece: TensorPiece, directory: Path) -> None:
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
    """Return the reason why the chunks do not fill the tensor, ``None`` where they do.

    Chunks with distinct places inside the tensor, that do not overlap and together have its volume, fill it.
    """
    chunks = sorted(tensor.chunks, key=lambda chunk: tuple(chunk.offsets))
    for chunk in chunks:
        spans = zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)
        if any(offset < 0 or size < 0 or offset + size > whole for offset, size, whole in spans):
            return f"a part lies outside its shape {tuple(tensor.size)}"
    here, needed = sum(volume_of(chunk.sizes) for chunk in chunks), volume_of(tensor.size)
    if here != needed:
        return f"{here:,} of {needed:,} elements are there"
    if any(_overlap(one, other) for one, other in _neighbours(chunks)):
        return "two parts overlap"
    return None


def _neighbours(
    chunks: list[ChunkStorageMetadata],
) -> Iterable[tuple[ChunkStorageMetadata, ChunkStorageMetadata]]:
    """Return pairs that could overlap: in the order of their offsets, until one begins after the other's last row."""
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
            header = json.loads(file.read(length)) if length <= HEADER_LIMIT else {}
        table: dict[str, Any] = json.loads(header["__metadata__"][TABLE])
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
) -> tuple[TensorPiece, Stored]:
    name, dtype_name, shape, offsets, sizes, sharded = row
    dtype = getattr(torch, dtype_name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype_name} is not a tensor dtype")
    piece = TensorPiece(name, dtype, tuple(shape), tuple(offsets), tuple(sizes), sharded=bool(sharded))
    start, stop = header[key]["data_offsets"]
    if stop - start != piece.bytes or start < 0:
        raise ValueError(f"{key} has {stop - start} bytes instead of {piece.bytes}")
    return piece, Stored(path, data + start, data + stop, dtype, piece.sizes)


def _damaged(directory: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"The state in {directory} cannot be loaded: {why}. It is not a whole state that powertrain.save_state has "
        "written on all ranks; load another checkpoint."
    )
