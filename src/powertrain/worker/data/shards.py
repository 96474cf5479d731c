"""The data of one rank: its shards of the run's datasets, where each stands, and where it goes on after a restart.

A dataset's place is a small state that is the same on every rank. It goes into each checkpoint by itself, and comes
back when the next attempt starts from that checkpoint and its loop has asked for it.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from powertrain.errors import ConfigError
from powertrain.storage import safety
from powertrain.trace.recording import current, marks
from powertrain.trace.recording.phases import H2D, INPUT
from powertrain.values.arguments import shorten
from powertrain.wire.from_worker import Noted
from powertrain.worker.data.batch_plan import gradient_weight
from powertrain.worker.progress import progress
from powertrain.worker.scripts import script

if TYPE_CHECKING:
    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.data.loading.own_skips import ResumedEpoch, SkipWatch
    from powertrain.data.plan.prepared import Prepared
    from powertrain.data.ray.shard import StreamedShard
    from powertrain.data.shard import DataShard
    from powertrain.worker.place import Place
    from powertrain.worker.service.service import Service

#: Under this name the extras of a checkpoint keep where each dataset stood.
DATA_EXTRA = "data"
#: Under this name how many batches of each were drawn without an optimizer step between them, at most.
GAPS_EXTRA = "data_gaps"
#: Seconds for which a place that beats tell of may be old.
_REFRESH_INTERVAL_S = 0.5

State = dict[str, Any]


@dataclass(frozen=True)
class DataPosition:
    """How far a dataset was read: ``position`` of the ``rows`` rows of ``epoch`` are behind.

    A negative position counts rows of the epoch before that come with the first step of this one.
    """

    epoch: int
    position: int
    rows: int

    def __str__(self) -> str:
        if self.position <= 0 and self.epoch > 0:
            # Nothing of this epoch was read: what was read is the one before.
            return f"epoch {self.epoch - 1}, 100 %"
        return f"epoch {self.epoch}, {max(0, self.position) * 100 // max(1, self.rows)} %"


def positions_in(extras: Mapping[str, Any]) -> dict[str, State]:
    """By dataset the state that a checkpoint's extras keep; empty where it was saved without data."""
    kept = extras.get(DATA_EXTRA)
    return {name: dict(state) for name, state in kept.items()} if isinstance(kept, Mapping) else {}


def gaps_in(extras: Mapping[str, Any]) -> dict[str, int]:
    """By dataset how many batches were drawn without an optimizer step, as a checkpoint's extras keep it."""
    kept = extras.get(GAPS_EXTRA)
    return (
        {name: gap for name, gap in kept.items() if isinstance(gap, int)} if isinstance(kept, Mapping) else {}
    )


def readable(states: Mapping[str, Mapping[str, Any]]) -> dict[str, DataPosition]:
    """States for people. What a state does not tell is left out, and so is a state that tells nothing."""
    return {
        name: DataPosition(state["epoch"], state["position"], state["rows"])
        for name, state in states.items()
        if {"epoch", "position", "rows"} <= set(state)
    }


def in_words(states: Mapping[str, Mapping[str, Any]]) -> str:
    """As beats and the terminal tell it: "train: epoch 3, 45 %; eval: epoch 0, 0 %"."""
    return "; ".join(f"{name}: {position}" for name, position in readable(states).items())


def is_of_stream(state: Mapping[str, Any]) -> bool:
    """True where a state is that of data that were streamed: it knows the epoch and no place in it."""
    return set(state) == {"epoch"}


def _shown(name: str, state: Mapping[str, Any]) -> str:
    return f"{name}: epoch {state['epoch']}" if is_of_stream(state) else in_words({name: state})


class RecordedWaits:
    """A shard's :class:`~powertrain.data.batching.Watch`: what the training thread waits for goes to its recorder,
    where there is one."""

    def wait(self) -> int:
        recorder = current.recording()
        return recorder.enter(INPUT) if recorder is not None else marks.IGNORED

    def copy(self) -> int:
        recorder = current.recording()
        return recorder.enter(H2D) if recorder is not None else marks.IGNORED

    def finish(self, began: int) -> None:
        recorder = current.recording()
        if recorder is not None:
            recorder.leave(began)

    def record(self, began: int, batch: Any, rows: int, seconds: float | None) -> None:
        recorder = current.recording()
        # Within another wait, as that of torch's loader around a shard, the batch is counted there.
        if recorder is not None and began == 0:
            recorder.batch(rows, _tokens_in(batch), marks.MADE_HERE if seconds is None else seconds)


class FirstWaits(RecordedWaits):
    """Recorded waits until the first batch, whose wait is a part of the rank's start."""

    def wait(self) -> int:
        progress.startup.wait_began()
        return super().wait()

    def finish(self, began: int) -> None:
        super().finish(began)
        progress.startup.wait_ended()


