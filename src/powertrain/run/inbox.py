"""Events in the controller's inbox that do not come from an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interrupt:
    pass


@dataclass(frozen=True)
class Delivered:
    """Batches of workers have come."""


@dataclass(frozen=True)
class Parted:
    """The connection of a worker has ended."""

    key: bytes


@dataclass(frozen=True)
class LeaseLost:
    reason: str


@dataclass(frozen=True)
class Said:
    message: str


@dataclass(frozen=True)
class Noticed:
    """The process that runs this was asked to end."""

    reason: str
