"""The position of a loader: epoch, and batches handed out. It goes into checkpoints."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from powertrain.data.loading.early_ends import EarlyEnds, is_look
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.plan.position import Position
from powertrain.errors import DataChangedError
from powertrain.torch.data_loader.options import OWN
from powertrain.worker.data.shards import at_its_epoch

if TYPE_CHECKING:
    from powertrain.worker.data.shards import Shards

_HOW_TO_LOOK = "one next(iter(loader)), which does not count as an epoch"


@dataclass(eq=False)
class Lap:
    """One iteration over a loader: an epoch, or the rest of one."""

    start: Position
    #: Behind the last batch that was handed out.
    at: Position
    #: How many batches were requested.
    requested: int = 0


class Course:
    """Which epoch a loader is in, and how far. Holds nothing of the dataset itself.

    A lap is live from its ``iter()`` until it is exhausted or its iterator is dropped. The state of a live one is its
    epoch and position; otherwise it is what the next ``iter()`` gives.
    """

    def __init__(self, beginning: Position, seed: int | None = None, restart_epoch: bool = False) -> None:
        """``beginning`` is that of epoch 0. ``seed`` is what the user insists on. ``restart_epoch`` says that data
        which has changed is no error."""
        self._beginning = beginning
        self._seed = seed
        self._restart_epoch = restart_epoch
        self._name = ""
        self._at_epoch = False
        #: Called when a batch is requested; with where the epoch goes on for the first one after a restart.
        self.requested: Callable[[ResumedEpoch | None], None] = lambda resumed: None
        self.drawn: Callable[[], None] = lambda: None
        #: Where what was saved is taken up.
        self.resumed_at: Position | None = None
        self._adopt: Callable[[], Callable[[], Mapping[str, Any] | None]] = lambda: lambda: None
        #: False until it is certain where the first lap begins.
        self._settled = False
        self._lap: Lap | None = None
        self._next = beginning
        #: True when the user has said which epoch is next.
        self._told = False
        #: True when the newest lap was only a look at its first batch.
        self._has_looked = False
        self._early_ends = EarlyEnds("", lambda message: None, _HOW_TO_LOOK)

    @property
    def fingerprint(self) -> str:
        """Of the data."""
        return self._beginning.fingerprint

    def keep_with(self, data: Shards, name: str, at_epoch: bool = False) -> None:
        """Let checkpoints keep the state of this course from its first use on, and begin where the last one left it,
        or ``at_epoch``, where its epoch begins.

        Not before its first use: until then a checkpoint keeps what was saved in the one before.
        """
        self._name = name
        self._at_epoch = at_epoch
        self._adopt = lambda: data.adopt(name, self.state)
        self.requested, self.drawn = (
            functools.partial(data.requested, name),
            functools.partial(data.drawn, name),
        )
        self._early_ends = EarlyEnds(name, data.warn, _HOW_TO_LOOK)

    def state(self) -> dict[str, Any]:
        """What has to be kept to go on from here; the same on every rank. Any thread."""
        lap = self._lap
        return (lap.at if lap is not None else self._next).as_dict()

    def look(self) -> dict[str, Any]:
        """As :meth:`state`, of a course that may not have been used yet."""
        self._settle(final=False)
        return self.state()

    def begin(self) -> Lap:
        """A new lap. A live one is abandoned by it."""
        self._settle()
        if self._lap is not None:
            self.give_up(self._lap)
        self._early_ends.begin(self._next.epoch)
        self._lap, self._told = Lap(self._next, self._next), False
        return self._lap

    def end(self, lap: Lap, carried: int = 0) -> None:
        """``lap`` has no batch left. The next epoch begins at ``carried``: below 0 with rows of this one."""
        if lap is self._lap:
            self._has_looked = False
            self._leave(lap, self._position(lap.at.epoch + 1, carried, lap.at.seed))

    def give_up(self, lap: Lap, is_meant: bool = False) -> None:
        """``lap`` is abandoned with batches left.

        A look at its first batch does not count as an epoch. A second one in a row does, because the loop then seems
        to take one batch from each iteration, which torch's loaders shuffle anew. A warning follows where rows are
        left unread, unless that ``is_meant``.
        """
        if lap is not self._lap:
            return
        if lap.requested == 0 or (is_look(lap.requested) and not self._has_looked):
            self._has_looked = self._has_looked or lap.requested > 0
            self._leave(lap, lap.start)
            return
        if not is_look(lap.requested):
            self._has_looked = False
        if not is_meant:
            batches = "batch" if lap.requested == 1 else "batches"
            self._early_ends.note_rest(lap.at.epoch, f"{lap.requested} {batches}")
        self._leave(lap, self._position(lap.at.epoch + 1, 0, lap.at.seed))

    def _leave(self, lap: Lap, following: Position) -> None:
        if not self._told:
            self._next = following
        self._lap = None

    def set_epoch(self, epoch: int) -> None:
        """The next lap is this epoch: the rest of it where it was to be anyway, otherwise all of it."""
        self._settle()
        if self._lap is not None or epoch != self._next.epoch:
            self._next = self._position(int(epoch), 0, self._next.seed)
        self._told = True

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises :class:`DataChangedError` where it belongs to other data."""
        saved = self._checked(Position.from_dict(state, self._name))
        if self._seed is not None and self._seed != saved.seed:
            saved = saved.with_seed(self._seed)
        # An epoch under way goes on in the order that it was begun with.
        self._next = saved if saved.position else self._position(saved.epoch, 0, saved.seed)
        self._lap, self._told = None, False
        if not self._settled:
            self._settled = True
            self._adopt()

    def _checked(self, saved: Position) -> Position:
        """``saved``, or the start of its epoch where its position means nothing here."""
        mine = self._beginning
        start = self._position(saved.epoch, 0, saved.seed)
        if saved.fingerprint == mine.fingerprint:
            # One sampler's position is nothing to another kind of sampler.
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

    def _settle(self, final: bool = True) -> None:
        """Take up what was saved. Where nothing was, it may be asked for again unless this is said to be final."""
        if self._settled:
            return
        saved = self._adopt()()
        if saved is not None:
            self.load(at_its_epoch(saved) if self._at_epoch else saved)
            self.resumed_at = self._next
        self._settled = self._settled or final


def _in_words(fingerprint: str) -> str:
    kind, _, rows = fingerprint.rpartition(":")
    return f"a {kind} with {rows} rows" if rows != "-1" else f"a {kind} of unknown length"