def _tokens_in(batch: Any) -> int:
    """Return the count of numbers in the column that models of text read."""
    ids = batch.get("input_ids") if isinstance(batch, dict) else None
    shape = getattr(ids, "shape", None)
    return math.prod(shape) if shape else 0


class StepWeights:
    """The datasets that gave a batch since the last optimizer step, with its weight. Pure except for its memory."""

    #: So many steps in a row with one batch of each of two datasets are no coincidence, such as an evaluation between.
    _IN_A_ROW = 3

    def __init__(self) -> None:
        self._steps = -1
        self._given: dict[str, list[float]] = {}
        self._mixed_in_a_row = 0

    def note(self, name: str, weight: float, steps: int) -> None:
        """Note that ``name`` has given a batch of ``weight`` after ``steps`` optimizer steps."""
        if steps != self._steps:
            self._steps, self._given = steps, {}
        self._given.setdefault(name, []).append(weight)
        if len(self._given) > 1:
            one_each = all(len(weights) == 1 for weights in self._given.values())
            differ = len({weights[0] for weights in self._given.values()}) > 1
            self._mixed_in_a_row = self._mixed_in_a_row + 1 if one_each and differ else 0

    @property
    def are_mixed(self) -> bool:
        """Return True when two datasets are read side by side and count differently."""
        return self._mixed_in_a_row >= self._IN_A_ROW


class RankSession(Protocol):
    """The part of a session that shards need."""

    @property
    def place(self) -> Place:
        """Return the place of this rank in its run."""

    @property
    def device(self) -> int:
        """Return the number of the rank's GPU; -1 without one."""

    @property
    def service(self) -> Service:
        """Return the rank's connection to the run."""


