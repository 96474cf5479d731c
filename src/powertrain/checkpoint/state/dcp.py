"""Storage for torch's distributed checkpoint: a writer and a reader of state files."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from powertrain.checkpoint.state.files import FileLayout, StateFiles, write_file
from powertrain.checkpoint.state.gpu_reading import FileRange, read_ranges
from powertrain.checkpoint.state.pieces import file_name, piece_of, refuse_unwritable, volume_of
from powertrain.errors import CheckpointError

if TYPE_CHECKING:
    from powertrain.checkpoint.state.files import Stored


class StateWriter(StorageWriter):
    """Writes this rank's part of a plan of torch's distributed checkpoint into ``directory``."""

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
            refuse_unwritable(item, source)
            sources[piece_of(item, source)] = source
        layout = FileLayout(sources, self._rank, self._world_size)
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
        """Do nothing: each file describes its own content."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return volume_of(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


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
        """Return the directory's files; raises :class:`CheckpointError` for an incomplete state."""
        return StateFiles.read(self._directory)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.files.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing: a reader of one directory is ready."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: Any) -> Future[None]:
        opened: dict[Path, torch.Tensor] = {}
        to_gpu: list[FileRange] = []
        read: list[tuple[Any, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(f"{item.dest_index.fqn!r} is not a tensor in {self._directory}.")
            stored = self.files.stored[(item.storage_index.fqn, tuple(item.storage_index.offset or ()))]
            target = planner.resolve_tensor(item).detach()
            if _is_plain_on_gpu(target, stored) and tuple(item.lengths) == stored.sizes:
                to_gpu.append(FileRange(stored.path, stored.start, target))
            else:
                saved = _mapped(stored, opened)
                for dimension, (offset, length) in enumerate(
                    zip(item.storage_offsets, item.lengths, strict=True)
                ):
                    saved = saved.narrow(dimension, offset, length)
                target.copy_(saved)
            read.append((item, target))
        read_ranges(to_gpu)
        for item, target in read:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.path.isdir(checkpoint_id)


def _is_plain_on_gpu(target: torch.Tensor, stored: Stored) -> bool:
    """Return whether the stored bytes, in order, are what the GPU's memory behind ``target`` must hold."""
    is_plain = target.is_contiguous() and not target.is_conj() and not target.is_neg()
    return target.is_cuda and target.dtype == stored.dtype and is_plain


def _mapped(stored: Stored, opened: dict[Path, torch.Tensor]) -> torch.Tensor:
    """Return the stored piece as a tensor over its file's pages."""
    if stored.start == stored.stop:
        return torch.empty(stored.sizes, dtype=stored.dtype)
    if stored.path not in opened:
        size = stored.path.stat().st_size
        opened[stored.path] = torch.from_file(str(stored.path), shared=False, size=size, dtype=torch.uint8)
    return opened[stored.path][stored.start : stored.stop].view(stored.dtype).view(stored.sizes)


def read_into(reader: StateReader, targets: dict[str, torch.Tensor]) -> None:
    """Fill every target, a tensor or a DTensor of any layout, with the stored values of its name.

    Needs no other rank. The names must be there and the shapes must be equal.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    with torch.no_grad():
        planner.set_up_planner(targets, reader.read_metadata(), True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
        reader.read_data(plan, planner).wait()
