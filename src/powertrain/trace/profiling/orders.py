"""Requests for a profile, and their results. Pure."""

from __future__ import annotations

import msgspec


class ProfileOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What to profile."""

    #: The number of the request, for the reply.
    ask: int = 0
    steps: int = 3
    #: Also record allocations; on a GPU, the allocator's history too.
    memory: bool = False
    #: Begin after so many steps of the attempt; 0 for at once.
    after: int = 0


class ProfileCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that a profile took: on the training thread, and beside it."""

    start: float = 0.0
    #: Of the profiled steps together.
    steps: float = 0.0
    stop: float = 0.0
    #: On a side thread, while the loop goes on.
    packing: float = 0.0


class ProfileResult(msgspec.Struct, frozen=True, kw_only=True):
    """A finished profile, or the reason why there is none."""

    ask: int
    error: str = ""
    #: The number of profiled steps, and of the steps of the attempt before them.
    steps: int = 0
    first_step: int = 0
    cost: ProfileCost = ProfileCost()
    #: The trace in Chrome's format, and the history of the CUDA allocator, both compressed by gzip; b"" for none.
    trace: bytes = b""
    memory: bytes = b""
