"""Batches on their way to a GPU: staged in reused pinned memory, copied concurrently with the computation.

A copy from pageable memory blocks the calling thread until the bytes are staged. One from pinned memory runs on a
stream of its own, while the GPU computes on another. The prefetching thread calls :meth:`DeviceFeed.put`, the training
thread :meth:`DeviceFeed.take`, which does not block: it only makes the GPU's stream wait.

Importing this module does not import torch.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

#: Alignment of tensors in a buffer: enough for every dtype, and efficient to copy.
_ALIGNMENT = 256
#: Smaller tensors share one copy and one piece of the device's memory: a copy of its own would cost more than its
#: bytes. Larger ones have their own, so that a reference to one of a batch does not keep all of it alive.
_SMALL = 64 * 1024


@dataclass(frozen=True, eq=False)
class Handle:
    """A batch whose copy has begun. Its tensors are not filled yet: pass it to :meth:`DeviceFeed.take`."""

    batch: Any
    #: The tensors that own the batch's memory.
    memory: tuple[torch.Tensor, ...]
    #: Recorded on the copying stream after the copies.
    copied: torch.cuda.Event
    #: True where tensors of other kinds are still to be moved.
    has_others: bool


@dataclass(frozen=True)
class BufferLayout:
    """The layout of tensors in a buffer: those that are copied together first."""

    offsets: tuple[int, ...]
    #: Bytes of those that are copied together, and of all.
    together: int
    total: int


def lay_out(sizes: Sequence[int], alone: Sequence[bool]) -> BufferLayout:
    """Return a layout of tensors of these sizes: all aligned, none overlapping. ``alone`` marks those that are copied
    by themselves."""
    offsets, at, together = [0] * len(sizes), 0, 0
    for index in sorted(range(len(sizes)), key=lambda index: alone[index]):
        offsets[index] = at
        at += -(-sizes[index] // _ALIGNMENT) * _ALIGNMENT
        together = together if alone[index] else at
    return BufferLayout(tuple(offsets), together, at)


@dataclass
class _Slot:
    """One pinned buffer, as large as the largest batch so far."""

    buffer: torch.Tensor | None = None
    #: Recorded when the GPU has read the last contents.
    read: torch.cuda.Event | None = None

    def hold(self, nbytes: int) -> torch.Tensor:
        """Return the buffer with room for ``nbytes`` once the GPU has read it. Blocks; not for the training thread."""
        import torch

        if self.read is not None:
            self.read.synchronize()
            self.read = None
        if self.buffer is None or self.buffer.numel() < nbytes:
            self.buffer = None  # freed first, so that both never exist at once
            self.buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return self.buffer


class DeviceFeed:
    """Copies batches to a GPU through ``slots`` pinned buffers.

    ``put`` may be called from several threads, ``take`` from the training thread. Batches may be dropped without a
    ``take``, and put before the previous one is taken: a buffer is free again when its copy is done.
    """

    def __init__(self, device: torch.device | str | int, slots: int) -> None:
        import torch

        self.device = torch.device(device)
        if self.device.type != "cuda":
            raise ConfigError(
                f"A DeviceFeed was created for {str(self.device)!r}; it copies to NVIDIA GPUs only. Elsewhere hand the "
                "batches out as they are."
            )
        if slots < 1:
            raise ConfigError(
                f"A DeviceFeed was created with {slots} buffers; it needs at least one. Give slots=1 or more."
            )
        if self.device.index is None:
            # Resolved now, because a prefetch thread has a current device of its own.
            self.device = torch.device("cuda", torch.cuda.current_device())
        make: Any = torch.cuda.Stream
        self._stream: torch.cuda.Stream = make(self.device)
        self._slots = [_Slot() for _ in range(slots)]
        #: Buffers that are not being filled, oldest copy first.
        self._idle: queue.SimpleQueue[_Slot] = queue.SimpleQueue()
        for slot in self._slots:
            self._idle.put(slot)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory."""
        return sum(slot.buffer.numel() for slot in self._slots if slot.buffer is not None)

    def put(self, batch: Any) -> Handle:
        """Begin to copy every CPU tensor of a (nested) batch; other objects pass through. Prefetch threads only.

        Returns when the batch is staged: it may be changed then. Blocks while the GPU still reads the next buffer.
        Tensors of unusual kinds (sparse, user-defined subclasses) are copied when the batch is taken.
        """
        tensors, has_others = _tensors_of(batch)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        alone = [
            size >= _SMALL or not _is_one_piece(tensor) for tensor, size in zip(tensors, sizes, strict=True)
        ]
        layout = lay_out(sizes, alone)
        slot = self._idle.get()
        try:
            there, memory, copied = self._copy(tensors, layout, slot)
        finally:
            self._idle.put(slot)
        following = iter(there)
        moved = map_tensors(batch, lambda tensor: next(following) if _is_fed(tensor) else tensor)
        return Handle(moved, tuple(memory), copied, has_others)

    def take(self, handle: Handle) -> Any:
        """Return the batch on the device, for use on the current stream. Does not block."""
        import torch

        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(handle.copied)
        for tensor in handle.memory:
            # The memory belongs to the copying stream; it must not be reused while the computation needs it.
            tensor.record_stream(computing)
        if handle.has_others:
            # Their memory cannot be recorded, so it has to be the computing stream's own.
            return map_tensors(
                handle.batch, lambda tensor: tensor.to(self.device) if tensor.device.type == "cpu" else tensor
            )
        return handle.batch

    def _copy(
        self, tensors: Sequence[torch.Tensor], layout: BufferLayout, slot: _Slot
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.cuda.Event]:
        """Return the tensors on the device, their memory, and the event of their copies."""
        import torch

        make: Any = torch.cuda.Event
        copied: torch.cuda.Event = make()
        buffer = slot.hold(layout.total)
        with torch.cuda.stream(self._stream), torch.no_grad():
            try:
                together = torch.empty(layout.together, dtype=torch.uint8, device=self.device)
                memory = [together] if layout.together else []
                there = []
                for tensor, offset in zip(tensors, layout.offsets, strict=True):
                    if offset < layout.together:
                        there.append(_moved_with_others(tensor, buffer, offset, together))
                    else:
                        there.append(_moved_alone(tensor, buffer, offset, self.device))
                        memory.append(there[-1])
                together.copy_(buffer[: layout.together], non_blocking=True)
            finally:
                # Also where a later tensor of the batch cannot be copied: earlier copies have begun.
                copied.record(self._stream)
                slot.read = copied
        return there, memory, copied


