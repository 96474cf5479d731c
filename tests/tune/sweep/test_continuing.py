"""A sweep that is started again goes on as if nothing had happened, also when something had."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tune.sweep.test_judge import make_judge

from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, tune
from powertrain.errors import ConfigError, StorageError
from powertrain.run.record.journal import Journal
from powertrain.tune import schedulers
from powertrain.tune.callback import CallbackList
from powertrain.tune.search import BasicVariantGenerator, ConcurrencyLimiter, Searcher
from powertrain.tune.search.optuna import OptunaSearch
from powertrain.tune.stopper import MaximumIterationStopper, TimeoutStopper
from powertrain.tune.sweep import loop as loops
from powertrain.tune.sweep.continuing import are_alike
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal import record
from powertrain.tune.sweep.trial_run import TrialEnd, TrialRun


def report_x(config: dict[str, Any]) -> None:
    for step in range(3):
        tune.report({"loss": config["x"] + step})


def make(tmp_path: Path, function: Callable[..., Any] = report_x, **arguments: Any) -> tune.Tuner:
    trainer = DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0))
    space = arguments.pop("space", {"x": tune.uniform(0, 1)})
    run = {"name": "sweep", "storage_path": str(tmp_path), "verbose": 0, **arguments.pop("run", {})}
    config = tune.TuneConfig(**{"metric": "loss", "mode": "min", **arguments})
    return tune.Tuner(trainer, param_space=space, tune_config=config, run_config=RunConfig(**run))


class InterruptAfter(tune.Callback):
    """Ctrl-C after so many trials."""

    def __init__(self, trials: int) -> None:
        self.left = trials

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


class Watched(OptunaSearch):
    """Keeps the study that the sweep, which copies its searcher, has searched with."""

    studies: list[Any] = []

    def suggest(self, trial_id: str) -> Any:
        found = super().suggest(trial_id)
        self.studies[:] = [self.study]
        return found


def learned() -> list[tuple[float, float]]:
    (study,) = Watched.studies
    return sorted((trial.params["x"], trial.value) for trial in study.trials if trial.value is not None)


def of_trials(grid: tune.ResultGrid) -> list[tuple[float, float]]:
    return sorted((trial.config["x"], trial.last_result["loss"]) for trial in grid.trials)


# --------------------------------------------------------------------------- searchers


@pytest.mark.parametrize("is_kept", [True, False], ids=["its arguments are there", "elsewhere"])
def test_optuna_without_a_seed_learns_from_what_ran_when_the_script_is_run_again(
    tmp_path: Path, is_kept: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, num_samples=8, search_alg=Watched(), run={"callbacks": [InterruptAfter(3)]}).fit()
    if not is_kept:
        (tmp_path / "sweep" / "sweep.pickle").unlink()
    grid = make(tmp_path, num_samples=8, search_alg=Watched()).fit()
    assert len(grid) == 8
    assert learned() == of_trials(grid)
    assert ("would suggest something else" in capsys.readouterr().out) is not is_kept


def test_an_unseeded_search_goes_on_with_its_own_seed_when_the_script_is_run_again(tmp_path: Path) -> None:
    seeds = []
    for trials in (2, 4):
        tuner = make(tmp_path, num_samples=trials, search_alg=OptunaSearch(), space={"x": tune.uniform(0, 1)})
        tuner.fit()
        seeds.append(record.load_arguments(_storage(tmp_path))["searcher"].seed)
    assert seeds[0] == seeds[1]
    make(tmp_path, num_samples=4, search_alg=OptunaSearch(seed=5)).fit()
    assert record.load_arguments(_storage(tmp_path))["searcher"].seed == 5


def _storage(tmp_path: Path) -> Any:
    from powertrain.storage import open_storage

    return open_storage(tmp_path / "sweep")


def test_arguments_are_alike_also_when_another_process_has_made_them() -> None:
    import cloudpickle

    def space() -> dict[str, Any]:
        return {"a": {"b": tune.uniform(0, 1)}, "c": tune.sample_from(lambda spec: 3), "d": [1, (2.0, None)]}

    def searcher(**arguments: Any) -> Searcher:
        made = ConcurrencyLimiter(OptunaSearch(**arguments), 2)
        made.set_search_properties("loss", "min", space())
        return made

    assert are_alike(cloudpickle.loads(cloudpickle.dumps(space())), space())
    assert are_alike(searcher(), searcher())
    assert not are_alike(searcher(seed=1), searcher(seed=2))
    assert not are_alike(searcher(seed=1), searcher())
    assert not are_alike(space(), {**space(), "d": [1, (2.5, None)]})
    assert not are_alike({"x": tune.uniform(0, 1)}, {"x": tune.uniform(0, 2)})
    assert are_alike(schedulers.ASHAScheduler(max_t=3), schedulers.ASHAScheduler(max_t=3))
    assert not are_alike(schedulers.ASHAScheduler(max_t=3), schedulers.ASHAScheduler(max_t=4))


def test_trials_that_are_not_resumed_make_room_for_others(tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    def train(config: dict[str, Any]) -> None:
        if not begun.exists():
            begun.touch()
            os.kill(os.getpid(), signal.SIGINT)
            while True:  # until a report ends the trial: it must not be done before the interrupt has arrived
                report_x(config)
        report_x(config)

    search = ConcurrencyLimiter(BasicVariantGenerator(), 1)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, train, num_samples=3, search_alg=search).fit()
    grid = tune.Tuner.restore(tmp_path / "sweep", resume_unfinished=False).fit()
    assert [trial.reason == "it was not resumed" for trial in grid.trials] == [True, False, False]
    again = tune.Tuner.restore(tmp_path / "sweep").fit()
    assert [trial.iteration for trial in again.trials] == [trial.iteration for trial in grid.trials]


def test_a_searcher_that_suggests_no_configuration_is_named(tmp_path: Path) -> None:
    class Lists(Searcher):
        def suggest(self, trial_id: str) -> Any:
            return ["x"]

    with pytest.raises(ConfigError, match=r"Lists\.suggest\(\) returned \['x'\]"):
        make(tmp_path, space=None, search_alg=Lists()).fit()


# --------------------------------------------------------------------------- another script, the same name


def test_more_samples_under_the_same_name_are_more_trials(tmp_path: Path) -> None:
    first = make(tmp_path, num_samples=2).fit()
    grid = make(tmp_path, num_samples=5).fit()
    assert len(grid) == 5
    assert [result.config for result in grid][:2] == [result.config for result in first]
    assert len({trial.config["x"] for trial in grid.trials}) == 5
    assert len(make(tmp_path, num_samples=2).fit()) == 5


def test_a_changed_script_says_what_applies_to_new_trials_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = schedulers.ASHAScheduler(max_t=2)
    make(tmp_path, num_samples=2, run={"verbose": 1}).fit()
    assert "sweep started in" in capsys.readouterr().out
    make(tmp_path, num_samples=2, run={"verbose": 1}).fit()
    shown = capsys.readouterr().out
    assert "sweep continued in" in shown
    assert "differ" not in shown
    space = {"x": tune.uniform(100, 101)}
    grid = make(tmp_path, num_samples=3, space=space, scheduler=rule).fit()
    assert [trial.config["x"] > 99 for trial in grid.trials] == [False, False, True]
    assert grid.trials[2].was_stopped_early
    assert capsys.readouterr().out.count("param_space and scheduler differ: that applies from now on") == 1


# --------------------------------------------------------------------------- faults


def test_a_metric_that_was_misspelled_is_corrected_under_the_same_name(tmp_path: Path) -> None:
    grids = {"x": tune.grid_search([1, 2])}
    with pytest.raises(ConfigError, match=r"never reported 'los'.*It reported 'loss'"):
        make(tmp_path, space=grids, metric="los").fit()
    grid = make(tmp_path, space=grids).fit()
    assert grid.num_errors == 0
    assert grid.get_best_result().config == {"x": 1}


def test_a_scheduler_that_raises_ends_no_trial_for_good(tmp_path: Path) -> None:
    mended = tmp_path / "mended"

    class Raises(schedulers.FIFOScheduler):
        def on_trial_result(self, trial: str, result: Any) -> list[Any]:
            if not mended.exists():
                raise RuntimeError("a fault of the scheduler")
            return []

    with pytest.raises(RuntimeError, match="a fault of the scheduler"):
        make(tmp_path, scheduler=Raises(), num_samples=2).fit()
    mended.touch()
    grid = make(tmp_path, scheduler=Raises(), num_samples=2).fit()
    assert [(trial.status, trial.iteration, trial.was_stopped_early) for trial in grid.trials] == [
        ("TERMINATED", 3, False)
    ] * 2


class Waits:
    """The run of a trial that fails, or that runs until it is asked to end."""

    def __init__(self, fails: bool, others: threading.Barrier) -> None:
        self._fails, self._others = fails, others
        self.asked = threading.Event()
        self.ended_early = ""

    def on_recover(self, call: Callable[[], None]) -> None:
        """Never: this run is not started again."""

    def fit(self) -> TrialEnd:
        self._others.wait(30)
        if self._fails:
            return TrialEnd("failed", "", ValueError("a fault of the trial"))
        assert self.asked.wait(30)
        return TrialEnd("stopped", "", KeyboardInterrupt(), is_interrupted=True)

    def interrupt(self, level: int = 1) -> None:
        self.asked.set()

    def end_early(self, reason: str) -> None:
        self.ended_early = reason
        self.asked.set()


def test_with_fail_fast_trials_under_way_are_left_to_the_next_start() -> None:
    judge, both = make_judge("fifo", 2), threading.Barrier(2)
    facts: list[ev.SweepEvent] = []
    runs: list[Waits] = []

    def start(trial: Any, *_: Any) -> Any:
        runs.append(Waits(trial.number == 0, both))
        return runs[-1]

    loop = loops.SweepLoop(
        judge,
        facts.append,
        start,
        CallbackList([], lambda _: None),
        concurrency=2,
        num_samples=2,
        fail_fast=True,
    )
    loop.run(lambda: None)
    assert [run.ended_early for run in runs] == ["", ""]
    assert sorted(trial.status for trial in judge.state.trials.values()) == ["ERROR", "PENDING"]
    assert not any(isinstance(fact, ev.TrialDecided) for fact in facts)
    loop.conclude()
    assert judge.state.state == "failed"


def test_a_trial_that_reports_nothing_fails_and_others_go_on(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        if config["x"]:
            report_x(config)

    grid = make(tmp_path, train, space={"x": tune.grid_search([0, 1])}).fit()
    assert [trial.status for trial in grid.trials] == ["ERROR", "TERMINATED"]
    assert "It reported nothing" in grid.trials[0].reason
    with pytest.raises(ConfigError, match="It reported nothing"):
        make(tmp_path / "none", train, space={"x": tune.grid_search([0, 0])}).fit()


def test_a_metric_may_be_true_or_false(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        tune.report({"solved": config["x"] == 2})

    rule = schedulers.ASHAScheduler(max_t=9)
    space = {"x": tune.grid_search([1, 2])}
    grid = make(tmp_path, train, space=space, metric="solved", mode="max", scheduler=rule).fit()
    assert grid.get_best_result().config == {"x": 2}


def test_a_journal_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, calls = Journal.append, []

    def fails(journal: Journal, fact: Any) -> None:
        calls.append(fact)
        if type(fact).__name__ == "TrialReported":
            raise OSError(errno.ENOSPC, "No space left on device")
        append(journal, fact)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append", fails)
        with pytest.raises(StorageError, match=r"journal of the sweep cannot be written: No space left"):
            make(tmp_path).fit()
    assert calls
    assert make(tmp_path).fit().num_errors == 0


# --------------------------------------------------------------------------- failed trials that run again


@pytest.mark.parametrize("how", ["resume_errored", "restart_errored"])
def test_failed_trials_that_run_again_are_stopped_and_learned_from(tmp_path: Path, how: str) -> None:
    mended = tmp_path / "mended"

    def train(config: dict[str, Any]) -> None:
        for step in range(20):
            if step == 3 and not mended.exists():
                raise ValueError("not yet")
            tune.report({"loss": config["x"] + step})

    stop = MaximumIterationStopper(5)
    assert (
        make(tmp_path, train, num_samples=2, search_alg=Watched(), run={"stop": stop}).fit().num_errors == 2
    )
    mended.touch()
    again: dict[str, Any] = {how: True}
    grid = tune.Tuner.restore(tmp_path / "sweep", train_again(train), **again).fit()
    # Without checkpoints a resumed trial begins at its first report again, and those that it has made do not count.
    assert [trial.iteration for trial in grid.trials] == [5, 5]
    tune.Tuner.restore(tmp_path / "sweep", train_again(train)).fit()
    assert [value for _, value in learned()] == [trial.last_result["loss"] for trial in by_x(grid)]


def train_again(function: Callable[..., Any]) -> DataParallelTrainer:
    return DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0))


def by_x(grid: tune.ResultGrid) -> list[Any]:
    return sorted(grid.trials, key=lambda trial: trial.config["x"])


def test_a_failed_trial_that_runs_again_keeps_to_max_t_of_hyperband(tmp_path: Path) -> None:
    mended = tmp_path / "mended"

    def train(config: dict[str, Any]) -> None:
        if config["x"] == 1 and not mended.exists():
            raise ValueError("not yet")
        for step in range(30):
            tune.report({"loss": config["x"] + step})

    rule = schedulers.HyperBandScheduler(max_t=9)
    make(tmp_path, train, space={"x": tune.grid_search([1, 2])}, scheduler=rule).fit()
    mended.touch()
    grid = tune.Tuner.restore(tmp_path / "sweep", train_again(train), restart_errored=True).fit()
    assert [trial.iteration for trial in grid.trials] == [9, 9]


# --------------------------------------------------------------------------- time


def test_a_timeout_ends_a_sweep_whose_trials_report_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a report: the loop looks at the clock by itself, and ends what does not come to a boundary."""
    asked: list[int] = []

    def end_at_once(run: TrialRun, level: int = 1) -> None:
        asked.append(level)
        hang.set()

    hang = threading.Event()
    monkeypatch.setattr(loops, "_END_GRACE_S", 0.0)
    monkeypatch.setattr(TrialRun, "interrupt", end_at_once)
    grid = make(tmp_path, lambda config: hang.wait(60), run={"stop": TimeoutStopper(0.3)}).fit()
    assert asked[0] == 2
    assert "RunConfig(stop=...) has ended the sweep" in grid.trials[0].reason
    again = make(tmp_path, num_samples=3, run={"stop": TimeoutStopper(0.3)}).fit()
    assert len(again) == 1


def test_one_interrupt_that_two_threads_pass_on_ends_a_trial_at_its_boundary(tmp_path: Path) -> None:
    heard: list[str] = []
    controller: Any = SimpleNamespace(interrupt=lambda: heard.append("interrupt"))
    run = TrialRun(train_again(report_x), None, lambda *_: "", None)
    run.interrupt(1)
    run._take_controller(controller)
    run.interrupt(1)
    assert heard == ["interrupt"]
    run.interrupt(2)
    assert heard == ["interrupt"] * 2
