"""A rank's session without a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from powertrain.worker.place import AttemptStart, Place
from powertrain.worker.progress import Gate
from powertrain.worker.session import Session

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def session_of(
    rank: int, world_size: int, positions: dict[str, Any] | None = None, checkpoint: str = "", **place: Any
) -> Session:
    """A rank's session without a run: what it would tell the user is put into ``service.said``."""
    said: list[str] = []
    service: Any = SimpleNamespace(row=0, said=said, post=lambda message: said.append(message.message))
    start = AttemptStart(checkpoint=checkpoint, data_positions=positions or {})
    where = Place(rank=rank, world_size=world_size, start=start, **place)
    return Session(where, service, Gate())


def counting(count: int) -> Dataset[Any]:
    """``range(count)``: a loader takes any sequence, although its annotation says Dataset."""
    return cast("Dataset[Any]", range(count))