def _moved_with_others(
    tensor: torch.Tensor, buffer: torch.Tensor, offset: int, together: torch.Tensor
) -> torch.Tensor:
    """Return a part of ``together``, which is copied from ``buffer`` at once, as a tensor of its own."""
    nbytes = tensor.numel() * tensor.element_size()
    # Not copy_, which costs ten times as much for so few bytes.
    ctypes.memmove(buffer.data_ptr() + offset, tensor.data_ptr(), nbytes)
    return together[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape).detach()


def _moved_alone(
    tensor: torch.Tensor, buffer: torch.Tensor, offset: int, device: torch.device
) -> torch.Tensor:
    import torch

    there = torch.empty_like(tensor, device=device)
    nbytes = tensor.numel() * tensor.element_size()
    # In the layout of the device's tensor, so that one plain copy suffices.
    room = buffer[offset : offset + nbytes].view(tensor.dtype)
    staged = room.as_strided(there.size(), there.stride())
    staged.copy_(tensor)
    return there.copy_(staged, non_blocking=True)


def _tensors_of(batch: Any) -> tuple[list[torch.Tensor], bool]:
    """Return the tensors of a batch that go through a buffer, and whether there are CPU tensors that cannot."""
    fed: list[torch.Tensor] = []
    has_others = False

    def note(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal has_others
        if _is_fed(tensor):
            fed.append(tensor)
        else:
            has_others = has_others or tensor.device.type == "cpu"
        return tensor

    map_tensors(batch, note)
    return fed, has_others


def _is_fed(tensor: torch.Tensor) -> bool:
    """Return whether it is a plain dense CPU tensor: not sparse, nested, or of a user-defined subclass."""
    import torch

    return (
        tensor.device.type == "cpu"
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_quantized
    )


def _is_one_piece(tensor: torch.Tensor) -> bool:
    """Return whether its numbers are contiguous in memory without conversion."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# --------------------------------------------------------------------------- nested batches

#: Checked first, because batches may hold thousands of these.
_NEVER_CHANGED = frozenset({str, bytes, int, float, bool, type(None)})


def map_tensors(
    item: Any, change: Callable[[torch.Tensor], Any], change_other: Callable[[Any], Any] | None = None
) -> Any:
    """Return ``item`` with ``change`` applied to every tensor in (nested) tuples, lists, mappings and dataclasses.

    ``change_other`` is applied to other objects that have a ``to`` method. Anything else stays.
    """
    import torch

    if type(item) in _NEVER_CHANGED:
        return item
    again = functools.partial(map_tensors, change=change, change_other=change_other)
    if isinstance(item, torch.Tensor):
        return change(item)
    if change_other is not None and callable(getattr(item, "to", None)) and not isinstance(item, type):
        return change_other(item)
    if isinstance(item, tuple):
        values = [again(value) for value in item]
        return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)
    if isinstance(item, list):
        return [again(value) for value in item]
    if type(item) is dict:
        return {key: again(value) for key, value in item.items()}
    if isinstance(item, Mapping):
        return _changed_mapping(item, again)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        changed = copy.copy(item)
        for part in dataclasses.fields(item):
            object.__setattr__(changed, part.name, again(getattr(item, part.name)))
        return changed
    return item


def _changed_mapping(item: Mapping[Any, Any], again: Callable[[Any], Any]) -> Any:
    """Return a mapping of the same type for a subclass of dict, otherwise a plain dict."""
    changed: Any = copy.copy(item) if isinstance(item, dict) else {}
    for key in item:
        changed[key] = again(item[key])
    return changed
