"""Tuner: runs a trainer or a function with many configurations, and finds the best."""

from __future__ import annotations

import copy
import functools
import os
import platform
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from powertrain.config.checks import as_config, replace, without_effect
from powertrain.config.run import RunConfig
from powertrain.driver.directories import with_real_files
from powertrain.driver.resume import split_run_path
from powertrain.driver.spec import new_name
from powertrain.errors import ConfigError, PreemptedError
from powertrain.storage.addresses import without_secrets
from powertrain.trainer import DataParallelTrainer
from powertrain.tune.callback import CallbackList
from powertrain.tune.config import ResumeConfig, ResumeType, TuneConfig
from powertrain.tune.naming import TrialNames
from powertrain.tune.registry import find_trainable
from powertrain.tune.schedulers import create_scheduler
from powertrain.tune.schedulers.base import FIFOScheduler, TrialScheduler
from powertrain.tune.search.base import Searcher
from powertrain.tune.search.choosing import choose_searcher
from powertrain.tune.space import check_space
from powertrain.tune.stopper import add_spent, as_stopper, copy_stopper
from powertrain.tune.sweep import continuing
from powertrain.tune.sweep.interrupts import interrupts_of
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal import record as sweep_record
from powertrain.tune.sweep.journal.description import as_list, describe_sweep, first_of, objective_of
from powertrain.tune.sweep.opening import open_sweep
from powertrain.tune.sweep.trial_run import split_sections
from powertrain.tune.sweep.trial_starter import TrialStarter, checkpoint_config_of, child_path, is_of_sweep
from powertrain.tune.trainable import as_function, is_trainable_class
from powertrain.tune.trainable.kept import KeptTrainable, check_takes_config, name_of, scaling_of
from powertrain.tune.trial import Trial
from powertrain.values.arguments import as_path, shorten

if TYPE_CHECKING:
    from powertrain.engine.local.warm_server import WarmServer
    from powertrain.storage import Storage
    from powertrain.tune.result_grid import ResultGrid
    from powertrain.tune.sweep.judge import Judge
    from powertrain.tune.sweep.loop import SweepLoop
    from powertrain.tune.sweep.screen import SweepScreen


