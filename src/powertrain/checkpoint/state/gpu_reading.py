"""Reading stored tensors into a GPU's memory through small pinned buffers, by several threads.

Copying from a file's mapped pages takes a page fault for every few of them, and CUDA copies from such memory through
buffers of its own. Reading into memory that is pinned already needs neither.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from powertrain.storage.files.descriptors import open_regular

#: Bytes of a buffer, buffers of a thread, and threads.
_BUFFER, _BUFFERS, _THREADS = 4 * 2**20, 2, 4


@dataclass(frozen=True)
class FileRange:
    """Bytes of a file from ``start`` on, and where they go: a contiguous tensor on a GPU, of the same bytes."""

    path: Path
    start: int
    target: torch.Tensor


def read_ranges(ranges: Iterable[FileRange]) -> None:
    """Fill all targets. They may be used afterwards, on any stream.

    Raises:
        OSError: A file cannot be read, or is shorter than it was.
    """
    by_device: dict[torch.device, deque[FileRange]] = {}
    for one in ranges:
        flat = one.target.view(-1).view(torch.uint8)
        for start in range(0, flat.nbytes, _BUFFER):
            part = FileRange(one.path, one.start + start, flat[start : start + _BUFFER])
            by_device.setdefault(flat.device, deque()).append(part)
    for device, parts in by_device.items():
        torch.cuda.current_stream(device).synchronize()  # a kernel may still fill a target
        _read_by_threads(device, parts)


def _read_by_threads(device: torch.device, parts: deque[FileRange]) -> None:
    errors: list[BaseException] = []
    is_inference = torch.is_inference_mode_enabled()  # which is a thread's own

    def read() -> None:
        try:
            with torch.no_grad(), torch.inference_mode(is_inference), torch.cuda.device(device):
                _read_parts(device, parts)
        except BaseException as error:
            errors.append(error)
            parts.clear()

    threads = [threading.Thread(target=read) for _ in range(min(_THREADS, len(parts)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _read_parts(device: torch.device, parts: deque[FileRange]) -> None:
    """Read parts until none is left; several threads take from the same."""
    make: Any = torch.cuda.Stream
    stream = make(device)
    buffers = deque(_Buffer() for _ in range(_BUFFERS))
    opened: dict[Path, int] = {}
    try:
        while parts:
            try:
                part = parts.popleft()
            except IndexError:  # another thread was faster
                break
            if part.path not in opened:
                opened[part.path] = open_regular(part.path)
            buffers[0].relay(opened[part.path], part, stream)
            buffers.rotate()
        stream.synchronize()
    finally:
        for descriptor in opened.values():
            os.close(descriptor)


class _Buffer:
    """Pinned memory, and the copy that last read it."""

    def __init__(self) -> None:
        self._memory = torch.empty(_BUFFER, dtype=torch.uint8, pin_memory=True)
        self._bytes = memoryview(self._memory.numpy().data)
        self._copied: torch.cuda.Event | None = None

    def relay(self, descriptor: int, part: FileRange, stream: torch.cuda.Stream) -> None:
        if self._copied is not None:
            self._copied.synchronize()
        size, done = part.target.nbytes, 0
        while done < size:
            read = os.preadv(descriptor, [self._bytes[done:size]], part.start + done)
            if read == 0:
                raise OSError(
                    f"{part.path} ends at {part.start + done:,} bytes, before the tensor that it should have"
                )
            done += read
        with torch.cuda.stream(stream):
            part.target.copy_(self._memory[:size], non_blocking=True)
            make: Any = torch.cuda.Event
            self._copied = make()
            stream.record_event(self._copied)
