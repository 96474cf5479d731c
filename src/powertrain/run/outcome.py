"""The outcome of a run, and the protocol of its observers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from powertrain.run import events as ev
from powertrain.run import lifecycle


class Observer(Protocol):
    """Receives the events of a run: the terminal, in a test a list."""

    def event(self, event: ev.Event) -> None: ...
    def row(self, row: int, by_rank: Sequence[Mapping[str, Any] | None], at: float) -> None: ...
    def waiting(self, row: int, ranks: Sequence[int], seconds: float) -> None: ...
    def data(self, text: str) -> None: ...
    def output(self, rank: int, data: bytes) -> None: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...


@dataclass(frozen=True)
class RunOutcome:
    """How a run ended."""

    state: str
    reason: str
    #: The last report of rank 0, unchanged; None without any.
    metrics: dict[str, Any] | None
    #: The pickled return value of rank 0.
    value: bytes
    failures: tuple[ev.WorkerFailure, ...]
    #: True when Ctrl-C ended it.
    interrupted: bool = False
    #: Staged shares of checkpoints that storage did not take in time: they must not be swept.
    left: tuple[str, ...] = ()
    #: True when the process that ran it was asked to end.
    is_to_leave: bool = False
    #: The replayed state of the run; None where it was left before it had ended.
    run: lifecycle.RunState | None = None
    #: The objects among ``metrics``: see :mod:`powertrain.values.kinds`.
    originals: dict[str, bytes] = field(default_factory=dict)