class Shards:
    """The shards of one attempt of one rank. Training thread only, except :meth:`described`."""

    def __init__(self, session: RankSession, datasets: bytes = b"") -> None:
        """``datasets`` is the pickled dict of the run's :class:`~powertrain.data.plan.prepared.Prepared`, if any."""
        self._session = session
        self._load: Callable[[], Mapping[str, Prepared]] = lambda: script.load(datasets) if datasets else {}
        self._shards: dict[str, DataShard | StreamedShard] = {}
        #: By name the function that returns the position of a reader outside the run's datasets.
        self._adopted: dict[str, Callable[[], State]] = {}
        #: Closed ones of them, whose position the next one of the same name takes over.
        self._left: dict[str, Callable[[], State]] = {}
        #: The position of each at the last refresh. Replaced whole, so that any thread may read it.
        self._seen: dict[str, State] = {}
        self._refreshed_at = 0.0
        #: Datasets that have given out a batch, and those whose saved position was resumed or replaced by the user.
        self._begun: set[str] = set()
        self._resumed: set[str] = set()
        self._logged_resuming: set[str] = set()
        self._asked_for_checkpoint = self._has_warned_of_unused = self._has_warned_of_weights = False
        self._weights = StepWeights()
        self._skip_watches: dict[str, SkipWatch] = {}
        self._captured: WeakKeyDictionary[Checkpoint, dict[str, State]] = WeakKeyDictionary()

    # -- shards

    def shard(self, name: str, state_dict: Mapping[str, Any] | None = None) -> DataShard | StreamedShard:
        """Return this rank's shard of a dataset, the same object each time; at the position of ``state_dict`` where one
        is given.

        Raises :class:`ConfigError` for a name that the trainer was not given.
        """
        if name not in self._shards:
            with progress.startup.waiting():
                self._shards[name] = self._open(name)
        shard = self._shards[name]
        if state_dict is not None:
            shard.load_state_dict(state_dict)
            self._resumed.add(name)  # the user has set the position
        return shard

    def adopt(self, name: str, state: Callable[[], State]) -> Callable[[], State | None]:
        """Keep the position of another reader of data, under a name of its own, with those of the datasets.

        ``state`` returns its position, on any thread. Returns a function for the position to begin at.
        """
        left = self._left.pop(name, None)
        if self._is_dataset(name) or (left is None and self._adopted.get(name, state) != state):
            raise ConfigError(
                f"The name {name!r} belongs to another dataset or data loader already, and a checkpoint keeps one "
                "position for each name. Give this one another: prepare_data_loader(loader, name=...)."
            )
        self._adopted[name] = state

        def resume() -> State | None:
            saved = self._saved(name) if left is None else left()
            if saved is None:
                self._warn_if_unused(name)
            return saved

        return resume

    def let_go(self, name: str) -> None:
        """Release the reader of this name. The next one of the same name continues at its position."""
        if name in self._adopted:
            self._left[name] = self._adopted[name]

    def left(self, name: str) -> State | None:
        """Return the position of the released reader of this name, if there is one."""
        return self._left[name]() if name in self._left else None

    def provide(self, load: Callable[[], Mapping[str, Prepared]]) -> None:
        """Take the datasets from ``load``, when the first is needed: for a rank that lives where they were made."""
        self._load = load

    @cached_property
    def _datasets(self) -> Mapping[str, Prepared]:
        return self._load()

    def _is_dataset(self, name: str) -> bool:
        return name in self._session.place.files.feeds or name in self._datasets

    def _open(self, name: str) -> DataShard | StreamedShard:
        place = self._session.place
        if name in place.files.feeds:
            return self._open_stream(name)
        if name not in self._datasets:
            raise ConfigError(_no_such_dataset(name, [*self._datasets, *place.files.feeds]))
        from powertrain.data.shard import DataShard

        blocks = os.path.join(place.data.cache, "blocks")
        return DataShard(
            self._datasets[name],
            rank=place.rank,
            world_size=place.world_size,
            local_world_size=place.local_world_size,
            cache_directory=blocks,
            disk_bytes=disk_budget(blocks, place.data.cache_bytes),
            memory_bytes=place.data.memory_bytes,
            resume=lambda: self._saved_position(name),
            requested=lambda resumed: self.requested(name, resumed),
            began=lambda weight: self._began(name, weight),
            on_change=place.data.on_change,
            device=self._device,
            warn=self.warn,
            watch=FirstWaits() if progress.startup.is_noted else RecordedWaits(),
        )

    def _open_stream(self, name: str) -> StreamedShard:
        from powertrain.data.ray.shard import StreamedShard

        place = self._session.place
        return StreamedShard(
            name,
            place.files.feeds[name],
            is_split=name not in place.data.whole_streams,
            world_size=place.world_size,
            resume=lambda: self._saved(name),
            began=lambda weight: self._began(name, weight),
            device=self._device,
            warn=self.warn,
            watch=FirstWaits() if progress.startup.is_noted else RecordedWaits(),
        )

    @property
    def _device(self) -> str:
        return f"cuda:{self._session.device}" if self._session.device >= 0 else "cpu"

    # -- after a restart

    def on_checkpoint_requested(self) -> None:
        """Resume data from the attempt's checkpoint, which the loop has requested."""
        self._asked_for_checkpoint = True

    @property
    def has_requested_checkpoint(self) -> bool:
        """Return True once the loop has requested the attempt's checkpoint."""
        return self._asked_for_checkpoint

    def _saved(self, name: str) -> State | None:
        """Return the position in the checkpoint, if the loop has requested the checkpoint."""
        saved = self._session.place.start.data_positions.get(name)
        if saved is None or not self._asked_for_checkpoint:
            return None
        self._resumed.add(name)
        return dict(saved)

    def _saved_position(self, name: str) -> State | None:
        """Return :meth:`_saved`. For streamed data only the epoch is known, which begins again."""
        from powertrain.data.plan.position import Position

        saved = self._saved(name)
        if saved is None:
            return None
        if not is_of_stream(saved):
            return at_its_epoch(saved) if self._session.place.data.resume == "epoch" else saved
        return Position.beginning(self._datasets[name], epoch=saved["epoch"]).as_dict()

    def _warn_if_unused(self, name: str) -> None:
        """Warn once that data begin anew although the checkpoint has their position."""
        saved = self._session.place.start.data_positions.get(name)
        if saved is None or name in self._resumed or self._has_warned_of_unused:
            return
        self._has_warned_of_unused = True
        if self._session.place.rank == 0:
            self.warn(
                f"The checkpoint that this attempt starts from has a position of the data ({_shown(name, saved)}), "
                "but the loop has not asked for its checkpoint, so training data starts at epoch 0. Call "
                "get_checkpoint() or load_state() before you read data."
            )

    def requested(self, name: str, resumed: ResumedEpoch | None = None) -> None:
        """Note a request for a batch; ``resumed`` is the position of the dataset, for the first one after a restart.

        Raises:
            DataError: The loop skips batches that were skipped for it.
        """
        watch = self._skip_watches.get(name)
        if watch is None:
            from powertrain.data.loading.own_skips import SkipWatch

            watch = self._skip_watches[name] = SkipWatch(name, self._session.place.start.data_gaps.get(name))
        if resumed is not None:
            watch.resume(resumed)
            if self._session.place.rank == 0 and name not in self._logged_resuming:
                self._logged_resuming.add(name)
                print(resumed.described(name), flush=True)
        watch.request(progress.steps)

    def drawn(self, name: str) -> None:
        """Note that a requested batch is handed out."""
        if (watch := self._skip_watches.get(name)) is not None:
            watch.draw()

    def _began(self, name: str, weight: float | None) -> None:
        """Note a batch that is about to be handed out, with its ``weight`` in the average over ranks; None where every
        rank has the same rows."""
        if weight is not None:
            self._weights.note(name, weight, progress.steps)
            gradient_weight.set(weight)
            if self._weights.are_mixed:
                self._warn_of_mixed_weights()
        progress.batch()
        self.drawn(name)
        if name not in self._begun:
            self._begun.add(name)
            if (shard := self._shards.get(name)) is not None:
                shard.watch = RecordedWaits()
            self._warn_if_unused(name)
        if progress.moved - self._refreshed_at >= _REFRESH_INTERVAL_S:
            self._refresh()

    def _warn_of_mixed_weights(self) -> None:
        is_repeated, self._has_warned_of_weights = self._has_warned_of_weights, True
        if not is_repeated and self._session.place.rank == 0:
            self.warn(
                "Two datasets are read for each optimizer step, and their last steps have different numbers of rows on "
                "a rank: the gradient is weighed by the one that is read last. Give both the same global_batch_size "
                "and tail='drop' or 'carry', or read the one that counts last."
            )

    # -- positions

    def positions(self) -> dict[str, State]:
        """Return the position of each dataset; for those not read yet, that of the checkpoint."""
        saved = self._session.place.start.data_positions if self._asked_for_checkpoint else {}
        live = {name: shard.kept() for name, shard in self._shards.items()}
        return {**saved, **live, **{name: state() for name, state in self._adopted.items()}}

    def capture(self, checkpoint: Checkpoint, positions: Mapping[str, State] | None = None) -> None:
        """Remember all positions for a checkpoint that was made now and is reported later.

        Args:
            checkpoint: The checkpoint.
            positions: The positions, for a loop that draws batches before it needs them; else the current ones.
        """
        self._captured[checkpoint] = self.positions() if positions is None else dict(positions)

    def extras_of(self, checkpoint: Any) -> dict[str, Any]:
        """Return the data positions for the manifest of a checkpoint: as of its making, or the current ones."""
        from powertrain.checkpoint.checkpoint import Checkpoint

        captured = self._captured.get(checkpoint) if isinstance(checkpoint, Checkpoint) else None
        positions = self.positions() if captured is None else captured
        if not positions:
            return {}
        return {DATA_EXTRA: positions, GAPS_EXTRA: {**self._session.place.start.data_gaps, **self._gaps()}}

    def _gaps(self) -> dict[str, int]:
        found = {name: watch.longest for name, watch in self._skip_watches.items()}
        return {name: longest for name, longest in found.items() if longest is not None}

    def described(self) -> str:
        """Return the positions of all started datasets as text, as of the last refresh. Any thread."""
        adopted = {name: state() for name, state in list(self._adopted.items())}
        return in_words({**self._seen, **adopted})

    def describe_now(self) -> str:
        """Refresh and return :meth:`described`. Training thread."""
        self._refresh()
        return self.described()

    def _refresh(self) -> None:
        self._refreshed_at = progress.moved
        self._seen = {name: shard.reached() for name, shard in self._shards.items() if name in self._begun}

    def close(self) -> None:
        """Stop reading ahead."""
        with ExitStack() as closing:
            for shard in self._shards.values():
                closing.callback(shard.close)
        self._shards.clear()

    def warn(self, message: str) -> None:
        """Warn the user: rank 0 at the terminal, the others in their own logs."""
        if self._session.place.rank == 0:
            self._session.service.post(Noted(message=message))
        else:
            warnings.warn(message, stacklevel=2)


def at_its_epoch(state: Mapping[str, Any]) -> State:
    """Return the state at the first batch of its epoch. Rows left over from the epoch before stay its first."""
    return {**state, "position": min(state.get("position", 0), 0)}


def disk_budget(directory: str, wanted: int) -> int:
    """Return the bytes that the blocks in ``directory`` may take: ``wanted``, or for -1 a quarter of the free and own
    space."""
    if wanted >= 0:
        return wanted
    used = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                used += os.lstat(os.path.join(parent, name)).st_size
            except OSError:  # another rank has just removed it
                continue
    return (safety.free_bytes(directory) + used) // 4


def _no_such_dataset(name: str, names: list[str]) -> str:
    shown = shorten(name)
    if not names:
        return (
            f"get_dataset_shard({shown}) was called, but the trainer was given no datasets. Give it some: "
            f"datasets={{{shown}: powertrain.data.read_parquet(path)}}."
        )
    there = ", ".join(map(repr, names))
    return (
        f"There is no dataset {shown} for get_dataset_shard: the trainer was given datasets={{...}} with {there}. Ask "
        "for one of these, or add it there."
    )
