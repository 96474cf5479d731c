"""Which ranks hold which tensor, where not all of them hold the same: tensor and pipeline parallel training.

With DistributedDataParallel, or FSDP2 over all ranks, all ranks hold the same tensors, and a rank needs no message to
know that. In any other case the next rank may have the same layers, a shard of them, or another stage of a pipeline.
There, each save begins with one small exchange: a digest of the names and shapes, and checksums of a sample of the
parameters. Names and shapes themselves are sent only when they have changed on some rank.

All ranks see the same answers and come to the same conclusion, errors included.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from powertrain.checkpoint.state import capture
from powertrain.checkpoint.state.encoding import Captured
from powertrain.checkpoint.state.files import hole_in
from powertrain.checkpoint.state.pieces import TensorPiece, local_part, piece_of
from powertrain.errors import CheckpointError

#: Gives every rank's value to all ranks, in the order of ranks.
Gather = Callable[[Any], list[Any]]
#: A part of a tensor: its name, where it begins and how large it is.
Part = tuple[str, tuple[int, ...], tuple[int, ...]]

#: Elements of each parameter that ranks compare.
_SAMPLED = 8
#: How far replicas of a parameter may lie apart, as a share of its largest element: kernels that add in any order
#: let them drift a little.
_DRIFT = 1e-3
#: The same, in steps of the parameter's own precision.
_DRIFT_STEPS = 4
#: How many parameters an error names.
_LISTED = 3

_REMEDY = (
    "Parts that differ between ranks, such as the stages of a pipeline, need names of their own: keep the names of the "
    "whole model in each stage. Replicas need equal parameters, which prepare_model or DistributedDataParallel keep "
    "so. To keep each rank's own values, pass save_state(model=model.state_dict()) and load them from what load_state "
    "returns."
)


def gather_of(rank: int, world_size: int) -> Gather | None:
    """Return the gather function of this run's process group, ``None`` without another rank or a group."""
    if world_size == 1 or not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        return None

    def gather(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size
        dist.all_gather_object(values, value)
        return values

    return gather


def needs_agreement(objects: Mapping[str, Any], world_size: int) -> bool:
    """Return True when other ranks may hold other tensors than this one. The result is the same on all ranks."""
    modules = [value for value in objects.values() if isinstance(value, nn.Module)]
    optimizers = [value for value in objects.values() if isinstance(value, Optimizer)]
    if not modules and not optimizers:
        return False  # everything else is each rank's own
    names = capture.parameter_names(objects)
    of_modules = all(
        parameter in names
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return not (modules and of_modules and all(_spans_all_ranks(one, world_size) for one in modules))


def _spans_all_ranks(module: nn.Module, world_size: int) -> bool:
    """Return True when the wrapper of the module, or the mesh of each parameter, shows that every rank has it."""
    inner: Any = module
    while not isinstance(inner, nn.parallel.DistributedDataParallel):
        if not isinstance(nested := inner.__dict__.get("_modules", {}).get("_orig_mod"), nn.Module):
            parameters = list(inner.parameters())
            return bool(parameters) and all(
                isinstance(one, DTensor) and one.device_mesh.size() == world_size for one in parameters
            )
        inner = nested
    return bool(inner.process_group.size() == world_size)


@dataclass(frozen=True)
class Holdings:
    """Which ranks hold each part of each shared tensor. Parts that are not in it are held by all ranks alike."""

    holders: Mapping[Part, tuple[int, ...]] = field(default_factory=dict)
    #: False where some rank has tensors that another has not.
    alike: bool = True

    def first_holder(self, name: str, tensor: torch.Tensor) -> int:
        """Return the rank that writes a plain tensor of which one rank's values stand for all."""
        shape = tuple(tensor.shape)
        return self.holders.get((name, (0,) * len(shape), shape), (0,))[0]

    @classmethod
    def of(cls, by_rank: Sequence[Sequence[TensorPiece]]) -> Holdings:
        """Join the ranks' lists; raises :class:`CheckpointError` where they contradict each other."""
        holders: dict[Part, list[int]] = {}
        tensors: dict[str, tuple[int, TensorPiece]] = {}
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for rank, pieces in enumerate(by_rank):
            for piece in pieces:
                first, other = tensors.setdefault(piece.name, (rank, piece))
                if (piece.shape, piece.dtype) != (other.shape, other.dtype):
                    raise CheckpointError(
                        f"The tensor {piece.name!r} is {other.dtype} of shape {other.shape} on rank {first} and "
                        f"{piece.dtype} of shape {piece.shape} on rank {rank}, so save_state cannot store both. "
                        f"{_REMEDY}"
                    )
                part = part_of(piece)
                if part not in holders and (piece.bytes or not all(piece.shape)):
                    chunks.setdefault(piece.name, []).append(
                        ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
                    )
                holders.setdefault(part, []).append(rank)
        for name, (_, piece) in tensors.items():
            _check_whole(name, piece, chunks.get(name, []))
        names = [{piece.name for piece in pieces} for pieces in by_rank]
        return cls(
            {part: tuple(ranks) for part, ranks in holders.items()}, all(one == names[0] for one in names)
        )


def part_of(piece: TensorPiece) -> Part:
    """Return which part of which tensor a piece is."""
    return piece.name, piece.offsets, piece.sizes


def _check_whole(name: str, piece: TensorPiece, chunks: list[ChunkStorageMetadata]) -> None:
    whole = TensorStorageMetadata(TensorProperties(dtype=piece.dtype), torch.Size(piece.shape), chunks)
    if (hole := hole_in(whole)) is not None:
        raise CheckpointError(
            f"The parts of the tensor {name!r} that the ranks hold do not make up the whole: {hole}. {_REMEDY}"
        )


class Agreement:
    """Finds the holdings of all ranks for each save of one rank. Every rank calls it at every save."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._form: object = None
        self._pieces: dict[str, TensorPiece] = {}
        self._digest = b""
        self._digests: list[bytes] = []
        self._holdings = Holdings()

    def reach(self, objects: Mapping[str, Any], captured: Captured) -> Holdings:
        """Return the holdings of all ranks.

        Raises:
            CheckpointError: Ranks hold different tensors under one name. It is raised on all ranks.
        """
        parameters = _parameters(objects)
        self._describe(captured, parameters)
        replies = self._gather((self._digest, self._checksums(parameters)))
        checksums = [reply[1] for reply in replies]
        if (digests := [reply[0] for reply in replies]) != self._digests:
            self._holdings = Holdings.of(self._gather(list(self._pieces.values())))
            self._digests = digests
            checksums = self._gather(self._checksums(parameters))
        if _differ(checksums):
            _check_equal(self._gather(self._samples(parameters)))
        return self._holdings

    def _describe(self, captured: Captured, parameters: Mapping[str, torch.Tensor]) -> None:
        """Record the tensors that this rank shares with others, unless they are the same as at the last save."""
        shared = {name: tensor for name, tensor in captured.tensors.items() if name not in captured.own}
        shared = {**parameters, **shared}
        if (form := [form_of(name, tensor) for name, tensor in shared.items()]) == self._form:
            return
        items = create_default_local_save_plan(shared, True).items
        pieces = [piece_of(item, shared[item.index.fqn]) for item in items if item.tensor_data is not None]
        self._pieces = {piece.name: piece for piece in pieces}
        self._digest = hashlib.sha256(repr(sorted(map(repr, pieces))).encode()).digest()
        self._form = form

    def _samples(self, parameters: Mapping[str, torch.Tensor]) -> dict[Part, tuple[float, list[float]]]:
        """Return a few elements of each parameter part that other ranks hold too, and how far they may differ."""
        shared = {}
        for name, parameter in parameters.items():
            if (piece := self._pieces.get(name)) is None:
                continue
            if len(self._holdings.holders.get(part := part_of(piece), ())) > 1:
                shared[part] = parameter
        drifts = [max(_DRIFT, _DRIFT_STEPS * _precision(one.dtype)) for one in shared.values()]
        rows = _sampled([local_part(one.detach()) for one in shared.values()])
        return {part: (drift, row) for part, drift, row in zip(shared, drifts, rows, strict=True)}

    def _checksums(self, parameters: Mapping[str, torch.Tensor]) -> dict[tuple[int, ...], int]:
        """Return a checksum of the samples for each set of ranks that hold parameters together."""
        sums: dict[tuple[int, ...], int] = {}
        for part, (_, row) in sorted(self._samples(parameters).items()):
            together = self._holdings.holders[part]
            sums[together] = zlib.crc32(repr((part, row)).encode(), sums.get(together, 0))
        return sums


def form_of(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the properties of a tensor that determine the place of its bytes."""
    if isinstance(tensor, DTensor):
        return name, tensor.shape, tensor.dtype, tensor.placements, tensor.device_mesh
    return name, tensor.shape, tensor.dtype


def _parameters(objects: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the parameters of all modules, and those that only an optimizer has."""
    names = capture.parameter_names(objects)
    parameters = {name: parameter for parameter, name in names.items()}
    for name, value in objects.items():
        if isinstance(value, Optimizer):
            own = [one for group in value.param_groups for one in group["params"]]
            parameters.update({f"{name}.params.{at}": one for at, one in enumerate(own) if one not in names})
    return parameters


def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _sampled(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Return elements of each tensor, evenly spread; one copy from a device for all of them."""
    if not tensors:
        return []
    with torch.no_grad():
        picked = [_spread(one).to(torch.float32) for one in tensors]
        values = torch.cat([one.to(picked[0].device) for one in picked]).tolist()
    rows, start = [], 0
    for one in picked:
        rows.append(values[start : start + len(one)])
        start += len(one)
    return rows


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    step = max(1, -(-tensor.numel() // _SAMPLED))
    if tensor.is_contiguous():
        return tensor.view(-1)[::step]
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]  # flattening it would copy all of it


def _differ(checksums: Iterable[Mapping[tuple[int, ...], int]]) -> bool:
    seen: dict[tuple[int, ...], int] = {}
    return any(
        seen.setdefault(together, value) != value for sums in checksums for together, value in sums.items()
    )


def _check_equal(by_rank: Sequence[Mapping[Part, tuple[float, list[float]]]]) -> None:
    """Raise where a parameter's samples lie further apart than replicas of one parameter may."""
    first: dict[Part, int] = {}
    apart: dict[str, tuple[int, int]] = {}
    for rank, samples in enumerate(by_rank):
        for part, (drift, row) in samples.items():
            other = first.setdefault(part, rank)
            if _are_disjoint(torch.tensor(row), torch.tensor(by_rank[other][part][1]), drift):
                apart.setdefault(part[0], (other, rank))
    if apart:
        listed = ", ".join(
            f"{name!r} (ranks {one} and {other})" for name, (one, other) in sorted(apart.items())[:_LISTED]
        )
        more = f" and {len(apart) - _LISTED} more" if len(apart) > _LISTED else ""
        raise CheckpointError(
            f"Ranks have different values of {listed}{more}, and save_state would store only one of them. {_REMEDY}"
        )


def _are_disjoint(one: torch.Tensor, other: torch.Tensor, drift: float) -> bool:
    one, other = torch.nan_to_num(one), torch.nan_to_num(other)
    largest = float(torch.maximum(one.abs(), other.abs()).max()) if len(one) else 0.0
    return bool(len(one)) and float((one - other).abs().max()) > drift * largest
