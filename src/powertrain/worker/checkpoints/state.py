"""save_state, load_state and register_state: the whole state of a training loop in one call, on all ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from powertrain.errors import CheckpointError
from powertrain.trace.recording import current
from powertrain.trace.recording.phases import REPORT
from powertrain.values.arguments import has_attribute, shorten
from powertrain.wire.from_worker import Noted
from powertrain.worker import session as worker_session
from powertrain.worker.progress import progress

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from powertrain.checkpoint.checkpoint import Checkpoint
    from powertrain.checkpoint.state.saver import StateSaver
    from powertrain.worker.session import Session


class _RankState:
    """The saver of one session; a new session in the same process begins with a new one."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._saver: StateSaver | None = None
        #: Modules and optimizers that the first save will probably save.
        self._expected: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Optimizers whose state counts already.
        self._sized: weakref.WeakSet[Any] = weakref.WeakSet()
        #: Calls of :func:`on_optimizer_step` that are still of interest.
        self.steps_awaited = 0

    @property
    def saver(self) -> StateSaver:
        if self._saver is None:
            from powertrain.checkpoint.state.saver import StateSaver

            staging = self.session.staging
            self._saver = StateSaver(
                self.session.place.rank,
                self.session.place.world_size,
                segments=staging.segments,
                staging=self.session.place.saving.staging,
                threads=_copying_threads(self.session.place.local_world_size),
                warn=partial(_warn, self.session),
            )
            # When the next session of this process begins, or the process ends.
            weakref.finalize(self, self._saver.close)
        return self._saver

    def expect(self, objects: Iterable[Any]) -> None:
        """Begin to make memory ready for the first save of these objects, where their model is on a GPU."""
        from powertrain.checkpoint.state.capture import kind_of

        self._expected.update(one for one in objects if kind_of(one) in ("module", "optimizer"))
        if any(_is_on_gpu(one) for one in self._expected):
            self.saver.expect(list(self._expected))
            self.steps_awaited = _STEPS_AWAITED

    def on_optimizer_step(self, optimizer: Any) -> None:
        """Note an optimizer that has made a step: only now has it a state."""
        self.steps_awaited -= 1
        if optimizer.state and optimizer not in self._sized:
            self._sized.add(optimizer)
            self._expected.add(optimizer)
            self.saver.expect(list(self._expected))


#: The optimizers of a loop have all made a step within this many.
_STEPS_AWAITED = 20


def _is_on_gpu(one: Any) -> bool:
    first = next(iter(one.parameters()), None) if hasattr(one, "parameters") else None
    return first is not None and first.device.type == "cuda"


#: More threads than this do not copy faster on common machines.
_MOST_THREADS = 4


