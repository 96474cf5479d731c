"""The start of a Trainer's ``train(resume_from_checkpoint=...)`` in a worker."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.config.checkpoint import CheckpointConsistencyMode
from powertrain.huggingface.library import load
from powertrain.huggingface.transformers import saved
from powertrain.worker.context import barrier, get_all_reported_checkpoints, get_checkpoint, get_context
from powertrain.worker.session import current


@contextlib.contextmanager
def resumed(trainer: Any, wanted: Any) -> Iterator[str | None]:
    """Give the directory that a Trainer is to resume from, for as long as it trains; None to begin anew.

    ``wanted`` is the Trainer's own argument:

    - None: the run's checkpoint after a restart, unless the loop has asked for it itself (``get_checkpoint``).
    - True: the same, else the newest in the output directory, else the training begins anew. Transformers raises
      where there is none, but the first start of a run has none.
    - A path: the run's checkpoint where the loop has not asked for it, because it is further on than a path that the
      script names at every start; else the path. It may be that of a checkpoint of the run.
    - False: begin anew.
    """
    trainer.has_resumed = False
    if wanted is False:
        yield None
        return
    with contextlib.ExitStack() as stack:
        found = None
        if wanted is True or not current("Trainer.train").data.has_requested_checkpoint:
            found = _of_run(stack)
        if found is None:
            found = _named(stack, trainer, wanted)
        if found is not None:
            trainer.has_resumed = True
            _announce(found)
            _keep_best(trainer, found)
        yield found


def _of_run(stack: contextlib.ExitStack) -> str | None:
    """Return the Trainer's directory in the checkpoint that this attempt starts from."""
    session = current("Trainer.train")
    place = session.place
    if not place.start.checkpoint:
        return None
    # Not with get_checkpoint: as long as nothing is resumed, the data have no reason to move on.
    checkpoint = session.checkpoint_at(place.start.checkpoint, place.start.filesystem)
    directory = stack.enter_context(saved.opened(checkpoint))
    if directory is not None:
        get_checkpoint()  # data continue where this checkpoint found them
    return directory


def _named(stack: contextlib.ExitStack, trainer: Any, wanted: Any) -> str | None:
    if wanted is None:
        return None
    if wanted is True:
        found = saved.newest_whole(trainer.args.output_dir)
        if found is None and get_context().get_world_rank() == 0:
            print("transformers: there is no checkpoint yet, so training begins at step 0", flush=True)
        return found
    if isinstance(wanted, Checkpoint):
        return stack.enter_context(saved.opened(wanted))
    path = os.fspath(wanted)
    return saved.inside(path) or path  # Transformers raises for one that is not there


def _announce(directory: str) -> None:
    if get_context().get_world_rank() == 0:
        step = saved.read_state(directory).get("global_step", "?")
        print(f"transformers: resuming at step {step} from {directory}", flush=True)


def _keep_best(trainer: Any, directory: str) -> None:
    """Bring the best checkpoint so far back into the output directory, where ``load_best_model_at_end`` needs it."""
    state = saved.read_state(directory)
    step = state.get("best_global_step")
    if not trainer.args.load_best_model_at_end or not step:
        return
    target = os.path.join(trainer.args.output_dir, f"checkpoint-{step}")
    if get_context().get_local_rank() == 0 and not saved.is_whole(target):
        _restore_step(int(step), target, directory)
    barrier()
    if saved.is_whole(target):
        trainer.add_callback(_best_at(target))


def _restore_step(step: int, target: str, newest: str) -> None:
    """Copy what was saved at ``step`` to ``target`` from the run's checkpoints, if one of these is of that step."""
    with contextlib.ExitStack() as stack:
        sources: list[str | None] = [newest]
        sources += [
            stack.enter_context(saved.opened(reported.checkpoint))
            for reported in get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
            if reported.metrics.get("step") == step
        ]
        for source in sources:
            if source is not None and saved.read_state(source).get("global_step") == step:
                os.makedirs(os.path.dirname(target), exist_ok=True)
                saved.copy_directory(source, target)
                return


def _best_at(directory: str) -> Any:
    """Return a callback that tells a resumed Trainer where its best checkpoint is.

    The Trainer itself knows the path before the restart.
    """

    def on_train_begin(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.best_model_checkpoint = state.best_model_checkpoint or directory

    base = load("transformers").TrainerCallback
    return type("BestCheckpoint", (base,), {"__module__": __name__, "on_train_begin": on_train_begin})()
