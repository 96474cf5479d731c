"""The position of a loader: epoch, and batches handed out. It goes into checkpoints."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from powertrain.data.loading.early_ends import EarlyEnds, is_peek
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.plan.position import Position
from powertrain.errors import DataChangedError
from powertrain.torch.data_loader.options import OWN
from powertrain.worker.data.shards import at_its_epoch

if TYPE_CHECKING:
    from powertrain.worker.data.shards import Shards

_HOW_TO_PEEK = "one next(iter(loader)), which does not count as an epoch"


@dataclass(eq=False)
class Lap:
    """One iteration over a loader: an epoch, or the rest of one."""

    start: Position
    #: Position behind the last batch that was handed out.
    at: Position
    #: Number of requested batches.
    requested: int = 0


class Course:
    """The epoch of a loader, and the position in it. Holds nothing of the dataset itself.

    A lap is live from its ``iter()`` until it is exhausted or its iterator is dropped. The state of a live one is its
    epoch and position; otherwise it is the start of the next ``iter()``.
    """

    def __init__(self, beginning: Position, seed: int | None = None, restart_epoch: bool = False) -> None:
        """``beginning`` is that of epoch 0. ``seed`` is the user's, if any. ``restart_epoch`` accepts changed data and
        restarts the epoch."""
        self._beginning = beginning
        self._seed = seed
        self._restart_epoch = restart_epoch
        self._name = ""
        self._at_epoch = False
        #: Called when a batch is requested; with the resumed epoch for the first one after a restart.
        self.requested: Callable[[ResumedEpoch | None], None] = lambda resumed: None
        self.drawn: Callable[[], None] = lambda: None
        #: The lookup of a saved state.
        self.resumed_at: Position | None = None
        self._adopt: Callable[[], Callable[[], Mapping[str, Any] | None]] = lambda: lambda: None
        #: False until the start of the first lap is certain.
        self._is_start_known = False
        self._lap: Lap | None = None
        self._next = beginning
        #: True when the user has set the next epoch.
        self._is_epoch_set = False
        #: True when the newest lap only peeked at its first batch.
        self._has_looked = False
        self._early_ends = EarlyEnds("", lambda message: None, _HOW_TO_PEEK)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the data."""
        return self._beginning.fingerprint

    def keep_with(self, data: Shards, name: str, at_epoch: bool = False) -> None:
        """Register the state of this course with checkpoints from its first use on, and begin at the saved position, or
        with ``at_epoch`` at the start of its epoch.

        Not before its first use: until then a checkpoint keeps the state of the one before.
        """
        self._name = name
        self._at_epoch = at_epoch
        self._adopt = lambda: data.adopt(name, self.state)
        self.requested, self.drawn = (
            functools.partial(data.requested, name),
            functools.partial(data.drawn, name),
        )
        self._early_ends = EarlyEnds(name, data.warn, _HOW_TO_PEEK)

    def state(self) -> dict[str, Any]:
        """Return the state to resume from; the same on every rank. Any thread."""
        lap = self._lap
        return (lap.at if lap is not None else self._next).as_dict()

    def state_or_saved(self) -> dict[str, Any]:
        """Return the state as :meth:`state` does, for a course that may not have been used yet."""
        self._find_start(final=False)
        return self.state()

    def begin(self) -> Lap:
        """Begin a new lap, which abandons a live one."""
        self._find_start()
        if self._lap is not None:
            self.give_up(self._lap)
        self._early_ends.begin(self._next.epoch)
        self._lap, self._is_epoch_set = Lap(self._next, self._next), False
        return self._lap

    def end(self, lap: Lap, carried: int = 0) -> None:
        """End ``lap``, which has no batch left. The next epoch begins at ``carried``: below 0 with rows of this one."""
        if lap is self._lap:
            self._has_looked = False
            self._leave(lap, self._position(lap.at.epoch + 1, carried, lap.at.seed))

    def give_up(self, lap: Lap, is_meant: bool = False) -> None:
        """Abandon ``lap`` with batches left.

        A peek at its first batch does not count as an epoch. A second one in a row does, because the loop then seems
        to take one batch from each iteration, which torch's loaders shuffle anew. Warns where rows are left unread,
        unless that ``is_meant``.
        """
        if lap is not self._lap:
            return
        if lap.requested == 0 or (is_peek(lap.requested) and not self._has_looked):
            self._has_looked = self._has_looked or lap.requested > 0
            self._leave(lap, lap.start)
            return
        if not is_peek(lap.requested):
            self._has_looked = False
        if not is_meant:
            batches = "batch" if lap.requested == 1 else "batches"
            self._early_ends.note_rest(lap.at.epoch, f"{lap.requested} {batches}")
        self._leave(lap, self._position(lap.at.epoch + 1, 0, lap.at.seed))

    def _leave(self, lap: Lap, following: Position) -> None:
        if not self._is_epoch_set:
            self._next = following
        self._lap = None

    def set_epoch(self, epoch: int) -> None:
        """Make the next lap this epoch: the rest of it if that was next anyway, otherwise all of it."""
        self._find_start()
        if self._lap is not None or epoch != self._next.epoch:
            self._next = self._position(int(epoch), 0, self._next.seed)
        self._is_epoch_set = True

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``. Raises :class:`DataChangedError` where it belongs to other data."""
        saved = self._checked(Position.from_dict(state, self._name))
        if self._seed is not None and self._seed != saved.seed:
            saved = saved.with_seed(self._seed)
        # An epoch under way continues in the order that it was begun with.
        self._next = saved if saved.position else self._position(saved.epoch, 0, saved.seed)
        self._lap, self._is_epoch_set = None, False
        if not self._is_start_known:
            self._is_start_known = True
            self._adopt()

    def _checked(self, saved: Position) -> Position:
        """Return ``saved``, or the start of its epoch where its position is not valid here."""
        mine = self._beginning
        start = self._position(saved.epoch, 0, saved.seed)
        if saved.fingerprint == mine.fingerprint:
            # A sampler's position is not valid for another kind of sampler.
            return start if OWN in (saved.shuffle, mine.shuffle) else saved
        found = (
            f"The dataset of {self._name!r} is not what it was when its position was saved: it was "
            f"{_in_words(saved.fingerprint)} and is {_in_words(mine.fingerprint)} now."
        )
        if not self._restart_epoch:
            raise DataChangedError(
                f"{found} A position in other data means nothing. Use the same data, or let the epoch begin again "
                'with DataConfig(on_change="restart_epoch").'
            )
        warnings.warn(f"{found} Epoch {saved.epoch} begins again from its start.", stacklevel=2)
        return start

    def _position(self, epoch: int, position: int, seed: int) -> Position:
        return replace(self._beginning, epoch=epoch, position=position, seed=seed)

    def _find_start(self, final: bool = True) -> None:
        """Load the saved state. Where there is none, the lookup may be repeated unless this one is final."""
        if self._is_start_known:
            return
        saved = self._adopt()()
        if saved is not None:
            self.load(at_its_epoch(saved) if self._at_epoch else saved)
            self.resumed_at = self._next
        self._is_start_known = self._is_start_known or final


def _in_words(fingerprint: str) -> str:
    kind, _, rows = fingerprint.rpartition(":")
    return f"a {kind} with {rows} rows" if rows != "-1" else f"a {kind} of unknown length"
