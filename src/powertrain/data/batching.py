"""Batches on their way to the training loop: formats, and asynchronous copies to the device."""

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
    """Measures the time that the training thread spends on getting batches. Called on the training thread only."""

    def wait(self) -> int:
        """Begin a wait for rows. The returned value is passed to the other methods."""
        ...

    def copy(self) -> int:
        """Begin a copy of a batch to its device; likewise."""
        ...

    def finish(self, began: int) -> None:
        """End the wait or copy that began there."""
        ...

    def record(self, began: int, batch: Any, rows: int, seconds: float | None) -> None:
        """Record the awaited batch: its ``rows``, and the ``seconds`` that it took to make; None for as long as it was
        awaited."""
        ...


class _Unwatched:
    """A watch that measures nothing."""

    def wait(self) -> int:
        return 0

    def copy(self) -> int:
        return 0

    def finish(self, began: int) -> None:
        pass

    def record(self, began: int, batch: Any, rows: int, seconds: float | None) -> None:
        pass


UNWATCHED = _Unwatched()


class Seat(TypedDict):
    """The rank of a reader, and its resources."""

    rank: int
    world_size: int
    local_world_size: int
    cache_directory: str
    disk_bytes: int
    memory_bytes: int


class _MadeTogether(list[ReadyBatch[T]]):
    """Batches, and the seconds that a thread took to make them."""

    seconds: float


class TimedLoader(Loader):
    """A loader that measures how long batches take to make."""

    def _build(self, work: Any, cut: Cut[T]) -> _MadeTogether[T]:
        began = time.perf_counter()
        made = _MadeTogether(super()._build(work, cut))
        made.seconds = time.perf_counter() - began
        return made


def watched_copies(
    watch: Watch, hand_out: Callable[[T], Any], device: str | torch.device
) -> Callable[[T], Any]:
    """Return ``hand_out``, with ``watch`` notified of copies that a GPU has to wait for."""
    import torch

    if torch.device(device).type != "cuda":
        return hand_out

    def watched(made: T) -> Any:
        began = watch.copy()
        try:
            return hand_out(made)
        finally:
            watch.finish(began)

    return watched


def formatted(batch_format: str | None) -> Callable[[Rows], Any]:
    """Return the function that makes batches of this format."""
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
