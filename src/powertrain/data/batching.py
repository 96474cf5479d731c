"""Batches on their way to the training loop: formats, and copies to the device ahead of time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

from powertrain.data.arguments import one_of
from powertrain.data.loading.loader import Cut, Loader, ReadyBatch
from powertrain.data.rows.rows import Rows

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
BATCH_SIZE = 256


class Watch(Protocol):
    """Is told what the training thread spends on getting batches. Training thread only."""

    def wait(self) -> int:
        """It waits for rows from here on. The answer is for the other two."""
        ...

    def copy(self) -> int:
        """It brings a batch to its device from here on; likewise."""
        ...

    def go_on(self, began: int) -> None:
        """What began there is over."""
        ...

    def came(self, began: int, batch: Any, rows: int, seconds: float | None) -> None:
        """What was waited for came: ``rows`` in it, and ``seconds`` for which it was made; None for as long as it was
        waited for."""
        ...


class _Unwatched:
    """For whom nobody wants to know."""

    def wait(self) -> int:
        return 0

    def copy(self) -> int:
        return 0

    def go_on(self, began: int) -> None:
        pass

    def came(self, began: int, batch: Any, rows: int, seconds: float | None) -> None:
        pass


UNWATCHED = _Unwatched()


class Seat(TypedDict):
    """Which rank reads, and with what."""

    rank: int
    world_size: int
    local_world_size: int
    cache_directory: str
    disk_bytes: int
    memory_bytes: int


class _MadeTogether(list[ReadyBatch[T]]):
    """Batches, and for how many seconds a thread was making them."""

    seconds: float


class TimedLoader(Loader):
    """A loader that says how long batches took to make."""

    def _build(self, work: Any, cut: Cut[T]) -> _MadeTogether[T]:
        began = time.perf_counter()
        made = _MadeTogether(super()._build(work, cut))
        made.seconds = time.perf_counter() - began
        return made


def watched_copies(
    watch: Watch, hand_out: Callable[[T], Any], device: str | torch.device
) -> Callable[[T], Any]:
    """``hand_out``; where it lets a GPU wait for what is copied to it, ``watch`` is told."""
    import torch

    if torch.device(device).type != "cuda":
        return hand_out

    def watched(made: T) -> Any:
        began = watch.copy()
        try:
            return hand_out(made)
        finally:
            watch.go_on(began)

    return watched


def formatted(batch_format: str | None) -> Callable[[Rows], Any]:
    """Return what makes batches of this form."""
    from powertrain.data.rows import formats

    makers = {
        None: formats.to_arrow,
        "default": formats.to_numpy,
        "numpy": formats.to_numpy,
        "pandas": formats.to_pandas,
        "pyarrow": formats.to_arrow,
    }
    advice = "Use 'numpy', 'pandas' or 'pyarrow'; tensors come from iter_torch_batches."
    return makers[one_of("batch_format", batch_format, tuple(makers), advice)]