class Tuner:
    """Runs a trainer or a function with many configurations.

    Args:
        trainable: A trainer, a function of the configuration that calls ``tune.report``, a
            :class:`~powertrain.tune.Trainable` class, or the name of one (see ``tune.register_trainable``).
        param_space: By name a constant, a distribution such as ``tune.loguniform(1e-4, 1e-1)``, a
            ``tune.grid_search([...])``, or a dict of them. For a trainer it is the ``train_loop_config``, or has the
            sections of the trainer: ``{"train_loop_config": {...}, "scaling_config": ...}``.
        tune_config: How the space is searched.
        run_config: Where the sweep is kept, when trials stop, what happens when one fails.

    Example:
        >>> tuner = tune.Tuner(
        ...     TorchTrainer(train, scaling_config=ScalingConfig(num_workers=2)),
        ...     param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        ...     tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=16),
        ... )
        >>> best = tuner.fit().get_best_result()
    """

    def __init__(
        self,
        trainable: Any = None,
        *,
        param_space: Mapping[str, Any] | None = None,
        tune_config: TuneConfig | None = None,
        run_config: RunConfig | None = None,
    ) -> None:
        trainable = self._trainable = find_trainable(trainable) if isinstance(trainable, str) else trainable
        self._space: Any = dict(param_space) if isinstance(param_space, Mapping) else param_space or {}
        if param_space is not None:
            check_space(param_space)
        if param_space == {} and not isinstance(getattr(tune_config, "search_alg", None), Searcher):
            raise ConfigError(
                "param_space={} is empty, so there is nothing to search. Give it values, such as "
                "{'lr': tune.loguniform(1e-4, 1e-1)}, or leave it out to run the trainable as it is."
            )
        self._tune: TuneConfig = as_config(tune_config, TuneConfig, "Tuner(tune_config=...)")
        own = (
            trainable.run_config
            if isinstance(trainable, DataParallelTrainer) and run_config is None
            else run_config
        )
        self._run: RunConfig = as_config(own, RunConfig, "Tuner(run_config=...)")
        self._base = self._make_base(trainable)
        self._resume: ResumeConfig | None = None
        self._results: ResultGrid | None = None
        self._check_search()

    # ------------------------------------------------------------------ restoring

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        trainable: Any = None,
        resume_unfinished: bool = True,
        resume_errored: bool = False,
        restart_errored: bool = False,
        param_space: Mapping[str, Any] | None = None,
        storage_filesystem: Any = None,
        _resume_config: ResumeConfig | None = None,
    ) -> Tuner:
        """Return a Tuner that continues the sweep at ``path``, which is ``storage_path/name``.

        Args:
            path: The directory of the sweep.
            trainable: The trainer or function; by default the one that the sweep keeps.
            resume_unfinished: Whether trials that were running go on from their newest checkpoints.
            resume_errored: Whether failed trials go on from their newest checkpoints.
            restart_errored: Whether failed trials begin anew.
            param_space: The space, where it holds objects that changed since.
            storage_filesystem: A pyarrow or fsspec file system that ``path`` is a path of.

        Returns:
            The Tuner; ``fit`` continues the sweep.

        Raises:
            ConfigError: There is no sweep, or it does not keep what it was made of.

        Example::

            results = tune.Tuner.restore("~/powertrain_runs/search", resume_errored=True).fit()
        """
        path = as_path(path, "Tuner.restore(path=...)")
        storage = _open(path, storage_filesystem)
        sweep_record.read(storage)
        arguments = sweep_record.load_arguments(storage)
        root, name = split_run_path(path)
        run = replace(
            arguments["run_config"], name=name, storage_path=root, storage_filesystem=storage_filesystem
        )
        tuner = cls(
            trainable if trainable is not None else arguments["trainable"],
            param_space=param_space if param_space is not None else arguments["param_space"] or None,
            tune_config=arguments["tune_config"],
            run_config=run,
        )
        errored = (
            ResumeType.RESTART
            if restart_errored
            else ResumeType.RESUME
            if resume_errored
            else ResumeType.SKIP
        )
        unfinished = ResumeType.RESUME if resume_unfinished else ResumeType.SKIP
        tuner._resume = _resume_config or ResumeConfig(unfinished=unfinished, errored=errored)
        return tuner

    @classmethod
    def can_restore(cls, path: str | os.PathLike[str], storage_filesystem: Any = None) -> bool:
        """Return whether there is a sweep at ``path`` that :meth:`restore` can continue.

        Args:
            path: The directory of the sweep.
            storage_filesystem: A pyarrow or fsspec file system that ``path`` is a path of.

        Returns:
            Whether there is one.

        Example::

            if tune.Tuner.can_restore(path):
                tuner = tune.Tuner.restore(path)
        """
        try:
            storage = _open(as_path(path, "Tuner.can_restore(path=...)"), storage_filesystem)
            sweep_record.read(storage)
        except (ConfigError, OSError):
            return False
        return True

    def get_results(self) -> ResultGrid:
        """Return the results of a sweep that was run or restored.

        Returns:
            One result for each trial.

        Raises:
            ConfigError: The sweep has not run.

        Example::

            results = tune.Tuner.restore("~/powertrain_runs/search").get_results()
        """
        if self._results is None and self._run.name is not None:
            from powertrain.tune.result_grid import ResultGrid

            self._results = ResultGrid.from_path(
                child_path(self._run.storage_root, self._run.name), self._run.storage_filesystem
            )
        if self._results is None:
            raise ConfigError("The sweep has not run yet. Call fit() first.")
        return self._results

    # ------------------------------------------------------------------ running

    def fit(self) -> ResultGrid:
        """Run all trials and return their results. A sweep of the same name that did not end is continued.

        Returns:
            One result for each trial.

        Raises:
            ConfigError: Trials never report the metric, or a scheduler, searcher or stopper cannot be used.
            KeyboardInterrupt: The sweep was interrupted by Ctrl-C, and can be continued.
            PreemptedError: The machine ends this process soon; the sweep can be continued.

        Example::

            best = tuner.fit().get_best_result(metric="loss", mode="min")
        """
        from powertrain.tune.result_grid import ResultGrid

        with ExitStack() as stack:
            server = self._enter_server(stack)  # before there are threads, which forbid forking
            name = self._run.name or new_name("Tuner")
            storage, lease = open_sweep(self._run, name, stack)
            loop, screen = self._make_loop(name, storage, lease.number, server, stack)
            with interrupts_of(loop) as received:
                ending = "the sweep has failed"
                try:
                    loop.run(lambda: screen.draw(_trials(loop)))
                    is_over = not loop.is_interrupted and not loop.is_left
                    ending = "finished" if is_over else "interrupted" if received else "stopped"
                finally:
                    screen.close(_trials(loop), ending)
            self._results = ResultGrid(storage, loop.state, loop.errors, self._run.storage_filesystem)
        where = without_secrets(storage.uri)
        if loop.is_interrupted:
            message = f"the sweep was interrupted and can be continued: Tuner.restore({where!r})"
            if received:
                raise PreemptedError(message) if received == ["notice"] else KeyboardInterrupt(message)
            screen.print_line(message)  # 'powertrain stop': as with a run, the script gets the results so far
        if self._run.failure_config.fail_fast == "raise" and loop.errors:
            raise next(iter(loop.errors.values()))
        return self._results

    def _enter_server(self, stack: ExitStack) -> WarmServer | None:
        from powertrain.driver.engines import enter_server

        return enter_server(self._base._request, stack)

    def _make_loop(
        self, name: str, storage: Storage, lease: int, server: WarmServer | None, stack: ExitStack
    ) -> tuple[SweepLoop, SweepScreen]:
        from powertrain.run.record.journal import Journal
        from powertrain.run.record.journal_lines import as_line
        from powertrain.tune.sweep import control as sweep_control
        from powertrain.tune.sweep.callback_states import CallbackStates
        from powertrain.tune.sweep.capacity import count_concurrent_trials
        from powertrain.tune.sweep.journal.state import replay
        from powertrain.tune.sweep.loop import SweepLoop
        from powertrain.tune.sweep.policies import with_policies

        earlier = sweep_record.read_journal(storage)
        record = sweep_record.read(storage) if earlier else {}
        before = continuing.load_kept(storage) if earlier else {}
        judge = self._make_judge(storage, str(record.get("prefix") or secrets.token_hex(3)[:5]), before)
        if record.get("name", name) != name:  # renamed: fail before anything is written under the new name
            replay(earlier, judge.state.load_config)
        kept = self._with_real_files(storage, stack)
        unkept = self._store_record(name, storage, judge)
        journal = Journal(kept, lease, lambda fact: as_line(ev.encode_event(fact)), ev.DURABLE)
        stack.callback(journal.close)
        screen = self._make_screen(name, storage, judge, is_continued=bool(earlier))
        judge.replay(earlier)
        add_spent(judge.stopper, judge.state.seconds)
        callbacks = self._callbacks(screen)
        starter = TrialStarter(
            self._trainable, self._base, self._run, storage, screen, server, judge, callbacks
        )
        states = CallbackStates(storage, callbacks, screen.warn)
        if earlier:
            states.restore()

        def on_trial_end(trial: Trial) -> None:
            screen.trial_ended(trial)
            states.store()

        loop = SweepLoop(
            judge,
            with_policies(journal.append, storage, earlier, judge.scheduler.logs_policies),
            starter.start,
            callbacks,
            concurrency=count_concurrent_trials(self._base, self._tune.max_concurrent_trials),
            num_samples=self._tune.num_samples,
            time_budget_s=self._remaining_budget(judge.state.seconds),
            fail_fast=bool(self._run.failure_config.fail_fast),
            metrics=as_list(judge.searcher.metric or judge.scheduler.metric or self._tune.metric),
            warn=screen.warn,
            on_trial_end=on_trial_end,
        )
        resume, samples = self._resume or ResumeConfig(), self._tune.num_samples
        loop.begin(self._started(judge), lambda: continuing.resume_facts(judge, resume, samples, time.time()))
        if changes := continuing.describe_changes(before, self._space, self._tune, judge):
            screen.warn(changes)
        self._remark(screen, unkept, judge)
        sweep_control.listen(loop, name, lease, kept, stack, screen.warn)
        stack.callback(states.store)
        stack.callback(loop.conclude)
        return loop, screen

    def _make_screen(self, name: str, storage: Storage, judge: Judge, *, is_continued: bool) -> SweepScreen:
        from powertrain.tune.sweep.screen import SweepScreen

        total, samples = judge.searcher.total_trials(), self._tune.num_samples
        return SweepScreen(
            name,
            without_secrets(storage.uri),
            metric=objective_of(judge, self._tune)[0],
            mode=objective_of(judge, self._tune)[1],
            total=total if total is not None else samples if samples > 0 else None,
            verbose=self._run.verbose,
            reporter=self._run.progress_reporter,
            hides_output=bool(self._run.log_to_file) or self._run.verbose == 0,
            is_continued=is_continued,
        )

    def _make_judge(self, storage: Storage, prefix: str, before: Mapping[str, Any]) -> Judge:
        from powertrain.tune.sweep.journal.state import SweepState
        from powertrain.tune.sweep.judge import Judge

        searcher = continuing.choose_kept(before, self._new_searcher())
        searcher.set_num_samples(self._tune.num_samples)
        scheduler = self._new_scheduler()
        scheduler.set_search_properties(first_of(self._tune.metric), first_of(self._tune.mode))
        state = SweepState(load_config=functools.partial(sweep_record.load_config, storage))
        name = TrialNames(self._tune, self._trainable_name, state.trials)
        keep = functools.partial(sweep_record.store_config, storage)
        stopper = as_stopper(copy_stopper(self._run.stop))
        return Judge(searcher, scheduler, stopper, state, name, keep, prefix)

    def _new_searcher(self) -> Searcher:
        """A searcher without any trials: that of the user stays as it is, for another fit()."""
        given = self._tune.search_alg
        searcher = copy.deepcopy(given) if isinstance(given, Searcher) else given
        return choose_searcher(searcher, self._space, self._tune.metric, self._tune.mode)

    def _new_scheduler(self) -> TrialScheduler:
        given = self._tune.scheduler
        if given is None:
            return FIFOScheduler()
        return create_scheduler(given) if isinstance(given, str) else copy.deepcopy(given)

    def _check_search(self) -> None:
        """Raise for a search that cannot be, before anything is started."""
        self._new_searcher()
        scheduler = self._new_scheduler()
        scheduler.set_search_properties(first_of(self._tune.metric), first_of(self._tune.mode))
        as_stopper(self._run.stop)
        if isinstance(self._trainable, DataParallelTrainer):
            split_sections(self._space)

    # ------------------------------------------------------------------ trials

    def _make_base(self, trainable: Any) -> DataParallelTrainer:
        """The trainer that those of the trials are made like."""
        self._trainable_name = name_of(trainable)
        if isinstance(trainable, DataParallelTrainer):
            return trainable
        if trainable is None or not callable(trainable):
            raise ConfigError(
                f"Tuner(trainable={shorten(trainable)}) is neither a trainer nor a function. Give a TorchTrainer, or a "
                "function of the configuration that calls tune.report."
            )
        function = trainable
        check_takes_config(trainable)
        if is_trainable_class(trainable):
            checkpoints = self._run.checkpoint_config
            function = as_function(
                trainable,
                checkpoint_frequency=checkpoints.checkpoint_frequency or 0,
                checkpoint_at_end=bool(checkpoints.checkpoint_at_end),
            )
        from powertrain.tune.trainable.reporting import ReportingFunction

        scaling = scaling_of(trainable)
        return DataParallelTrainer(
            ReportingFunction(function),
            scaling_config=scaling,
            run_config=replace(self._run, callbacks=(), stop=None, progress_reporter=None),
        )

    def _callbacks(self, screen: SweepScreen) -> CallbackList:
        callbacks = CallbackList([c for c in self._run.callbacks if is_of_sweep(c)], screen.warn)
        callbacks.call(
            "setup", stop=self._run.stop, num_samples=self._tune.num_samples, total_num_samples=screen.total
        )
        return callbacks

    # ------------------------------------------------------------------ what is kept

    def _with_real_files(self, storage: Storage, stack: ExitStack) -> Storage:
        """Storage that a journal can append to; by way of a spool where there are no real files."""
        return with_real_files(self._base._request, storage, stack, None)

    def _store_record(self, name: str, storage: Storage, judge: Judge) -> str:
        """Write sweep.json and the arguments; return why the function cannot be kept, or an empty string."""
        engine = self._base._request.engine
        description = describe_sweep(
            name, self._trainable_name, engine, self._space, self._tune, self._run, judge
        )
        return sweep_record.store(storage, description, self._lasting_arguments(judge))

    def _lasting_arguments(self, judge: Judge) -> dict[str, Any]:
        run = replace(self._run, name=None, storage_path=None, storage_filesystem=None, worker_runtime_env={})
        return {
            "trainable": KeptTrainable(self._trainable),
            "param_space": self._space,
            "tune_config": self._tune,
            "run_config": run,
            "searcher": judge.searcher,
        }

    def _started(self, judge: Judge) -> ev.SweepStarted:
        metric, mode = objective_of(judge, self._tune)
        return ev.SweepStarted(
            time=time.time(),
            start=judge.state.starts + 1,
            host=platform.node(),
            pid=os.getpid(),
            metric=metric or "",
            mode=mode or "",
        )

    def _remaining_budget(self, spent: float) -> float | None:
        budget = self._tune.time_budget_s
        assert not isinstance(budget, timedelta)  # the config has turned it into seconds
        return None if budget is None else max(0.0, budget - spent)

    def _remark(self, screen: SweepScreen, unkept: str, judge: Judge) -> None:
        run = replace(
            self._run,
            progress_reporter=None,
            checkpoint_config=checkpoint_config_of(self._trainable, self._run),
        )
        if ineffective := without_effect([self._tune, run]):
            screen.warn(ineffective)
        if unkept:
            screen.warn(f"Tuner.restore(path) will need the function again: it could not be kept ({unkept}).")
        if judge.changed_decisions:
            screen.warn(
                f"The scheduler would decide otherwise in {judge.changed_decisions} cases that were decided before the "
                "restart. Those decisions stand."
            )
        if judge.changed_suggestions:
            screen.warn(
                f"The searcher would suggest something else for {judge.changed_suggestions} trials that the sweep has. "
                "They keep their configurations, and the searcher learns from those."
            )


# --------------------------------------------------------------------------- helpers


def _open(path: str, filesystem: Any) -> Storage:
    from powertrain.storage import open_storage

    return open_storage(path, filesystem=filesystem, timeout=30.0)


def _trials(loop: SweepLoop) -> list[Trial]:
    with loop.lock:
        return list(loop.state.trials.values())
