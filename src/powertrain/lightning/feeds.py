"""The data of a Trainer, with positions that checkpoints keep: every row once per epoch, also after a restart.

Lightning's own DistributedSampler repeats rows where they do not divide evenly, and knows no position. So a training
loader that would get one is prepared as by ``powertrain.torch.prepare_data_loader``. Around this and around everything
else that Lightning iterates over lies a :class:`LoaderFeed`, which ends iterations where Lightning leaves them.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from powertrain.errors import DataError
from powertrain.worker import session
from powertrain.worker.data.batch_plan import gradient_weight

#: Batches that Lightning may hold beyond the one that it trains on, and the one itself.
_REMEMBERED = 8
#: Lightning announces the epoch to a loader's sampler after it has begun to iterate. Prepared loaders count themselves.
_HIDDEN = ("sampler", "batch_sampler")

Positions = dict[str, dict[str, Any]]


class LoaderFeed:
    """One loader of a Trainer. Everything but iterating is the loader's own."""

    def __init__(self, batches: Any, epoch: Callable[[], int] = lambda: 0) -> None:
        """``epoch`` returns Lightning's epoch; it is used as long as the data have no position of their own."""
        self._batches = batches
        self._epoch = epoch
        self._live: _Lap | None = None
        self.has_begun = False
        #: Weight of the newest batch in the average over ranks.
        self.weight = 1.0
        #: After each of the newest draws: the positions of all data, and the weight of the batch.
        self.history: deque[tuple[Positions, float]] | None = None
        if self.length is None:
            self.history = deque(maxlen=_REMEMBERED)

    @property
    def length(self) -> int | None:
        """Number of batches of a whole epoch; None where unknown."""
        try:
            return len(self._batches)
        except (TypeError, NotImplementedError):
            return None

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def batches_behind(self) -> int | None:
        """Number of batches of the epoch that were drawn before the iteration under way; None where unknown."""
        left = getattr(self._batches, "batches_left", None)
        rest = left() if callable(left) else None
        return len(self) - rest if rest is not None else None

    def __bool__(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_batches" not in self.__dict__:
            raise AttributeError(name)
        if name in _HIDDEN and _is_prepared(self._batches):
            raise AttributeError(name)
        return getattr(self._batches, name)

    @property
    def _iterator(self) -> Any:
        """Of torch's loader, whose processes Lightning ends through it."""
        return getattr(self._batches, "_iterator", None)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if hasattr(self._batches, "_iterator"):
            self._batches._iterator = value

    def __iter__(self) -> Iterator[Any]:
        self.close()
        if not self.has_begun:
            self._follow_epoch()
        self._live = _Lap(self, iter(self._batches))
        return self._live

    def _follow_epoch(self) -> None:
        """Begin with the epoch that a checkpoint of somewhere else was in, where it brought no position."""
        set_epoch = getattr(getattr(self._batches, "sampler", None), "set_epoch", None)
        epoch = self._epoch()
        if epoch and callable(set_epoch) and _is_beginning(self.state_dict()):
            set_epoch(epoch)

    def note_draw(self) -> None:
        """A batch was handed to Lightning."""
        self.has_begun = True
        self.weight = gradient_weight.value
        if self.history is not None:
            self.history.append((session.current("fit").data.positions(), self.weight))

    def close(self, *, only_if_drawn: bool = False) -> None:
        """End the iteration under way: Lightning takes no more from it. A rest of its epoch is left out."""
        live = self._live
        if live is None or (only_if_drawn and not live.drawn):
            return
        self._live = None
        live.close()

    def release(self) -> None:
        """Let go of the loader, whose position goes to the one that is prepared next."""
        self.close()
        self._batches = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for Lightning's own checkpoints; empty where the loader has no state."""
        own = getattr(self._batches, "state_dict", None)
        if not callable(own):
            return {}
        try:
            return dict(own())
        except DataError:  # streamed data have no position
            return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the result of :meth:`state_dict`."""
        load = getattr(self._batches, "load_state_dict", None)
        if state and callable(load):
            load(state)


def _is_beginning(state: Mapping[str, Any]) -> bool:
    return not state.get("epoch") and not state.get("position")


class _Lap:
    """One iteration over a feed."""

    def __init__(self, feed: LoaderFeed, batches: Iterator[Any]) -> None:
        self._feed = feed
        self._batches: Iterator[Any] | None = batches
        self.drawn = 0

    def __iter__(self) -> _Lap:
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            raise StopIteration
        gradient_weight.set(1.0)
        batch = next(self._batches)
        self.drawn += 1
        self._feed.note_draw()
        return batch

    def close(self) -> None:
        batches, self._batches = self._batches, None
        if self.drawn == 1 and batches is not None:
            # An iteration with a single request counts as a look at the data, which the next one would repeat.
            next(batches, None)
        if callable(close := getattr(batches, "close", None)):
            close()


class Feeds:
    """All feeds of one Trainer."""

    def __init__(self) -> None:
        self._training: list[LoaderFeed] = []
        self._replaced: list[LoaderFeed] = []
        self._others: list[LoaderFeed] = []

    def add(self, loader: Any, trainer: Any) -> Any:
        """Return the iterable for Lightning in place of ``loader``."""
        if trainer.predicting:  # Lightning has a batch sampler of its own in it
            return loader
        if trainer.training:
            return self._add_training(loader, trainer)
        if _is_of_torch(loader):
            return loader
        feed = LoaderFeed(loader)
        self._others.append(feed)
        return feed

    def _add_training(self, loader: Any, trainer: Any) -> Any:
        if any(feed.has_begun for feed in self._training):
            # reload_dataloaders_every_n_epochs, or another fit(): these take the places of those.
            self._replaced, self._training = self._training, []
        if self._replaced:
            self._replaced.pop(0).release()
        if _is_of_torch(loader):
            undivided = _without_sampler(loader, trainer.world_size, trainer.global_rank)
            if undivided is None:
                return loader
            from powertrain.torch.data_loader.prepare import prepare_data_loader

            loader = prepare_data_loader(undivided, move_to_device=False)
        feed = LoaderFeed(loader, lambda: int(trainer.fit_loop.epoch_progress.current.processed))
        self._training.append(feed)
        return feed

    def align_positions(self, trainer: Any) -> Positions | None:
        """Bring all positions to where Lightning is, between two batches.

        Returns:
            The positions of all data, where Lightning holds batches that it has not trained on yet. Else None: the
            data stand where they are to be continued.
        """
        for feed in self._others:
            feed.close(only_if_drawn=True)
        if trainer.is_last_batch:
            # Lightning does not request a batch that it knows is missing, so the data layer has not seen the end.
            for feed in self._training:
                feed.close(only_if_drawn=True)
        found = self._before_prefetch(trainer)
        return found[0] if found is not None else None

    def count_resumed(self, trainer: Any) -> None:
        """Correct how many batches of a resumed epoch Lightning counts as trained on.

        It counts as many as there were with the number of workers that it was saved with. With another one they have
        other sizes, and Lightning would end the epoch too early, or wait for batches that do not come.
        """
        loop = trainer.fit_loop
        if not loop.restarting or not self._training:
            return
        progress = loop.epoch_loop.batch_progress
        behind = max(feed.batches_behind or 0 for feed in self._training)
        if loop.restarted_on_epoch_end and not behind:
            # Limited by steps, Lightning would take the first batch of the new epoch for the last of the old one.
            loop.epoch_progress.increment_completed()
            loop.reset_restart_stage()
            loop.epoch_loop.restarting = False
        elif behind and behind != progress.current.ready and not progress.is_last_batch:
            counts = progress.current
            completed = behind - (counts.processed - counts.completed)
            counts.ready = counts.started = counts.processed = behind
            counts.completed = completed

    def weight(self, trainer: Any) -> float:
        """Return the weight of the current batch in the average over ranks."""
        found = self._before_prefetch(trainer)
        if found is not None:
            return found[1]
        return self._training[-1].weight if self._training else 1.0

    def _before_prefetch(self, trainer: Any) -> tuple[Positions, float] | None:
        """Of a loader without a length Lightning draws a batch ahead, to know which one is the last."""
        ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))
        history = next((feed.history for feed in reversed(self._training) if feed.history is not None), None)
        if not ahead or history is None or len(history) <= ahead:
            return None
        return history[-1 - ahead]


def _is_prepared(loader: Any) -> bool:
    from powertrain.torch.data_loader.loader import PreparedDataLoader

    return isinstance(loader, PreparedDataLoader)


def _is_of_torch(loader: Any) -> bool:
    """True for a DataLoader that is not prepared."""
    from torch.utils.data import DataLoader

    return isinstance(loader, DataLoader) and not _is_prepared(loader)


def _without_sampler(loader: Any, world_size: int, rank: int) -> Any:
    """Return the loader as it was before Lightning gave it a DistributedSampler; None where that is not the case.

    The sampler of a user stays, in Lightning's wrapper or without, and so does a batch sampler of a user's class.
    """
    import torch
    from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

    sampler = loader.sampler
    if hasattr(loader, "state_dict"):  # a class of its own, with positions of its own
        return None
    if type(sampler) is not DistributedSampler or (sampler.num_replicas, sampler.rank) != (world_size, rank):
        return None
    if sampler.drop_last or (
        loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    ):
        return None
    if sampler.shuffle:
        generator = torch.Generator()
        generator.manual_seed(sampler.seed)
        plain: Any = RandomSampler(loader.dataset, generator=generator)
    else:
        plain = SequentialSampler(loader.dataset)
    undivided = copy.copy(loader)
    batches = loader.batch_sampler
    if batches is not None:
        batches = BatchSampler(plain, batches.batch_size, batches.drop_last)
    # Past DataLoader's guard against changes, which is there for loaders already in use.
    undivided.__dict__.update(sampler=plain, batch_sampler=batches)
    return undivided
