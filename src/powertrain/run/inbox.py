"""Events in the controller's inbox that do not come from an engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interrupt:
    """Ctrl-C was pressed in the driver."""


@dataclass(frozen=True)
class EndEarly:
    """A callback asks the run to end at its next boundary."""

    reason: str


@dataclass(frozen=True)
class Delivered:
    """Batches of workers have arrived."""


@dataclass(frozen=True)
class UnreadableMessage:
    """A message of a worker could not be decoded."""

    sender: bytes
    problem: str


@dataclass(frozen=True)
class Disconnected:
    """The connection of a worker is closed."""

    key: bytes


@dataclass(frozen=True)
class LeaseLost:
    """Another controller has taken the run."""

    reason: str


@dataclass(frozen=True)
class WarningPosted:
    """A warning of another thread."""

    message: str


@dataclass(frozen=True)
class EndNoticed:
    """The process that runs the controller was asked to end."""

    reason: str
