"""Threads that use the GPU beside the training thread, which may capture a CUDA graph meanwhile."""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

#: CUDA's name for a thread whose calls do not end the capture of a graph on another thread.
_CAPTURE_MODE_RELAXED = 2


def leave_captures_alone() -> None:
    """Let this thread allocate, pin and wait while another one captures a CUDA graph.

    CUDA otherwise refuses to, and ends the capture. torch has no function for it. To be called before the thread's
    first use of the GPU.
    """
    if (runtime := _cuda_runtime()) is not None:
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))


@cache
def _cuda_runtime() -> Any:
    """Return the library that torch has loaded; None where it is linked into torch."""
    paths = re.findall(r"(/\S*/libcudart\.so\S*)", Path("/proc/self/maps").read_text())
    return ctypes.CDLL(paths[0]) if paths else None
