"""A torch DataLoader on many ranks: every row once per epoch, in an order that does not depend on how many they are.

- :class:`Course` knows which epoch a loader is in and how far: that goes into checkpoints.
- :class:`StepCut` is pure: how an epoch is cut into steps, and a step into the parts of the ranks.
- :class:`OrderedShard` and :class:`DrawnShard` are samplers that give torch's loader this rank's rows.
- :class:`PreparedDataLoader` is what the user gets. It notes a batch when it is handed out, whatever torch's loader
  has fetched ahead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import random
import reprlib
import signal
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from powertrain.values.arguments import as_flag, shorten
from powertrain.config import Refusal, whole
from powertrain.data.rows.device import map_tensors
from powertrain.data.loading.early_ends import EarlyEnds, is_look
from powertrain.data.plan.order import LANES, EpochOrder, after_epoch, part_of, steps_left
from powertrain.data.loading.own_skips import ResumedEpoch
from powertrain.data.plan.position import Position
from powertrain.errors import ConfigError, DataChangedError
from powertrain.torch.data_loader.accelerated import follow_iteration
from powertrain.torch.data_loader.whole_epoch import CheckedCollate, WholeEpoch
from powertrain.trace import recording
from powertrain.trace.recording.phases import H2D
from powertrain.worker.data import batch_plan
from powertrain.worker.progress import progress
from powertrain.worker.data.shards import at_its_epoch

if TYPE_CHECKING:
    from powertrain.worker.context import Session
    from powertrain.worker.data.shards import Shards

Tail = Literal["partial", "drop", "carry"]

#: The generator that spreads ranks' seeds: 2**64 divided by the golden ratio.
_SEED_STRIDE = 0x9E3779B97F4A7C15
#: Seeds go through JSON and msgpack, where 64 bits are not safe everywhere.
_LARGEST_SEED = 2**53 - 1
#: Up to this many rows one permutation orders them all; more are shuffled in pieces, so that none gets huge.
_ROWS_IN_ONE_PERMUTATION = 2**24
#: The ``shuffle`` in the state of a loader whose order is its sampler's own affair.
_OWN = "own"
#: A state must stay small, whatever a dataset's class is called.
_LONGEST_TYPE_NAME = 100
_HOW_TO_LOOK = "one next(iter(loader)), which does not count as an epoch"


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    global_batch_size: int | None = None,
    tail: Tail | None = None,
    name: str | None = None,
    seed: int | None = None,
    resume: Literal["batch", "epoch"] | None = None,
) -> DataLoader[Any]:
    """The loader, giving this worker its part of every step, on its device. Prepare it once, before the epochs.

    All options of the loader are kept. A step takes ``batch_size`` rows for each worker, or ``global_batch_size`` rows
    for all of them together, at any number of workers. Every row comes once per epoch. What is left for the last step
    makes a smaller one (``tail="partial"``), is left out (``"drop"``; both by the loader's ``drop_last``), or
    begins the next epoch (``"carry"``). A worker that has no row in a small step gets one that counts nothing. Models
    from ``prepare_model`` weigh each worker's gradient by its rows, so the step is the mean over all rows.

    Each iteration is a new epoch with a new order, which follows from ``seed`` (else from the loader's generator,
    ``enable_reproducibility``, or torch's seed where there is one worker) and the epoch, never from the number of
    workers. ``loader.sampler.set_epoch(n)`` is honoured and counting goes on from ``n``. ``loader.epoch`` and
    ``loader.epochs(n)`` tell the loop where it is.

    The position goes into every checkpoint under ``name`` ("loader", "loader-2", ... in the order of preparation).
    After a restart the first iteration goes on behind the last batch that was handed out before the checkpoint, with
    any number of workers; a finished or abandoned epoch is followed by the next. ``resume="epoch"`` begins the epoch
    again instead, for a loop that skips batches by itself; None is what ``DataConfig(resume=...)`` says. A look at the
    first batch (``next(iter(loader))``) does not count as an epoch, unless another one follows it.

    All this holds for map-style datasets with the usual samplers (``shuffle=True`` or not). Otherwise:

    - A custom sampler or batch sampler is drawn from alike on every worker, and each takes its share; some rows come
      twice where they do not divide evenly. After a restart the epoch begins again from its start. The same holds for
      a DistributedSampler of the user's, and with ``add_dist_sampler=False``, which gives every worker all rows.
    - An IterableDataset cannot be shared out: every worker reads all of it, and begins its epoch again after a restart.
    - With ``in_order=False`` batches come in any order, so an epoch begins again too.

    On a GPU, ``auto_transfer`` copies the next batch on a stream of its own while the current one is computed on.
    """
    from powertrain.worker.context import current

    session = current("prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader was given a {type(data_loader).__name__}; it takes a torch DataLoader. "
            "Wrap a dataset as torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    if isinstance(data_loader, PreparedDataLoader):
        return data_loader
    add_dist_sampler = as_flag(add_dist_sampler, "prepare_data_loader(add_dist_sampler=...)")
    move_to_device = as_flag(move_to_device, "prepare_data_loader(move_to_device=...)")
    auto_transfer = as_flag(auto_transfer, "prepare_data_loader(auto_transfer=...)")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"prepare_data_loader(name={shorten(name)}) is not a name. Give a string.")
    if resume not in (None, "batch", "epoch"):
        raise ConfigError(f"prepare_data_loader(resume={shorten(resume)}) must be 'batch', 'epoch' or None.")
    wishes = _checked_wishes(global_batch_size, tail, seed)
    # A copy has every option, also those of a subclass; only what differs per rank is replaced in it.
    loader = copy.copy(data_loader)
    loader.__dict__["_iterator"] = None
    sharing = _share_out(loader, add_dist_sampler, wishes, session)
    kept_as = _free_name(session, name, sharing.course.fingerprint)
    at_epoch = (resume or session.place.data_resume) == "epoch"
    sharing.course.keep_with(session.data, kept_as, at_epoch)
    if isinstance(loader.dataset, IterableDataset):
        loader.__dict__["collate_fn"] = CheckedCollate(loader.collate_fn)
    if loader.num_workers > 0:
        loader.worker_init_fn = _RankSeeded(session.place.rank, loader.worker_init_fn)
        _end_processes_at_exit()
    prepared = PreparedDataLoader(loader, sharing, _device() if move_to_device else None, auto_transfer)
    # A loop that prepares its loader anew in each epoch goes on with the next epoch, under the same name.
    weakref.finalize(prepared, _free, session, kept_as).atexit = False
    return prepared


def _device() -> torch.device:
    # Here, because that module offers prepare_data_loader too.
    from powertrain.torch.prepare import get_device

    return get_device()


@dataclass(frozen=True)
class _Wishes:
    """What was asked for beyond the loader's own options; ``None`` for nothing."""

    global_batch_size: int | None = None
    tail: Tail | None = None
    seed: int | None = None


def _checked_wishes(global_batch_size: Any, tail: Any, seed: Any) -> _Wishes:
    if tail is not None and (not isinstance(tail, str) or tail not in ("partial", "drop", "carry")):
        raise ConfigError(
            f"prepare_data_loader(tail={shorten(tail)}) is not valid: it decides about the rows "
            'that do not fill a step. Use "partial", "drop" or "carry".'
        )
    return _Wishes(
        _whole("global_batch_size", global_batch_size, whole(1)),
        cast("Tail | None", tail),
        _whole("seed", seed, whole(0, _LARGEST_SEED)),
    )


def _whole(option: str, value: Any, check: Callable[[Any], Any]) -> int | None:
    try:
        return None if value is None else int(check(value))
    except Refusal as refusal:
        raise ConfigError(
            f"prepare_data_loader({option}={shorten(value)}) cannot be used: {refusal.why}. {refusal.fix}"
        ) from None


#: Under which names each session's loaders go into its checkpoints.
#: The process that will end loaders' processes when it ends.
_ending_processes = 0
_names: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def _free(session: Session, name: str) -> None:
    """A prepared loader is gone, and its name with it."""
    _names.setdefault(session, set()).discard(name)
    session.data.let_go(name)


def _end_processes_at_exit() -> None:
    """Let this process end although loaders' processes block SIGTERM, by which multiprocessing would end them."""
    from multiprocessing import util

    global _ending_processes
    if _ending_processes != os.getpid():
        util.Finalize(None, _kill_who_blocks_sigterm, exitpriority=100)
        _ending_processes = os.getpid()


def _kill_who_blocks_sigterm() -> None:
    from multiprocessing import active_children

    for child in active_children():
        if child.daemon and child.pid is not None and _blocks_sigterm(child.pid):
            child.kill()


def _blocks_sigterm(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/status") as status:
            masks = [line.split()[1] for line in status if line.startswith("SigBlk:")]
    except OSError:
        return False
    return bool(masks) and bool(int(masks[0], 16) >> (signal.SIGTERM - 1) & 1)


def _free_name(session: Session, wanted: str | None, fingerprint: str) -> str:
    """``wanted``, or the next of "loader", "loader-2", ...: the same on every rank that prepares in the same order."""
    taken = _names.setdefault(session, set())
    if wanted is None:
        names = itertools.chain(["loader"], (f"loader-{number}" for number in itertools.count(2)))
        wanted = next(
            name for name in names if name not in taken and _can_follow(session.data.left(name), fingerprint)
        )
    elif not isinstance(wanted, str) or not wanted:
        raise ConfigError(
            f"prepare_data_loader(name={reprlib.repr(wanted)}) cannot be used: checkpoints need a name for the "
            "loader's position. Give some text, or leave it out."
        )
    elif wanted in taken:
        raise ConfigError(
            f"prepare_data_loader(name={wanted!r}) was called twice, and checkpoints could not tell the two loaders "
            "apart. Prepare a loader once, before the loop over epochs, and give each its own name."
        )
    taken.add(wanted)
    return wanted


def _can_follow(left: Mapping[str, Any] | None, fingerprint: str) -> bool:
    """Whether a loader over this data may go on where one stands that is gone."""
    return left is None or left["fingerprint"] == fingerprint


# --------------------------------------------------------------------------- where a loader stands


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
            return start if _OWN in (saved.shuffle, mine.shuffle) else saved
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


# --------------------------------------------------------------------------- steps and shares


@dataclass(frozen=True)
class StepCut:
    """How an epoch of ``rows`` is cut into steps of ``global_batch`` rows, and what of each is this rank's."""

    rows: int
    global_batch: int
    tail: Tail
    rank: int
    world_size: int

    def steps(self, position: int = 0) -> int:
        """How many steps there are from ``position`` on."""
        return steps_left(self.rows, position, self.global_batch, self.tail)

    def after(self, position: int) -> int:
        """Where the step that begins at ``position`` ends."""
        return min(position + self.global_batch, self.rows)

    def part(self, position: int) -> tuple[int, int]:
        """This rank's part of that step, as places within it."""
        return part_of(self.after(position) - position, self.rank, self.world_size)

    def weight(self, position: int) -> float:
        """What this rank's gradient counts for in that step; 0 where its only row is a filler."""
        total = self.after(position) - position
        low, high = self.part(position)
        return (high - low) * self.world_size / total if total > 0 else 1.0

    def carried(self, position: int) -> int:
        """Where the next epoch begins when this one has no step left at ``position``."""
        return after_epoch(self.rows, position, self.global_batch, self.tail)

    def indices(self, position: int, order: Callable[[int], EpochOrder]) -> list[int]:
        """This rank's rows of the step that begins at ``position``; one of the step's where it has none.

        ``order(n)`` is that of ``n`` epochs ago: a position below 0 stands for rows that were carried over.
        """
        low, high = self.part(position)
        # A rank without a row still has to take part in the step.
        mine = (low, high) if low < high else (0, 1)
        rows: list[int] = []
        at, end = position, self.after(position)
        while at < end:
            ago = -(at // self.rows)
            until = min(end, (1 - ago) * self.rows)
            then = order(ago)
            slots = then.step(at + ago * self.rows, until + ago * self.rows)
            # Only those of this rank are located: others' rows need permutations that it can do without.
            slots = slots[max(mine[0] - (at - position), 0) : max(mine[1] - (at - position), 0)]
            rows += then.locate(slots).offsets.tolist()
            at = until
        return rows


def epoch_order(start: Position, ago: int = 0) -> EpochOrder:
    """The order of the epoch that a lap began in, or of that ``ago`` epochs before, over the rows 0 to N - 1."""
    return EpochOrder(
        [start.rows], seed=start.seed, epoch=start.epoch - ago, shuffle=start.shuffle, lanes=start.lanes
    )


class OrderedShard(DistributedSampler[Any]):
    """This rank's rows of an epoch, step by step; every row of the dataset is some rank's, once."""

    def __init__(self, dataset: Any, cut: StepCut, course: Course, beginning: Position) -> None:
        # Not DistributedSampler's own __init__, which cuts an epoch another way.
        self.dataset, self.num_replicas, self.rank = dataset, cut.world_size, cut.rank
        self.shuffle, self.seed = beginning.shuffle != "none", beginning.seed
        self.drop_last = cut.tail == "drop"
        self.cut, self._course, self._start = cut, course, beginning

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The live epoch, or that which the next iteration gives."""
        return int(self._course.look()["epoch"])

    def set_epoch(self, epoch: int) -> None:
        """The next iteration of the loader is this epoch."""
        self._course.set_epoch(epoch)

    def begin(self, start: Position) -> None:
        """What is asked from here on belongs to the lap that begins at ``start``."""
        self._start, self.seed = start, start.seed

    def steps(self) -> Iterator[list[int]]:
        """The rows of this rank in each step of the lap that began last, from its start."""
        return _steps_from(self._start, self.cut)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.steps())

    def __len__(self) -> int:
        """How many rows this rank is given in a whole epoch, fillers counted."""
        steps = self.cut.steps()
        if not steps:
            return 0
        sizes = []
        for position in (0, (steps - 1) * self.cut.global_batch):
            low, high = self.cut.part(position)
            sizes.append(max(high - low, 1))
        return (steps - 1) * sizes[0] + sizes[1]


def _steps_from(start: Position, cut: StepCut) -> Iterator[list[int]]:
    # Two are kept, for steps that begin with rows of the epoch before.
    order = functools.lru_cache(2)(functools.partial(epoch_order, start))
    position = start.position
    for _ in range(cut.steps(position)):
        yield cut.indices(position, order)
        position = cut.after(position)


class StepBatches(BatchSampler):
    """The steps of an :class:`OrderedShard` as batches of indices."""

    def __init__(self, shard: OrderedShard) -> None:
        # Not BatchSampler's own __init__: steps of a rank may differ in size.
        self.sampler: OrderedShard = shard
        self.batch_size = -(-shard.cut.global_batch // shard.cut.world_size)
        self.drop_last = shard.drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return self.sampler.steps()

    def __len__(self) -> int:
        return self.sampler.cut.steps()


class DrawnShard(DistributedSampler[Any]):
    """A rank's share of what the user's own sampler (or batch sampler) gives.

    Each rank draws the whole order, under one seed so that all draw the same, and takes its part.
    """

    def __init__(self, drawn_from: Any, rank: int, world_size: int, course: Course, drop_last: bool) -> None:
        # Not DistributedSampler's own __init__, which wants the length of a dataset.
        self.dataset, self.num_replicas, self.rank = drawn_from, world_size, rank
        self.shuffle, self.drop_last = False, drop_last
        self._course = course
        self.epoch, self.seed = 0, 0

    def set_epoch(self, epoch: int) -> None:
        self._course.set_epoch(epoch)
        self._enter(epoch)

    def begin(self, start: Position) -> None:
        """What is drawn from here on belongs to the lap that begins at ``start``."""
        self.seed = start.seed
        self._enter(start.epoch)

    def _enter(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        sampler: Any = self.dataset
        if not hasattr(sampler, "__len__"):
            return endless_share(sampler, self.rank, self.num_replicas)
        with _drawing_alike(self.seed + self.epoch):
            drawn = list(sampler)
        return iter(share(drawn, self.rank, self.num_replicas, self.drop_last))

    def __len__(self) -> int:
        return len(share(range(len(cast(Any, self.dataset))), self.rank, self.num_replicas, self.drop_last))


def share(drawn: Sequence[Any], rank: int, world_size: int, drop_last: bool) -> Sequence[Any]:
    """Every ``world_size``-th element from ``rank`` on; all ranks get equally many.

    What does not divide evenly is left out with ``drop_last`` and otherwise filled up from the beginning.
    """
    if drop_last:
        return drawn[rank : len(drawn) - len(drawn) % world_size : world_size]
    part = list(drawn[rank::world_size])
    if drawn and len(part) < -(-len(drawn) // world_size):
        part.append(drawn[(len(drawn) - len(drawn) % world_size + rank) % len(drawn)])
    return part


def endless_share(drawn: Iterable[Any], rank: int, world_size: int) -> Iterator[Any]:
    """As :func:`share` for a sampler without a length, which must itself draw alike on every rank."""
    rounds = iter(drawn)
    while len(round_ := list(itertools.islice(rounds, world_size))) == world_size:
        yield round_[rank]


@contextlib.contextmanager
def _drawing_alike(seed: int) -> Iterator[None]:
    """Inside, random numbers follow from ``seed``; outside, nothing has happened."""
    seed %= 2**32
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        # Not torch.manual_seed, which would reseed the GPU too.
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        yield
    finally:
        torch.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


# --------------------------------------------------------------------------- which of them a loader gets


@dataclass
class Sharing:
    """How the rows of a loader are given to ranks."""

    course: Course
    #: The sampler that is ours; ``None`` where the loader's own stays.
    shard: OrderedShard | DrawnShard | None = None
    #: False where the user says what a rank's gradient counts for.
    weighs: bool = True
    #: Of the batch handed out last.
    weight: float = 1.0

    @property
    def cut(self) -> StepCut | None:
        """How steps are cut, where the k-th batch that is handed out is known to be the k-th step."""
        return self.shard.cut if isinstance(self.shard, OrderedShard) else None


@dataclass(frozen=True)
class _Usual:
    """A sampler over the whole of its data, in order or shuffled, and how it is batched."""

    sampler: Any
    #: ``None`` where rows are given one by one.
    batch_size: int | None
    drop_last: bool

    @property
    def is_shuffled(self) -> bool:
        return isinstance(self.sampler, RandomSampler)


def _usual(loader: DataLoader[Any]) -> _Usual | None:
    batches: Any = loader.batch_sampler
    if loader.batch_size is None and batches is not None:
        if type(batches) is not BatchSampler:
            return None
        found = _Usual(batches.sampler, batches.batch_size, batches.drop_last)
    else:
        found = _Usual(loader.sampler, loader.batch_size, loader.drop_last)
    sampler = found.sampler
    if type(sampler) is SequentialSampler:
        return found
    takes_all = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    return found if takes_all else None


def _share_out(loader: DataLoader[Any], add_sampler: bool, wishes: _Wishes, session: Session) -> Sharing:
    """Replace the samplers of ``loader`` by this rank's, where that can be done; rank 0 says where it cannot."""
    place = session.place
    streams = isinstance(loader.dataset, IterableDataset)
    distributed = _is_distributed(loader.sampler) or _is_distributed(loader.batch_sampler)
    usual = None if streams or distributed or not add_sampler else _usual(loader)
    if usual is not None:
        return _share_in_order(loader, usual, wishes, session)
    _refuse_wishes(loader, wishes, add_sampler)
    if place.rank == 0:
        _tell_what_cannot_be_had(loader, add_sampler, place.world_size)
    seed = _order_seed(None, loader, wishes, place.world_size)
    beginning = _beginning(loader.dataset, -1 if streams else _length(loader.dataset), seed, _OWN)
    course = Course(beginning, wishes.seed, _restarts(session))
    if streams or distributed or not add_sampler or place.world_size == 1:
        return Sharing(course, weighs=add_sampler)
    return Sharing(course, _share_drawn(loader, course, place.rank, place.world_size))


def _share_in_order(loader: DataLoader[Any], usual: _Usual, wishes: _Wishes, session: Session) -> Sharing:
    rank, world_size = session.place.rank, session.place.world_size
    if wishes.global_batch_size is not None and usual.batch_size is None:
        raise ConfigError(
            f"prepare_data_loader(global_batch_size={wishes.global_batch_size}) was given a loader with "
            "batch_size=None, which makes no batches. Give the loader a batch_size, or leave global_batch_size out."
        )
    rows = len(usual.sampler.data_source)
    global_batch = wishes.global_batch_size or (usual.batch_size or 1) * world_size
    cut = StepCut(
        rows, global_batch, wishes.tail or ("drop" if usual.drop_last else "partial"), rank, world_size
    )
    seed = _order_seed(getattr(usual.sampler, "generator", None), loader, wishes, world_size)
    shuffle = "none" if not usual.is_shuffled else "rows" if rows <= _ROWS_IN_ONE_PERMUTATION else "blocks"
    beginning = _beginning(loader.dataset, rows, seed, shuffle)
    course = Course(beginning, wishes.seed, _restarts(session))
    shard = OrderedShard(usual.sampler.data_source, cut, course, beginning)
    # Past DataLoader's guard against changes, which is there for loaders already in use.
    if usual.batch_size is None:
        loader.__dict__.update(sampler=shard)
    else:
        batches = StepBatches(shard)
        own_size = loader.batch_size if loader.batch_size is None else batches.batch_size
        loader.__dict__.update(sampler=shard, batch_sampler=batches, batch_size=own_size)
    if _comes_in_any_order(loader) and rank == 0:
        _tell_of_any_order()
    return Sharing(course, shard)


def _share_drawn(loader: DataLoader[Any], course: Course, rank: int, world_size: int) -> DrawnShard:
    """Replace the user's own sampler by this rank's share of it."""
    batches: Any = loader.batch_sampler
    if loader.batch_size is None and batches is not None and type(batches) is not BatchSampler:
        shard = DrawnShard(batches, rank, world_size, course, drop_last=False)
        loader.__dict__.update(sampler=shard, batch_sampler=shard)
        return shard
    drop_last = loader.drop_last if batches is None else batches.drop_last
    shard = DrawnShard(
        loader.sampler if batches is None else batches.sampler, rank, world_size, course, drop_last
    )
    if batches is not None:
        batches = BatchSampler(shard, batches.batch_size, drop_last)
    loader.__dict__.update(sampler=shard, batch_sampler=batches)
    return shard


def _beginning(dataset: Any, rows: int, seed: int, shuffle: str) -> Position:
    """The start of epoch 0. ``rows`` is -1 where nobody knows."""
    return Position(
        epoch=0,
        position=0,
        seed=seed,
        lanes=LANES if shuffle == "blocks" else 1,
        shuffle=shuffle,
        fingerprint=f"{type(dataset).__name__[:_LONGEST_TYPE_NAME]}:{rows}",
        rows=rows,
    )


def _is_distributed(sampler: Any) -> bool:
    """True when the user's sampler already gives each rank its own part."""
    return any(
        isinstance(part, DistributedSampler) or hasattr(part, "num_replicas")
        for part in (sampler, getattr(sampler, "sampler", None))
    )


def _comes_in_any_order(loader: DataLoader[Any]) -> bool:
    return loader.num_workers > 0 and not getattr(loader, "in_order", True)


def _restarts(session: Session) -> bool:
    return bool(session.place.on_data_change == "restart_epoch")


def _length(dataset: Any) -> int:
    """How many rows there are; -1 where nobody knows."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # has none, or says that it has none
        return -1


def _order_seed(
    generator: torch.Generator | None, loader: DataLoader[Any], wishes: _Wishes, world_size: int
) -> int:
    """The seed of the row order, the same on every rank: that which was asked for, or the user's generator's, or that
    of ``enable_reproducibility``, or 0; alone, what the user's ``torch.manual_seed`` said."""
    from powertrain.torch import prepare

    generator = generator or loader.generator
    if wishes.seed is not None:
        seed = wishes.seed
    elif generator is not None:
        seed = generator.initial_seed()
    elif (reproducible := prepare.settings().seed) is not None:
        seed = reproducible
    else:
        seed = torch.initial_seed() if world_size == 1 else 0
    return int(seed) & _LARGEST_SEED


def _refuse_wishes(loader: DataLoader[Any], wishes: _Wishes, add_sampler: bool) -> None:
    """Raise where something was asked for that only an order of ours can give."""
    wished = [option for option in ("global_batch_size", "tail") if getattr(wishes, option) is not None]
    if not wished:
        return
    if not add_sampler:
        why = "add_dist_sampler=False leaves the loader's rows alone"
    elif isinstance(loader.dataset, IterableDataset):
        why = f"{type(loader.dataset).__name__} is an IterableDataset, which gives rows as it likes"
    else:
        why = "this loader has a sampler of its own, which decides what is in a batch"
    raise ConfigError(
        f"prepare_data_loader({wished[0]}={getattr(wishes, wished[0])!r}) cannot be used: {why}. Use it with a "
        "map-style dataset and shuffle=True or shuffle=False, or leave it out."
    )


def _tell_what_cannot_be_had(loader: DataLoader[Any], add_sampler: bool, world_size: int) -> None:
    """Warn of data that cannot be shared out, or whose position cannot be kept."""
    sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    sampler = sampler.sampler if type(sampler) is BatchSampler else sampler
    is_shared = add_sampler and world_size > 1
    if isinstance(loader.dataset, IterableDataset):
        message = (
            f"{type(loader.dataset).__name__} is an IterableDataset, in which no position can be kept: after a "
            "restart its epoch begins again from its start. Use a map-style dataset or powertrain.data to go on "
            "exactly."
        )
        if is_shared:
            message += (
                " No sampler can shard it either: every worker will read all of it. Let its __iter__ give each "
                "worker its own part (see powertrain.get_context()), and pass add_dist_sampler=False to say so."
            )
    elif not hasattr(sampler, "__len__"):
        message = (
            f"{type(sampler).__name__} has no length, so nobody knows how many batches an epoch has, and no position "
            "in it can be kept: after a restart the epoch begins again from its start."
        )
        if is_shared:
            message += f" It must draw the same on all {world_size} workers, of which each takes its turns."
    else:
        return
    warnings.warn(message, stacklevel=4)


def _tell_of_any_order() -> None:
    warnings.warn(
        "This loader has in_order=False, so nobody knows which batch of the epoch comes next: after a restart the "
        "epoch begins again from its start, and a smaller last step counts as much as a whole one. Leave in_order "
        "at True to go on exactly.",
        stacklevel=5,
    )


class _RankSeeded:
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


# --------------------------------------------------------------------------- the loader


class PreparedDataLoader(DataLoader[Any]):
    """A DataLoader that advances the epoch, keeps its position, weighs batches and brings them to the device.

    Everything else, reading and setting attributes included, is the inner loader's.
    """

    #: Hugging Face Accelerate leaves loaders with this mark as they are: see :mod:`powertrain.torch.data_loader.accelerated`.
    _is_accelerate_prepared = True

    def __init__(
        self, inner: DataLoader[Any], sharing: Sharing, device: torch.device | None, auto_transfer: bool
    ) -> None:
        # Not DataLoader's own __init__: all options are in the inner loader.
        self.__dict__.update(_inner=inner, _sharing=sharing, _device=device, _auto_transfer=auto_transfer)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # asked by copy and pickle before anything is there
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __len__(self) -> int:
        """How many batches a whole epoch has."""
        return len(self._inner)

    def batches_left(self) -> int | None:
        """Return how many batches the epoch under way, or the next one, still has; None where that is not known."""
        cut = self._sharing.cut
        return cut.steps(self.state_dict()["position"]) if cut is not None else None

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated over, or that which the next ``iter()`` gives."""
        return int(self._sharing.course.look()["epoch"])

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are left of ``count``, from the one that a restart goes on with.

        ::

            for epoch in loader.epochs(10):
                for batch in loader:
        """
        for epoch in range(self.epoch, count):
            self._sharing.course.set_epoch(epoch)
            yield epoch

    @property
    def weight(self) -> float:
        """What the batch handed out last counts for in the gradient: see ``DataShard.weight``."""
        return float(self._sharing.weight)

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, in less than 400 bytes; the same on every rank.

        It says what the next ``iter()`` gives after a restart: the rest of an epoch that is being iterated over, from
        behind the last batch that was handed out; otherwise the next epoch.
        """
        state: dict[str, Any] = self._sharing.course.look()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``iter()`` go on from ``state``, with any number of workers.

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
        return _HandedOut(batches, lap, sharing, keeps_order=not _comes_in_any_order(self._inner))

    def _on_gpu(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._auto_transfer:
            return _copied_ahead(batches, self._device)
        return (move_batch(batch, self._device) for batch in batches)


class _HandedOut:
    """The batches of one lap. Each is noted as it is given; when this is dropped, the lap is over."""

    def __init__(self, batches: Iterator[Any], lap: Lap, sharing: Sharing, keeps_order: bool) -> None:
        self._batches: Iterator[Any] = batches
        self._lap, self._sharing = lap, sharing
        self._cut = sharing.cut if keeps_order else None
        self._resumed = self._resumed_epoch()
        self._followed = follow_iteration()

    def _resumed_epoch(self) -> ResumedEpoch | None:
        """Where the lap goes on after a restart; None for one that begins with its epoch."""
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
            self._pass_step()  # torch has used its rows up: who goes on gets those after them
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
        """The next one, for which the rank's first step waits."""
        with progress.startup.waiting():
            return next(self._batches)

    def _pass_step(self) -> None:
        at = self._lap.at
        if self._cut is not None:
            self._lap.at = Position.at(at, at.epoch, self._cut.after(at.position))

    def close(self) -> None:
        """Give the rest of the epoch up. Before the second batch was requested, the epoch does not count as begun."""
        self._give_up(is_meant=True)

    def _give_up(self, is_meant: bool = False) -> None:
        cut, lap = self._cut, self._lap
        if cut is not None and not is_look(lap.requested) and not cut.steps(lap.at.position):
            self._end()  # nothing was left of it
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


# -- to the device


def _copied_ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Each batch on ``device``, the following one already being copied on a stream of its own."""
    make: Any = torch.cuda.Stream
    stream = make(device)
    moved: list[torch.Tensor] = []
    ahead = _copy_next(batches, device, stream, moved)
    while ahead is not _END:
        # For as long as the GPU itself waits for the copy, which is never this thread's time.
        with recording.phase(H2D):
            computing = torch.cuda.current_stream(device)
            computing.wait_stream(stream)
            for tensor in moved:
                # The memory belongs to the copying stream; it must not be given away while computing uses it.
                tensor.record_stream(computing)
        batch, moved = ahead, []
        ahead = _copy_next(batches, device, stream, moved)
        yield batch


def _copy_next(
    batches: Iterator[Any], device: torch.device, stream: torch.cuda.Stream, moved: list[torch.Tensor]
) -> Any:
    """The next batch, on its way to ``device``; ``_END`` after the last."""
    batch = next(batches, _END)
    if batch is _END:
        return batch
    # Around all of it and on the computing stream: the copies of single tensors are on one that nobody times.
    with recording.phase(H2D):
        return move_batch(batch, device, stream, moved)


_END = object()


def move_batch(
    batch: Any,
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    moved: list[torch.Tensor] | None = None,
) -> Any:
    """``batch`` with every tensor in it on ``device``.

    Where ``stream`` is given, tensors are copied on it and noted in ``moved``.
    Objects that move themselves (with ``.to``) do so on the current stream: their memory cannot be
    recorded for another.
    """

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if stream is None or moved is None:
            return tensor.to(device)
        with torch.cuda.stream(stream):
            there = tensor.to(device, non_blocking=True)
        moved.append(there)
        return there

    return map_tensors(batch, move, lambda item: item.to(device))
