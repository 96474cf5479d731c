"""A segment of shared memory that is made ready ahead of need, piece by piece, while training goes on."""

from __future__ import annotations

import mmap
import sys
import threading

from powertrain.checkpoint.state.shared_memory import PIECE, SharedMemorySegment
from powertrain.checkpoint.state.stream_capture import leave_captures_alone


class SegmentAhead:
    """Makes a segment ready on a thread of its own. All methods are for one thread."""

    def __init__(self, segment: SharedMemorySegment, gpu: int | None) -> None:
        """``gpu`` is the index of the GPU that will copy to it; None for none, then it is not pinned."""
        self._segment, self._gpu = segment, gpu
        self._lock = threading.Lock()
        self._wanted = 0
        self._is_stopping = self._has_failed = False
        self._thread: threading.Thread | None = None
        self._is_running = False

    @property
    def size(self) -> int:
        """The size that it has, or will have."""
        return max(self._segment.size, self._wanted)

    def expect(self, size: int) -> None:
        """Make it ready up to ``size`` bytes, in the background."""
        unit = PIECE if size >= PIECE else mmap.PAGESIZE
        rounded = -(-size // unit) * unit
        with self._lock:
            self._wanted = max(self._wanted, min(rounded, self._segment.capacity))
            if self._is_running or self._has_failed or self._segment.ready >= self._wanted:
                return
            self._is_running = True
        self._thread = threading.Thread(target=self._work, name="powertrain-segment", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until it is as ready as it will get."""
        if self._thread is not None:
            self._thread.join()

    def take(self) -> SharedMemorySegment:
        """Stop after the piece that is under way, and return the segment as it is."""
        self._is_stopping = True
        self.wait()
        return self._segment

    def _work(self) -> None:
        try:
            if self._gpu is not None:
                leave_captures_alone()
                sys.modules["torch"].cuda.set_device(self._gpu)  # a thread begins with the first one
            while self._continue():
                self._segment.make_ready(self._wanted, pinned=self._gpu is not None)
        except (OSError, RuntimeError):  # no room is left, or the GPU has failed: the save sees to it
            self._has_failed = True

    def _continue(self) -> bool:
        with self._lock:
            self._is_running = (
                not self._is_stopping and not self._has_failed and self._segment.ready < self._wanted
            )
            return self._is_running
