"""Move batches to the device, one ahead on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from powertrain.data.rows.device import map_tensors
from powertrain.trace.recording import current
from powertrain.trace.recording.phases import H2D


def copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Yield each batch on ``device``, with the following one already being copied on a stream of its own."""
    make: Any = torch.cuda.Stream
    stream = make(device)
    moved: list[torch.Tensor] = []
    ahead = _copy_next(batches, device, stream, moved)
    while ahead is not _END:
        # Measured while the GPU itself waits for the copy, which is never this thread's time.
        with current.phase(H2D):
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(stream)
            for tensor in moved:
                # The memory belongs to the copying stream; it must not be reused while the computation needs it.
                tensor.record_stream(computing)
        batch, moved = ahead, []
        ahead = _copy_next(batches, device, stream, moved)
        yield batch


def _copy_next(
    batches: Iterator[Any], device: torch.device, stream: torch.cuda.Stream, moved: list[torch.Tensor]
) -> Any:
    """Return the next batch, with its copy to ``device`` begun; ``_END`` after the last."""
    batch = next(batches, _END)
    if batch is _END:
        return batch
    # Around all of it and on the computing stream: the copies of single tensors are on one that is not timed.
    with current.phase(H2D):
        return move_batch(batch, device, stream, moved)


_END = object()


def move_batch(
    batch: Any,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    moved: list[torch.Tensor] | None = None,
) -> Any:
    """Return ``batch`` with every tensor in it on ``device``.

    Where ``stream`` is given, tensors are copied on it and noted in ``moved``.
    Objects that move themselves (with ``.to``) do so on the current stream: their memory cannot be
    recorded for another.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if stream is None or moved is None:
            return tensor.to(device)
        with torch.cuda.stream(stream):
            there = tensor.to(device, non_blocking=True)
        moved.append(there)
        return there

    return map_tensors(batch, move, lambda item: item.to(device))