def _copying_threads(local_world_size: int) -> int:
    """Return how many threads may copy at once, so that the ranks of a node leave each other a core."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(_MOST_THREADS, usable // local_world_size))


def _warn(session: Session, message: str) -> None:
    """Warn the user: rank 0 at the terminal, the others in their own logs."""
    if session.place.rank == 0:
        session.service.post(Noted(message=message))
    else:
        warnings.warn(message, stacklevel=2)


_rank_state: _RankState | None = None


def _state_of(session: Session) -> _RankState:
    global _rank_state
    if _rank_state is None or _rank_state.session is not session:
        _rank_state = _RankState(session)
    return _rank_state


def _expect_save(session: Session, objects: Mapping[str, Any]) -> None:
    """Begin to make memory ready for the first save of these objects, unless none of them will be saved."""
    if session.registered or session.is_saving_state:
        _state_of(session).expect(objects.values())


def expect_model(model: Any) -> None:
    """Begin to make memory ready for the first ``save_state`` of a prepared model, where the function calls that."""
    if not worker_session.in_worker():
        return
    session = worker_session.current("prepare_model")
    if session.is_saving_state:
        _state_of(session).expect([model])


def on_optimizer_step(optimizer: Any) -> None:
    """Note a step of any optimizer in this process: after its first one, the size of its state is known."""
    if _rank_state is not None and _rank_state.steps_awaited and worker_session.in_worker():
        _rank_state.on_optimizer_step(optimizer)


def register_state(**objects: Any) -> None:
    """Name the objects whose state makes up this run's: model, optimizer, scheduler and the like.

    From then on ``save_state()`` and ``load_state()`` without objects mean these, and a run with
    ``CheckpointConfig(checkpoint_frequency=N)`` saves by itself with every N-th report. A later call adds to them,
    or replaces those of the same name.

    Args:
        **objects: The objects, by the names that they have in checkpoints.

    Raises:
        CheckpointError: An object is a plain value, which would always be saved as it is now.
        OutsideWorkerError: It was called outside a training function.

    Example::

        powertrain.register_state(model=model, optimizer=optimizer)
        powertrain.load_state()
    """
    from powertrain.checkpoint.state.capture import kind_of

    session = worker_session.current("register_state")
    for name, value in objects.items():
        if kind_of(value) == "value" and not isinstance(value, (dict, list)):
            raise CheckpointError(
                f"register_state({name}=...) was given a {type(value).__name__}, which would always be saved as it "
                "is now. Register objects that have a state_dict(), or a dict or list that your loop changes."
            )
    session.registered.update(objects)
    _state_of(session).expect(objects.values())


def save_state(**objects: Any) -> Checkpoint:
    """Save the state of these objects, and return it as a checkpoint to ``report``. All ranks call this.

    When it returns, the objects may be changed. The states of Python's, numpy's, torch's and CUDA's random generators
    are always included.

    Tensor parallel modules (DTensors on any mesh) and stages of a pipeline are saved from the ranks that hold them;
    stages keep the names that their layers have in the whole model. ``save_state(model=model.state_dict())`` keeps each
    rank's own parameters.

    Args:
        **objects: Modules (also in DistributedDataParallel or FSDP2), optimizers, schedulers, gradient scalers,
            anything with ``state_dict()`` and ``load_state_dict()``, random generators of torch, and plain values:
            numbers, text, tensors, lists and dicts of them. Without any, those of :func:`register_state`.

    Returns:
        The checkpoint.

    Raises:
        CheckpointError: No objects are given or registered; or, on all ranks: ranks have different parameters under one
            name.
        OutsideWorkerError: It was called outside a training function.

    Example::

        report({"loss": loss}, checkpoint=save_state(model=model, optimizer=optimizer, epoch=epoch))
    """
    session = worker_session.current("save_state")
    chosen = objects or _registered(session, "save_state")
    return _save(session, chosen)


def load_state(checkpoint: Checkpoint | None = None, **objects: Any) -> dict[str, Any] | None:
    """Load the state of these objects in place, from ``get_checkpoint()`` or the given checkpoint. All ranks call it.

    Objects that were saved and are not given stay out of it. Any world size will do: tensors are laid out anew; random
    generators are restored where the world size is that of the save. In pipeline parallel training each rank loads its
    stage, also where the stages are cut elsewhere now.

    A given checkpoint can also be loaded outside a worker, to look at a model afterwards; random generators are left
    alone then.

    Args:
        checkpoint: The checkpoint; by default that of ``get_checkpoint()``.
        **objects: The objects, by the names that they were saved under. Without any, those of :func:`register_state`.

    Returns:
        The plain values that were given to :func:`save_state`; None where there is no checkpoint to resume from.

    Raises:
        CheckpointError: The state does not fit; nothing has been changed then.

    Example::

        restored = powertrain.load_state(model=model, optimizer=optimizer)
        first_epoch = restored["epoch"] + 1 if restored else 0
    """
    if checkpoint is not None and not has_attribute(checkpoint, "as_directory"):
        raise CheckpointError(
            f"load_state(checkpoint=...) was given {shorten(checkpoint)}. Give a Checkpoint, such as "
            "Checkpoint.from_directory(path), or leave it out."
        )
    if checkpoint is not None and not worker_session.in_worker():
        return _load_outside(checkpoint, _loadable(objects))
    session = worker_session.current("load_state")
    chosen = _loadable(objects) if objects else _stateful(session.registered)
    if checkpoint is None:
        checkpoint = worker_session.checkpoint_to_resume_from(session)
    if checkpoint is None:
        _expect_save(session, chosen)
        return None
    from powertrain.checkpoint.state.saver import StateLoader

    with _phase("checkpoint"), checkpoint.as_directory() as directory:
        loader = StateLoader(directory, session.place.rank, session.place.world_size)
        extras = loader.load(chosen)
    _expect_save(session, chosen)
    if not loader.same_world and session.place.rank == 0:
        _warn(
            session,
            f"The state was saved by {loader.world_size} ranks and is loaded by {session.place.world_size}: tensors "
            "are laid out anew, but the random generators are not restored, and values of a rank's own are rank 0's.",
        )
    return extras


def _load_outside(checkpoint: Checkpoint, objects: dict[str, Any]) -> dict[str, Any]:
    from powertrain.checkpoint.state.saver import StateLoader

    with checkpoint.as_directory() as directory:
        return StateLoader(directory, rank=0, world_size=1).load(objects, generators=False)


def _stateful(objects: dict[str, Any]) -> dict[str, Any]:
    """Return the objects that can be loaded in place."""
    from powertrain.checkpoint.state.capture import kind_of

    return {name: value for name, value in objects.items() if kind_of(value) != "value"}


def automatic_checkpoint(session: Session, row: int, save_now: bool = False) -> Checkpoint | None:
    """Return the checkpoint that the run saves by itself with this row, ``None`` where none is due."""
    frequency = session.place.saving.frequency
    due = save_now or (frequency > 0 and row % frequency == 0)
    return _save(session, session.registered) if due and session.registered else None


def _save(session: Session, objects: Mapping[str, Any]) -> Checkpoint:
    from powertrain.checkpoint.checkpoint import Checkpoint

    with _phase("checkpoint"), current.phase(REPORT):
        directory = os.fspath(session.staging.new_directory())
        try:
            _state_of(session).saver.save(objects, directory)
        except BaseException:
            shutil.rmtree(directory, ignore_errors=True)
            raise
    checkpoint = Checkpoint(directory)
    session.data.capture(checkpoint)  # it may be reported after more batches
    # One that is never reported goes with its last reference, and its segment becomes free.
    weakref.finalize(checkpoint, _remove_unreported, directory, os.getpid())
    return checkpoint


def _remove_unreported(directory: str, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has a copy of the object, not the directory
        shutil.rmtree(directory, ignore_errors=True)  # a reported one is no longer there


def _registered(session: Session, caller: str) -> dict[str, Any]:
    registered = session.registered
    if not registered:
        raise CheckpointError(
            f"{caller}() was called without objects, and none are registered. Write {caller}(model=model, "
            "optimizer=optimizer), or call register_state(model=model, optimizer=optimizer) first."
        )
    return registered


def _loadable(objects: dict[str, Any]) -> dict[str, Any]:
    from powertrain.checkpoint.state.capture import kind_of

    for name, value in objects.items():
        if kind_of(value) == "value":
            raise CheckpointError(
                f"load_state({name}=...) was given a {type(value).__name__}, which cannot be changed in place. Leave "
                f"it out: load_state returns the plain values, so write load_state(...)[{name!r}]."
            )
    return objects


@contextlib.contextmanager
def _phase(name: str) -> Any:
    before, progress.phase = progress.phase, name
    try:
        yield
    finally:
        progress.phase = before
