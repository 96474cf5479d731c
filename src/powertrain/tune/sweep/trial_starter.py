"""Starting of trials: creates the trainer of a configuration, and the run that the sweep observes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from powertrain.config.checkpoint import CheckpointConfig
from powertrain.config.checks import replace
from powertrain.config.run import SWEEP_HOOKS, RunConfig
from powertrain.driver.resume import split_run_path
from powertrain.trainer import DataParallelTrainer
from powertrain.tune.callback import Callback, CallbackList
from powertrain.tune.schedulers.base import FIFOScheduler
from powertrain.tune.sweep.trial_run import TrialRun, make_trainer, split_sections
from powertrain.tune.trainable import is_trainable_class
from powertrain.tune.trainable.kept import scaling_of
from powertrain.tune.trial import Trial

if TYPE_CHECKING:
    from powertrain.engine.local.warm_server import WarmServer
    from powertrain.storage import Storage
    from powertrain.tune.sweep.journal.state import Exploit
    from powertrain.tune.sweep.judge import Judge
    from powertrain.tune.sweep.screen import SweepScreen


@dataclass(frozen=True)
class TrialStarter:
    """Starter of the trials of one sweep.

    Attributes:
        trainable: The trainer, function or class that was given to the Tuner.
        base: The template of the trials' trainers.
        run: The configuration of the sweep.
        storage: The storage of the sweep.
        screen: Shows the trials.
        server: The process that workers are forked from.
        judge: Decides about reports.
        callbacks: The user's hooks into the sweep.
    """

    trainable: Any
    base: DataParallelTrainer
    run: RunConfig
    storage: Storage
    screen: SweepScreen
    server: WarmServer | None
    judge: Judge
    callbacks: CallbackList

    def start(self, trial: Trial, exploit: Exploit | None, on_report: Callable[..., str]) -> TrialRun:
        """Return the run of a trial; with ``exploit`` it continues from another trial's checkpoint."""
        from powertrain.tune.sweep.grafts import Graft
        from powertrain.tune.sweep.screen import TrialObserver

        storage = self.storage
        trial.path = storage.child(trial.name).uri if self.run.storage_filesystem is None else ""
        trainer = make_trainer(self.base, sections_of(self.trainable, trial.config), self._run_config(trial))
        graft = None
        if exploit is not None and exploit.source:
            source = storage.child(self.judge.state.trials[exploit.source].name)
            graft = Graft(source, trial.iteration, exploit.source_iteration)
        observer = TrialObserver(self.screen, trial.name, functools.partial(self._on_commit, trial))
        sweep = _base_name(storage)
        return TrialRun(trainer, observer, on_report, self.server, graft, sweep, trial.trial_id)

    @functools.cached_property
    def _address(self) -> str:
        """Return the path of the sweep, as trials open it."""
        if self.run.storage_filesystem is None:
            return self.storage.uri
        return child_path(self.run.storage_root, _base_name(self.storage))

    @functools.cached_property
    def _shared_run_config(self) -> RunConfig:
        return replace(
            self.run,
            storage_path=self._address,
            checkpoint_config=checkpoint_config_of(self.trainable, self.run),
            stop=None,
            callbacks=[callback for callback in self.run.callbacks if not is_of_sweep(callback)],
            progress_reporter=None,
            verbose=0,
            name=None,
        )

    def _run_config(self, trial: Trial) -> RunConfig:
        changes: dict[str, Any] = {"name": trial.name}
        decides = not isinstance(self.judge.scheduler, FIFOScheduler) or self.run.stop is not None
        if decides and self._shared_run_config.report_barrier is None:
            changes["report_barrier"] = True  # a report returns after the decision about it
        return replace(self._shared_run_config, **changes)

    def _on_commit(self, trial: Trial, name: str) -> None:
        if self.callbacks:
            from powertrain.checkpoint.checkpoint import Checkpoint

            path = child_path(self._address, f"{trial.name}/checkpoints/{name}")
            checkpoint = Checkpoint(path, self.run.storage_filesystem)
            info = {"trials": list(self.judge.state.trials.values()), "trial": trial}
            self.callbacks.call("on_trial_save", **info)
            self.callbacks.call("on_checkpoint", checkpoint=checkpoint, **info)


def sections_of(trainable: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the trainer arguments for a trial's configuration."""
    if isinstance(trainable, DataParallelTrainer):
        return split_sections(config)
    # The keys of a function's configuration are user-defined, even "datasets".
    return {"train_loop_config": dict(config), "scaling_config": scaling_of(trainable, config)}


def checkpoint_config_of(trainable: Any, run: RunConfig) -> CheckpointConfig:
    """Return the checkpoint configuration of the trials: the function that runs a class saves its checkpoints."""
    if not is_trainable_class(trainable):
        return run.checkpoint_config
    return replace(run.checkpoint_config, checkpoint_frequency=None, checkpoint_at_end=None)


def is_of_sweep(callback: Any) -> bool:
    """Return whether a callback has hooks of the sweep, rather than of its trials' runs."""
    return isinstance(callback, Callback) or any(
        callable(getattr(callback, hook, None)) for hook in SWEEP_HOOKS
    )


def child_path(root: str, name: str) -> str:
    """Return the path of ``name`` below ``root``, which may be an address with a query."""
    address, mark, query = root.partition("?") if "://" in root else (root, "", "")
    return f"{address.rstrip('/')}/{name}{mark}{query}"


def _base_name(storage: Storage) -> str:
    return split_run_path(storage.uri)[1]
