"""The interval at which ranks of a large run send their gathered reports. Pure."""

from __future__ import annotations

#: Batches a second that a controller takes with ease.
BATCHES_A_SECOND = 512
#: A report is never kept back for longer than this.
SECONDS_AT_MOST = 5.0


def gathering_seconds(world_size: int) -> float:
    """Return the seconds between two batches that no rank waits for; 0.0 where
    the worker's own short delay is enough.

    A message costs the controller more than what is in it: a wake-up, a decryption, an acknowledgement. And each takes
    the next 64 bytes of ZeroMQ's queue of its connection, in both directions, which are 16 KiB of memory touched bit by
    bit: with 2,048 ranks and a message a second that is a quarter of a megabyte a second, for minutes. So beyond
    ``BATCHES_A_SECOND`` ranks each sends less often instead, and more at a time.
    """
    if world_size <= BATCHES_A_SECOND:
        return 0.0
    return min(SECONDS_AT_MOST, world_size / BATCHES_A_SECOND)
