"""``PreparedDataLoader``: counts a batch when it is handed out, whatever torch's loader has prefetched."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from powertrain.data.loading.early_ends import is_peek
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.plan.position import Position
from powertrain.torch.data_loader.accelerated import follow_iteration
from powertrain.torch.data_loader.moving import copied_ahead, move_batch
from powertrain.torch.data_loader.sharing import comes_in_any_order
from powertrain.torch.data_loader.whole_epoch import WholeEpoch
from powertrain.worker.data import batch_plan
from powertrain.worker.progress import progress

if TYPE_CHECKING:
    from powertrain.torch.data_loader.course import Lap
    from powertrain.torch.data_loader.sharing import Sharing


#: The generator that spreads ranks' seeds: 2**64 divided by the golden ratio.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class RankSeeded:
    """A ``worker_init_fn`` that seeds a loader's processes apart on each rank, then calls the user's.

    Torch seeds them from the rank's own generator, and ranks whose script sets one seed for all would
    augment alike. Rank 0 keeps torch's seeds. A scheduler's SIGTERM to every process of a job does not end
    them: the rank needs its batches until it has saved, and they end with it.
    """

    def __init__(self, rank: int, then: Callable[[int], None] | None) -> None:
        self.rank, self.then = rank, then

    def __call__(self, worker_id: int) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        if self.rank:
            seed = (torch.initial_seed() + self.rank * _SEED_STRIDE) % 2**63
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed([seed >> 32, seed & 0xFFFFFFFF])
        if self.then is not None:
            self.then(worker_id)


class PreparedDataLoader(DataLoader[Any]):
    """A DataLoader that advances the epoch, keeps its position, weighs batches and moves them to the device.

    Everything else, reading and setting attributes included, is the inner loader's.
    """

    #: Hugging Face Accelerate leaves loaders with this mark as they are: see
    #: :mod:`powertrain.torch.data_loader.accelerated`.
    _is_accelerate_prepared = True

    def __init__(
        self, inner: DataLoader[Any], sharing: Sharing, device: torch.device | None, auto_transfer: bool
    ) -> None:
        # Not DataLoader's own __init__: all options are in the inner loader.
        self.__dict__.update(_inner=inner, _sharing=sharing, _device=device, _auto_transfer=auto_transfer)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # accessed by copy and pickle before the attributes are set
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        return len(self._inner)

    def batches_left(self) -> int | None:
        """Return the number of batches left in the epoch under way, or in the next one; None where unknown."""
        cut = self._sharing.cut
        return cut.steps(self.state_dict()["position"]) if cut is not None else None

    @property
    def epoch(self) -> int:
        """The epoch under way, or that of the next ``iter()``."""
        return int(self._sharing.course.state_or_saved()["epoch"])

    def epochs(self, count: int) -> Iterator[int]:
        """Return the numbers of the remaining epochs of ``count``, from the one that a restart resumes.

        ::

            for epoch in loader.epochs(10):
                for batch in loader:
        """
        for epoch in range(self.epoch, count):
            self._sharing.course.set_epoch(epoch)
            yield epoch

    @property
    def weight(self) -> float:
        """Gradient weight of the batch handed out last: see ``DataShard.weight``."""
        return float(self._sharing.weight)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the loader, in less than 400 bytes; the same on every rank.

        The next ``iter()`` after a restart begins there: with the rest of an epoch under way, from behind the last
        batch that was handed out; otherwise with the next epoch.
        """
        state: dict[str, Any] = self._sharing.course.state_or_saved()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` resume from ``state``, with any number of workers.

        The seed in it holds from then on. Raises :class:`~powertrain.errors.DataChangedError` where the dataset has
        another type or length.
        """
        self._sharing.course.load(state)

    def __iter__(self) -> Any:
        sharing: Sharing = self._sharing
        lap = sharing.course.begin()
        if sharing.shard is not None:
            sharing.shard.begin(lap.start)
        with progress.startup.waiting():
            batches: Iterator[Any] = WholeEpoch(iter(self._inner), self._inner.dataset)
        if self._device is not None and self._device.type == "cuda":
            batches = self._on_gpu(batches)
        return _HandedOut(batches, lap, sharing, keeps_order=not comes_in_any_order(self._inner))

    def _on_gpu(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._auto_transfer:
            return copied_ahead(batches, self._device)
        return (move_batch(batch, self._device) for batch in batches)


class _HandedOut:
    """The batches of one lap. Each is counted as it is handed out; when this is dropped, the lap is over."""

    def __init__(self, batches: Iterator[Any], lap: Lap, sharing: Sharing, keeps_order: bool) -> None:
        self._batches: Iterator[Any] = batches
        self._lap, self._sharing = lap, sharing
        self._cut = sharing.cut if keeps_order else None
        self._resumed = self._resumed_epoch()
        self._followed = follow_iteration()

    def _resumed_epoch(self) -> ResumedEpoch | None:
        """Return the resumed epoch after a restart; None for a lap that begins with its epoch."""
        cut, start = self._cut, self._lap.start
        if cut is None or start.position <= 0 or start != self._sharing.course.resumed_at:
            return None
        skipped = -(-start.position // cut.global_batch)
        return ResumedEpoch(start.epoch, skipped, skipped + cut.steps(start.position))

    def __iter__(self) -> _HandedOut:
        return self

    def __next__(self) -> Any:
        self._lap.requested += 1
        resumed, self._resumed = self._resumed, None
        self._sharing.course.requested(resumed)
        try:
            batch = next(self._batches) if progress.batches else self._first()
        except StopIteration:
            self._end()
            raise
        except Exception:
            self._pass_step()  # torch has consumed its rows: the next request gets those after them
            raise
        cut, at = self._cut, self._lap.at
        self._sharing.weight = cut.weight(at.position) if cut is not None else 1.0
        if self._sharing.weighs:
            batch_plan.gradient_weight.set(self._sharing.weight)
        progress.batch()
        self._sharing.course.drawn()
        self._pass_step()
        if cut is not None and not cut.steps(self._lap.at.position):
            self._followed.end_of_dataloader = True
        return batch

    def _first(self) -> Any:
        """Return the next batch, which the rank's first step waits for."""
        with progress.startup.waiting():
            return next(self._batches)

    def _pass_step(self) -> None:
        at = self._lap.at
        if self._cut is not None:
            self._lap.at = Position.at(at, at.epoch, self._cut.after(at.position))

    def close(self) -> None:
        """Abandon the rest of the epoch. Before the second batch was requested, the epoch does not count as begun."""
        self._give_up(is_meant=True)

    def _give_up(self, is_meant: bool = False) -> None:
        cut, lap = self._cut, self._lap
        if cut is not None and not is_peek(lap.requested) and not cut.steps(lap.at.position):
            self._end()  # no batch was left
            return
        self._batches = iter(())
        self._followed.end()
        self._sharing.course.give_up(lap, is_meant)

    def _end(self) -> None:
        self._batches = iter(())
        self._followed.end()
        carried = self._cut.carried(self._lap.at.position) if self._cut is not None else 0
        self._sharing.course.end(self._lap, carried)

    def __del__(self) -> None:
        self._give_up()
