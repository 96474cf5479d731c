"""Population based training: who continues from whom, with which values, and what a restart makes of it."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from powertrain import DataParallelTrainer, RunConfig, ScalingConfig, tune
from powertrain.errors import ConfigError
from powertrain.storage import open_storage
from powertrain.tune import schedulers as s
from powertrain.tune import space as sp
from powertrain.tune.search.basic_variant import BasicVariantGenerator
from powertrain.tune.stopper import as_stopper
from powertrain.tune.sweep.journal import events as ev
from powertrain.tune.sweep.journal.record import read_journal
from powertrain.tune.sweep.journal.state import SweepState
from powertrain.tune.sweep.judge import Judge
from powertrain.tune.sweep.policies import with_policies

MODES = pytest.mark.parametrize("synch", [False, True], ids=["alone", "together"])


def population(members: Iterable[str] = "abcd", **arguments: Any) -> s.PopulationBasedTraining:
    """A population whose trials are compared at every second report."""
    scheduler = s.PopulationBasedTraining(
        **{
            "time_attr": "training_iteration",
            "metric": "score",
            "mode": "max",
            "perturbation_interval": 2,
            "hyperparam_mutations": {"lr": [1, 2]},
            **arguments,
        }
    )
    for trial in members:
        scheduler.on_trial_add(trial, {"lr": 1})
    if members:
        scheduler.on_trials_complete()
    return scheduler


def play(scheduler: s.TrialScheduler, scores: Mapping[str, float], iterations: Iterable[int] = (1, 2)) -> Any:
    """Report the scores in turn; returns who continues from whom."""
    return [
        (decision.trial, decision.source)
        for iteration in iterations
        for trial, score in scores.items()
        for decision in scheduler.on_trial_result(trial, {"training_iteration": iteration, "score": score})
        if decision.source
    ]


def saves_each_step(config: dict[str, Any]) -> None:
    """Adds ``lr`` to its score in each of 4 steps, and continues from its checkpoint."""
    state = {"step": 0, "score": 0}
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            state = json.loads(Path(directory, "state").read_text())
    while state["step"] < 4:
        state = {"step": state["step"] + 1, "score": state["score"] + config["lr"]}
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "state").write_text(json.dumps(state))
            tune.report({**state, "lr": config["lr"]}, checkpoint=tune.Checkpoint.from_directory(directory))


def run_inline(tmp_path: Path, function: Callable[..., Any], scheduler: Any, **arguments: Any) -> tune.Tuner:
    return tune.Tuner(
        DataParallelTrainer(function, scaling_config=ScalingConfig(num_workers=0)),
        param_space=arguments.pop("space", None),
        tune_config=tune.TuneConfig(metric="score", mode="max", scheduler=scheduler, **arguments),
        run_config=RunConfig(name="sweep", storage_path=str(tmp_path), verbose=0),
    )


# --------------------------------------------------------------------------- who exploits whom


@MODES
def test_only_the_worst_quarter_continues_from_the_best(synch: bool) -> None:
    assert play(population(synch=synch), {"a": 1, "b": 2, "c": 3, "d": 4}) == [("a", "d")]


@pytest.mark.parametrize(("members", "exploiting"), [(2, 1), (3, 1), (5, 2), (8, 2), (9, 3)])
def test_the_size_of_a_quantile_is_rounded_up_and_is_at_most_half(members: int, exploiting: int) -> None:
    names = [str(number) for number in range(members)]
    found = play(population(names, synch=True), {name: float(name) for name in names})
    assert [trial for trial, _ in found] == names[:exploiting]
    assert {source for _, source in found} <= set(names[-exploiting:])


@MODES
@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_diverged_trial_is_the_worst_and_the_sweep_goes_on(synch: bool, score: float, mode: str) -> None:
    exploits = play(population(synch=synch, mode=mode), {"a": 2, "b": score, "c": 2, "d": score})
    assert {trial for trial, _ in exploits} == {"b", "d"}, "all that have diverged, and no others"
    assert {source for _, source in exploits} <= {"a", "c"}


@MODES
def test_a_population_without_any_finite_score_goes_on(synch: bool) -> None:
    assert play(population(synch=synch), dict.fromkeys("abcd", math.nan)) == []


def test_a_report_without_the_metric_names_what_was_reported() -> None:
    with pytest.raises(ConfigError, match=r"did not report 'score' as a number.*'acc'.*'eval/loss'"):
        population().on_trial_result("a", {"training_iteration": 1, "acc": 1, "eval": {"loss": 2}})
    relaxed = population(require_attrs=False)
    assert relaxed.on_trial_result("a", {"training_iteration": 2, "acc": 1}) == []


def test_a_nested_metric_is_compared() -> None:
    scheduler = population("ab", metric="eval/acc")
    results = {name: {"training_iteration": 2, "eval": {"acc": acc}} for name, acc in (("b", 2), ("a", 1))}
    found = [
        decision for name, result in results.items() for decision in scheduler.on_trial_result(name, result)
    ]
    assert [(decision.trial, decision.source) for decision in found] == [("a", "b")]


def test_trials_that_wait_are_compared_when_the_last_of_the_population_has_come() -> None:
    scheduler = s.PopulationBasedTraining(
        "training_iteration", "score", "max", 2, hyperparam_mutations={"lr": [1, 2]}, synch=True
    )
    for trial in "ab":
        scheduler.on_trial_add(trial, {"lr": 1})
    assert play(scheduler, {"a": 1, "b": 2}) == [], "the others are still to come"
    for trial in "cd":
        scheduler.on_trial_add(trial, {"lr": 1})
    assert scheduler.on_trials_complete() == []
    assert play(scheduler, {"c": 3, "d": 4}) == [("a", "d")]


# --------------------------------------------------------------------------- configurations


def test_parameters_that_only_mutations_have_are_drawn_at_the_start(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        tune.report({"score": config["lr"] + config["deep"]["p"] + config["deep"]["q"]})

    mutations = {"lr": tune.uniform(1, 2), "deep": {"p": lambda: 3}}
    rule = population((), hyperparam_mutations=mutations)
    grid = run_inline(tmp_path, train, rule, space={"deep": {"q": 4}}, num_samples=3).fit()
    assert not grid.errors
    assert len({trial.config["lr"] for trial in grid.trials}) == 3
    for trial in grid.trials:
        assert 1 <= trial.config["lr"] < 2
        assert trial.config["deep"] == {"p": 3, "q": 4}
        assert trial.evaluated_params == {"lr": trial.config["lr"], "deep/p": 3}
    kept = tune.ResultGrid.from_path(tmp_path / "sweep")
    assert [trial.config for trial in kept.trials] == [trial.config for trial in grid.trials]


def test_a_restart_believes_in_the_configurations_that_were_decided() -> None:
    numbers = itertools.count(10)

    def judge() -> Judge:
        searcher = BasicVariantGenerator(random_state=3)
        searcher.set_search_properties("score", "max", {"lr": sp.grid_search([1, 2])})
        searcher.set_num_samples(1)
        rule = population((), hyperparam_mutations={"lr": lambda: next(numbers)}, resample_probability=1)
        return Judge(searcher, rule, as_stopper(None), SweepState(), lambda t: t.trial_id, lambda *_: "", "t")

    first = judge()
    events: list[ev.SweepEvent] = []
    for _ in range(2):
        events += first.suggest(0.0) or []
    for trial in first.state.trials.values():
        events.append(ev.TrialStarted(time=0.0, trial=trial.trial_id))
        first.state.apply(events[-1])
    bad, good = first.state.trials.values()
    for trial, iteration in itertools.product((good, bad), (1, 2)):
        score = 2.0 if trial is good else 1.0
        events += first.report(trial, iteration, {"score": score}, 1.0, 1.0)
    assert bad.config == {"lr": 10}

    second = judge()
    second.replay(events)
    again, other = second.state.trials.values()
    assert second.changed_decisions == 0
    assert again.config == {"lr": 10}
    again.status = other.status = "RUNNING"
    second.report(again, 3, {"score": 9.0}, 1.0, 2.0)
    believed: list[Any] = []
    second.scheduler._explore_fn = lambda config: believed.append(config) or config  # type: ignore[attr-defined]
    second.scheduler._resample, second.scheduler._factors = 0.0, (1.0, 1.0)  # type: ignore[attr-defined]
    for iteration in (3, 4):
        second.report(other, iteration, {"score": 1.0}, 1.0, 2.0)
    assert believed == [{"lr": 10}], "what it explores from is what the other runs with"


# --------------------------------------------------------------------------- failed trials


def test_a_failed_trial_is_a_member_again_when_it_is_resumed(tmp_path: Path) -> None:
    mended = tmp_path / "mended"

    def train(config: dict[str, Any]) -> None:
        for step in range(6):
            if step == 3 and config["lr"] == 1 and not mended.exists():
                raise ValueError("boom")
            tune.report({"score": config["lr"]})

    tuner = run_inline(
        tmp_path, train, population((), perturbation_interval=100), space={"lr": tune.grid_search([1, 2])}
    )
    assert tuner.fit().num_errors == 1
    mended.touch()
    grid = tune.Tuner.restore(str(tmp_path / "sweep"), resume_errored=True).fit()
    assert grid.num_errors == 0
    assert [trial.iteration for trial in grid.trials] == [6, 6]


# --------------------------------------------------------------------------- policy files

FACTS: list[ev.SweepEvent] = [
    *(
        ev.TrialAdded(time=0, trial=name, number=place, name=name, config={"lr": place}, params={"lr": place})
        for place, name in enumerate("abc")
    ),
    ev.TrialReported(time=1, trial="a", iteration=2, seconds=1, metrics={}),
    ev.TrialReported(time=1, trial="b", iteration=4, seconds=1, metrics={}),
    ev.TrialDecided(time=1, trial="a", action="continue", source="b", source_iteration=4, config={"lr": 10}),
    ev.TrialReported(time=2, trial="a", iteration=5, seconds=1, metrics={}),
    ev.TrialReported(time=2, trial="c", iteration=6, seconds=1, metrics={}),
    ev.TrialDecided(time=2, trial="c", action="continue", source="a", source_iteration=5, config={"lr": 20}),
    ev.TrialDecided(time=3, trial="b", action="stop"),
]


def test_the_policy_file_of_a_trial_shows_how_its_state_came_about(tmp_path: Path) -> None:
    recorded: list[ev.SweepEvent] = []
    record = with_policies(recorded.append, open_storage(str(tmp_path)), [])
    for fact in FACTS:
        record(fact)
    assert recorded == FACTS
    first = ["0_lr=0", "1_lr=1", 2, 4, {"lr": 1}, {"lr": 10}]
    written = {path.name: path.read_bytes() for path in tmp_path.glob("pbt_policy_*.txt")}
    lines = {name: [json.loads(line) for line in text.splitlines()] for name, text in written.items()}
    assert lines == {
        "pbt_policy_a.txt": [first],
        # The state of "a" had seen the 4 steps of "b" and 3 of its own.
        "pbt_policy_c.txt": [first, ["2_lr=2", "0_lr=0", 6, 7, {"lr": 10}, {"lr": 20}]],
    }

    (tmp_path / "pbt_policy_c.txt").unlink()
    with_policies(recorded.append, open_storage(str(tmp_path)), FACTS)  # the driver died before it wrote it
    assert {path.name: path.read_bytes() for path in tmp_path.glob("pbt_policy_*.txt")} == written


def test_a_policy_of_ray_is_repeated_from_where_its_state_began(tmp_path: Path) -> None:
    policy = tmp_path / "pbt_policy_c.txt"
    entries = [
        ["1", "9", 2, 2, {"lr": 7}, {"lr": 8}],  # given up when trial 1 took over the state of another
        ["0", "1", 2, 4, {"lr": 1}, {"lr": 10}],
        ["2", "0", 6, 7, {"lr": 10}, {"lr": 20}],
    ]
    policy.write_text("".join(json.dumps(entry) + "\n" for entry in entries[1:]))
    scheduler = s.PopulationBasedTrainingReplay(policy)
    assert scheduler.fill_config({"lr": 5, "other": 1}) == {"lr": 1}
    scheduler.on_trial_add("t", {"lr": 1})
    changes = {
        step: [decision.config for decision in scheduler.on_trial_result("t", {"training_iteration": step})]
        for step in range(1, 9)
    }
    assert {step: found for step, found in changes.items() if found} == {4: [{"lr": 10}], 7: [{"lr": 20}]}

    policy.write_text("".join(json.dumps(entry) + "\n" for entry in [entries[2], entries[1]]))
    assert s.PopulationBasedTrainingReplay(policy).config == {"lr": 1}, "the newest line begins a new chain"


def test_a_sweep_leaves_a_policy_that_can_be_replayed(tmp_path: Path) -> None:
    rule = population((), synch=True, perturbation_interval=3)
    space = {"lr": tune.grid_search([1, 2])}
    exploited, source = run_inline(tmp_path, saves_each_step, rule, space=space).fit().trials
    (policy,) = (tmp_path / "sweep").glob("pbt_policy_*.txt")
    assert policy.name == f"pbt_policy_{exploited.trial_id}.txt"
    name, its_source, *steps, old, new = json.loads(policy.read_text())
    assert (name, its_source, steps) == (exploited.experiment_tag, source.experiment_tag, [3, 3])
    assert old == {"lr": 2}

    replay = s.PopulationBasedTrainingReplay(policy)
    grid = run_inline(tmp_path / "again", saves_each_step, replay, space={"lr": 0}).fit()
    (trial,) = grid.trials
    assert not grid.errors
    scores = dict(grid.curves("score")[trial.trial_id])
    assert (scores[3], scores[4] - scores[3]) == (3 * old["lr"], new["lr"])


# --------------------------------------------------------------------------- more members than fit


def reports(tmp_path: Path) -> list[tuple[int, int]]:
    """The reports of a sweep in their order: (number of the trial, iteration)."""
    facts = read_journal(open_storage(str(tmp_path / "sweep")))
    return [(int(fact.trial[-5:]), fact.iteration) for fact in facts if isinstance(fact, ev.TrialReported)]


def test_members_take_turns_where_the_population_does_not_fit(tmp_path: Path) -> None:
    space = {"lr": tune.grid_search([3, 2, 1])}
    rule = population((), hyperparam_mutations={"lr": [5]}, resample_probability=1)
    grid = run_inline(tmp_path, saves_each_step, rule, space=space, max_concurrent_trials=1).fit()
    assert not grid.errors
    turns = [number for number, group in itertools.groupby(reports(tmp_path), key=lambda each: each[0])]
    assert turns[:4] == [0, 1, 2, 0], "no member begins its second turn before all have had their first"
    best, *others = grid.trials
    assert dict(grid.curves("lr")[best.trial_id]) == {1: 3, 2: 3, 3: 3, 4: 3}, "it goes on where it was"
    assert dict(grid.curves("step")[best.trial_id]) == {1: 1, 2: 2, 3: 3, 4: 4}
    assert [trial.config for trial in others] == [{"lr": 5}, {"lr": 5}], "the worst of those so far"


def test_a_member_that_saves_no_checkpoints_keeps_its_place(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for step in range(4):
            tune.report({"score": config["lr"], "step": step})

    space = {"lr": tune.grid_search([3, 3])}
    rule = population((), quantile_fraction=0)
    grid = run_inline(tmp_path, train, rule, space=space, max_concurrent_trials=1).fit()
    assert [trial.starts for trial in grid.trials] == [1, 1]
    assert reports(tmp_path) == [*itertools.product([0, 1], [1, 2, 3, 4])]


def test_a_turn_ends_at_the_first_report_with_a_checkpoint_after_the_comparison() -> None:
    scheduler = population("ab", quantile_fraction=0)

    def act(iteration: int, can_give_way: bool) -> list[s.Action]:
        scheduler.can_give_way = can_give_way
        found = scheduler.on_trial_result("a", {"training_iteration": iteration, "score": 1})
        return [decision.action for decision in found]

    turns = [(1, True), (2, False), (3, False), (4, True), (5, True), (6, True)]
    assert [bool(act(*turn)) for turn in turns] == [False, False, False, True, False, True]
    assert scheduler.choose(["a", "b"]) == "b"


@pytest.mark.parametrize(
    "limit", [{"max_concurrent_trials": 1}, {"search_alg": BasicVariantGenerator(max_concurrent=2)}]
)
def test_members_that_wait_for_each_other_need_not_fit(tmp_path: Path, limit: dict[str, Any]) -> None:
    space = {"lr": tune.grid_search([1, 2, 3])}
    rule = population((), hyperparam_mutations={"lr": [5]}, resample_probability=1, synch=True)
    grid = run_inline(tmp_path, saves_each_step, rule, space=space, **limit).fit()
    assert not grid.errors
    assert [trial.iteration for trial in grid.trials] == [4, 4, 4]
    assert grid.trials[0].config == {"lr": 5}
