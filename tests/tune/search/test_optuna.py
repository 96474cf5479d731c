"""OptunaSearch: the same calls give the same suggestions, which lie in the space and get better."""

from __future__ import annotations

import copy
import logging
import math
import pickle
import random
import statistics
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from powertrain.errors import ConfigError
from powertrain.tune import space as sp
from powertrain.tune.search import BasicVariantGenerator, Searcher
from powertrain.tune.search.optuna import OptunaSearch
from powertrain.tune.search.translation import nest, translate_space

SPACE: dict[str, Any] = {
    "x": sp.uniform(-1, 1),
    "deep": {"lr": sp.loguniform(1e-5, 1), "layers": sp.randint(1, 5)},
    "act": sp.choice(["relu", "gelu"]),
    "kept": {"list": [1, 2]},
}
LINE = {"x": sp.uniform(-1, 1)}


def ready(
    searcher: Searcher, space: Mapping[str, Any] = SPACE, metric: Any = "loss", mode: Any = "min"
) -> Searcher:
    searcher.set_search_properties(metric, mode, space)
    return searcher


def suggest(searcher: Searcher, trial: str) -> dict[str, Any]:
    config = searcher.suggest(trial)
    assert isinstance(config, dict)
    return config


def study_of(searcher: Searcher) -> optuna.Study:
    assert isinstance(searcher, OptunaSearch)
    assert searcher.study is not None
    return searcher.study


def drive(searcher: Searcher, trials: int, seed: int = 0, live: int = 3) -> list[dict[str, Any]]:
    """Run trials of the quadratic, ``live`` at a time in a random order; returns their configurations."""
    rng, configs = random.Random(seed), dict[str, dict[str, Any]]()
    running: list[str] = []
    while len(configs) < trials or running:
        if len(running) < live and len(configs) < trials:
            trial = f"t{len(configs)}"
            configs[trial] = suggest(searcher, trial)
            running.append(trial)
            continue
        trial = running.pop(rng.randrange(len(running)))
        loss = quadratic(configs[trial])
        if rng.random() < 0.1:
            searcher.on_trial_complete(trial, None, error=True)
        elif rng.random() < 0.1:
            searcher.on_trial_result(trial, {"loss": loss + 1, "training_iteration": 1})
            searcher.on_trial_complete(trial, {"loss": math.nan})
        else:
            searcher.on_trial_complete(trial, {"loss": loss})
    return list(configs.values())


def quadratic(config: Mapping[str, Any]) -> float:
    return sum((value - 0.3) ** 2 for value in config.values() if isinstance(value, float))


def run_alone(
    searcher: Searcher, losses: list[Any], space: Mapping[str, Any] = LINE, **objective: Any
) -> None:
    """Suggest and end one trial after another with the given results."""
    ready(searcher, space, **objective)
    for number, loss in enumerate(losses):
        suggest(searcher, str(number))
        searcher.on_trial_complete(str(number), loss if isinstance(loss, dict) else {"loss": loss})


# --------------------------------------------------------------------------- the same calls, the same suggestions


def test_a_seeded_search_is_repeated_by_the_same_calls() -> None:
    first, second = (drive(ready(OptunaSearch(seed=7)), 30) for _ in range(2))
    assert first == second
    assert first != drive(ready(OptunaSearch(seed=8)), 30)


def test_a_search_without_a_seed_is_repeated_by_a_pickled_copy() -> None:
    searcher = OptunaSearch()
    before = pickle.dumps(searcher)
    expected = drive(ready(searcher), 20)
    for copied in (pickle.loads(before), pickle.loads(pickle.dumps(searcher)), copy.deepcopy(searcher)):
        assert copied.study is None, "a study is not pickled"
        assert drive(ready(copied), 20) == expected
    assert drive(ready(OptunaSearch()), 20) != expected


@pytest.mark.parametrize(
    ("make", "seed", "trials"),
    [
        (lambda seed: optuna.samplers.TPESampler(n_startup_trials=2, multivariate=True, seed=seed), 5, 15),
        (lambda seed: optuna.samplers.TPESampler(seed=seed), None, 15),
        (lambda seed: optuna.samplers.CmaEsSampler(n_startup_trials=2, seed=seed), None, 10),
        (lambda seed: optuna.samplers.GPSampler(n_startup_trials=1, seed=seed), None, 3),
        (lambda seed: optuna.samplers.NSGAIISampler(population_size=3, seed=seed), None, 15),
        (lambda seed: optuna.samplers.RandomSampler(seed=seed), 5, 15),
    ],
)
def test_every_sampler_is_repeated_by_a_pickled_copy(
    make: Callable[[int | None], Any], seed: int | None, trials: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = make(seed)
    # CMA-ES needs two entries; a Gaussian process is slow with more than one.
    space = LINE if isinstance(sampler, optuna.samplers.GPSampler) else {**LINE, "y": sp.uniform(0, 1)}
    searcher = OptunaSearch(sampler=sampler)
    before = pickle.dumps(searcher)
    expected = drive(ready(searcher, space), trials, live=1)
    for copied in (before, pickle.dumps(searcher))[: 1 if space is LINE else 2]:
        assert drive(ready(pickle.loads(copied), space), trials, live=1) == expected
    if seed is not None:
        assert drive(ready(OptunaSearch(sampler=sampler), space), trials, live=1) == expected, (
            "the sampler was copied"
        )
    assert type(study_of(searcher).sampler) is type(sampler)


def test_functions_of_the_space_are_called_after_the_suggestions_and_draw_from_the_seed() -> None:
    space = {
        "double": sp.sample_from(lambda spec: spec.config.x * 2),
        "drawn": sp.sample_from(lambda: sp.uniform(0, 1)),
        "x": sp.uniform(-1, 1),
    }
    first, second = (drive(ready(OptunaSearch(seed=1), space), 5) for _ in range(2))
    assert first == second
    assert all(config["double"] == config["x"] * 2 for config in first)
    assert len({config["drawn"] for config in first}) == 5


# --------------------------------------------------------------------------- spaces

ENTRIES: dict[str, Any] = {
    "uniform": sp.uniform(-3.5, 2),
    "loguniform": sp.loguniform(1e-6, 1e-2),
    "quniform": sp.quniform(0.05, 1.04, 0.1),
    "qloguniform": sp.qloguniform(0.03, 2, 0.02),
    "randint": sp.randint(-3, 4),
    "qrandint": sp.qrandint(3, 21, 5),
    "lograndint": sp.lograndint(1, 100),
    "qlograndint": sp.qlograndint(10, 300, 8),
    "one": sp.randint(3, 4),
}


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_suggestions_lie_where_random_draws_lie(seed: int) -> None:
    config = suggest(ready(OptunaSearch(seed=seed), ENTRIES), "a")
    assert config.keys() == ENTRIES.keys()
    assert -3.5 <= config["uniform"] <= 2
    assert 1e-6 <= config["loguniform"] <= 1e-2
    assert config["quniform"] in [round(0.1 * n, 12) for n in range(1, 11)]
    assert config["qloguniform"] in [round(0.02 * n, 12) for n in range(2, 101)]
    assert config["randint"] in range(-3, 4)
    assert config["qrandint"] in (5, 10, 15, 20)
    assert config["lograndint"] in range(1, 100)
    assert config["qlograndint"] in range(16, 297, 8)
    assert config["one"] == 3
    assert all(type(config[name]) is int for name in ENTRIES if "int" in name)


@settings(deadline=None)
@given(st.integers(0, 10_000))
def test_a_drawn_value_becomes_a_value_of_the_study_and_back(seed: int) -> None:
    rng = random.Random(seed)
    space = {
        **ENTRIES,
        "normal": sp.randn(5, 2),
        "qnormal": sp.qrandn(0, 1, 0.25),
        "list": sp.choice([[1], {"a": 2}]),
    }
    config = sp.resolve(space, rng)
    for name, parameter in translate_space(space).items():
        encoded = parameter.encode(config[name], "a point")
        assert parameter.to_config(encoded) == pytest.approx(config[name], abs=1e-6)


def test_a_normal_distribution_is_searched_by_its_quantile() -> None:
    values = [c["z"] for c in drive(ready(OptunaSearch(seed=0), {"z": sp.qrandn(10, 2, 0.5)}), 40)]
    assert all(2 <= value <= 18 and value * 2 == int(value * 2) for value in values)
    assert 8 < statistics.mean(values) < 12


def test_values_that_no_storage_can_keep_are_chosen_as_they_are() -> None:
    values: list[Any] = [[64, 64], {"a": 1}, max, None]
    searcher = ready(OptunaSearch(seed=0), {"c": sp.choice(values)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [config["c"] for config in drive(searcher, 20)]
    assert all(any(value is choice for choice in values) for value in found)
    assert len({str(value) for value in found}) == len(values)


def test_a_grid_is_searched_as_a_choice_with_a_remark(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "powertrain"):
        searcher = ready(OptunaSearch(seed=0), {"deep": {"g": sp.grid_search([1, 2])}, **LINE})
    assert "OptunaSearch treats 'deep/g' as a choice" in caplog.text
    assert {config["deep"]["g"] for config in drive(searcher, 10)} == {1, 2}


def test_distributions_of_optuna_are_taken_with_nested_names_and_constants() -> None:
    space = {
        "a/b": FloatDistribution(2, 3),
        "a": {"n": IntDistribution(1, 4)},
        "c": CategoricalDistribution(["u", "v"]),
        "ours": sp.uniform(0, 1),
    }
    searcher = OptunaSearch(space, "loss", "min", seed=0)
    searcher.set_search_properties(
        None, None, {"a": {"kept": 1}, "batch": sp.sample_from(lambda s: s.config.a["n"] * 8)}
    )
    config = suggest(searcher, "t")
    assert 2 <= config["a"]["b"] <= 3
    assert config["a"]["kept"] == 1
    assert config["batch"] == config["a"]["n"] * 8
    assert set(config) == {"a", "c", "ours", "batch"}
    assert set(searcher.drawn_values("t")) == {"a/b", "a/n", "c", "ours", "batch"}


def conditional(trial: optuna.Trial) -> dict[str, Any]:
    if trial.suggest_categorical("kind", ["sgd", "adam"]) == "sgd":
        trial.suggest_float("sgd/momentum", 0, 1)
    else:
        trial.suggest_float("adam/beta", 0.9, 1)
    return {"adam": {"eps": 1e-8}, "made/by": "hand"}


def test_a_function_defines_a_space_whose_entries_depend_on_each_other() -> None:
    searcher = OptunaSearch(
        conditional, seed=0, points_to_evaluate=[{"kind": "sgd", "sgd": {"momentum": 0.5}}]
    )
    ready(searcher, {"kept": 1})
    configs = drive(searcher, 20)
    assert configs[0] == {
        "kind": "sgd",
        "sgd": {"momentum": 0.5},
        "adam": {"eps": 1e-8},
        "made": {"by": "hand"},
        "kept": 1,
    }
    for config in configs:
        assert ("sgd" in config) == (config["kind"] == "sgd")
        assert ("beta" in config["adam"]) == (config["kind"] == "adam")
    assert {config["kind"] for config in configs} == {"sgd", "adam"}
    copied = cloudpickle.loads(cloudpickle.dumps(searcher))
    assert drive(copied, 20) == configs


@given(st.dictionaries(st.lists(st.sampled_from("abc"), min_size=3, max_size=3).map("/".join), st.integers()))
def test_names_with_slashes_become_nested_entries(flat: dict[str, int]) -> None:
    assert {"/".join(path): value for path, value in sp.walk(nest(flat))} == flat


# --------------------------------------------------------------------------- results that reach the study


def test_the_study_gets_values_failures_and_trials_without_a_number() -> None:
    searcher = ready(OptunaSearch(seed=0))
    for trial in "abcde":
        suggest(searcher, trial)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for iteration in (1, 2, 2, 1):
            searcher.on_trial_result("a", {"loss": iteration / 10, "training_iteration": iteration})
    searcher.on_trial_complete("a", {"loss": 0.25, "training_iteration": 2})
    searcher.on_trial_complete("b", {"loss": 0.5}, error=True)
    searcher.on_trial_result("c", {"loss": 0.75, "training_iteration": 1})
    searcher.on_trial_result("c", {"loss": math.nan, "training_iteration": 2})
    searcher.on_trial_complete("c", {"loss": math.nan})
    searcher.on_trial_complete("d", {"other": 1.0})
    for again in ("a", "unknown"):
        searcher.on_trial_result(again, {"loss": 9.0, "training_iteration": 9})
        searcher.on_trial_complete(again, {"loss": 9.0})
    trials = study_of(searcher).trials
    assert [trial.state for trial in trials] == [
        TrialState.COMPLETE,
        TrialState.FAIL,
        TrialState.PRUNED,
        TrialState.PRUNED,
        TrialState.RUNNING,
    ]
    assert [trial.values for trial in trials] == [[0.25], None, [0.75], None, None]
    assert trials[0].intermediate_values == {1: 0.1, 2: 0.2}
    assert trials[2].intermediate_values == {1: 0.75}


def test_several_objectives_need_a_number_for_each() -> None:
    searcher = OptunaSearch(metric=["loss", "eval/acc"], mode=["min", "max"], seed=0)
    run_alone(
        searcher,
        [{"loss": 1, "eval": {"acc": 0.5}}, {"loss": 2}, {"loss": 3, "eval/acc": 0.1}],
        metric=None,
        mode=None,
    )
    study = study_of(searcher)
    assert [direction.name for direction in study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert [trial.values for trial in study.trials] == [[1.0, 0.5], None, [3.0, 0.1]]
    assert study.trials[1].state is TrialState.FAIL
    suggest(searcher, "next")
    searcher.on_trial_result("next", {"loss": 1, "eval/acc": 1, "training_iteration": 1})
    assert study.trials[3].intermediate_values == {}


def test_points_are_tried_first_as_they_were_given() -> None:
    space = {
        **SPACE,
        "z": sp.randn(0, 1),
        "f": sp.sample_from(lambda spec: spec.x),
        "c": sp.choice([[1], [2]]),
    }
    points = [
        {"x": 0.5, "deep": {"lr": 0.1, "layers": 2}, "act": "gelu", "z": 99.0, "c": [2], "f": "mine"},
        {"deep/lr": 0.25, "kept": {"list": [3]}},
    ]
    searcher = ready(OptunaSearch(points_to_evaluate=points, seed=0), space)
    configs = drive(searcher, 3)
    assert configs[0] == {**points[0], "kept": {"list": [1, 2]}}
    assert (configs[1]["deep"]["lr"], configs[1]["kept"], configs[1]["f"]) == (
        0.25,
        {"list": [3]},
        configs[1]["x"],
    )
    assert -1 <= configs[1]["x"] <= 1
    assert configs[2]["kept"] == {"list": [1, 2]}
    assert study_of(searcher).trials[0].params["x"] == 0.5


def test_points_whose_rewards_are_known_reach_the_searcher_and_are_not_tried() -> None:
    points = [{"x": value / 10} for value in range(10)]
    searcher = OptunaSearch(
        points_to_evaluate=points, evaluated_rewards=[abs(p["x"] - 0.3) for p in points], seed=0
    )
    searcher.add_evaluated_point({"x": 0.25}, 0.01, intermediate_values=[0.5, 0.02])
    searcher.add_evaluated_point({"x": -1.0}, 0.0, error=True)
    searcher.add_evaluated_point({"x": -0.5}, 5.0, pruned=True)
    for copied in (pickle.loads(pickle.dumps(searcher)), searcher):
        config = suggest(ready(copied, LINE), "a")
        assert config["x"] not in [point["x"] for point in points]
        trials = study_of(copied).trials
        assert [trial.value for trial in trials[:10]] == [abs(p["x"] - 0.3) for p in points]
        assert trials[10].intermediate_values == {0: 0.5, 1: 0.02}
        assert [trial.state for trial in trials[10:]] == [
            TrialState.COMPLETE,
            TrialState.FAIL,
            TrialState.PRUNED,
            TrialState.RUNNING,
        ]
        copied.add_evaluated_point({"x": 0.75}, 1.0)
        assert study_of(copied).trials[-1].params == {"x": 0.75}


def test_an_evaluated_point_of_a_function_reaches_the_study_with_its_distributions() -> None:
    searcher = OptunaSearch(conditional, "loss", "min", seed=0)
    searcher.add_evaluated_point({"kind": "adam", "adam": {"beta": 0.95}}, 0.5)
    suggest(ready(searcher, {}), "a")
    assert study_of(searcher).trials[0].params == {"kind": "adam", "adam/beta": 0.95}
    with pytest.raises(ConfigError, match=r"The function in OptunaSearch\(space=...\) failed"):
        searcher.add_evaluated_point({"kind": "adam"}, 0.5)


def test_a_sampler_that_has_been_through_its_space_finishes_the_search() -> None:
    searcher = ready(
        OptunaSearch(sampler=optuna.samplers.GridSampler({"act": ["a", "b"]})), {"act": sp.choice(["a", "b"])}
    )
    found = []
    for number in range(3):
        config = searcher.suggest(str(number))
        if config == Searcher.FINISHED:
            break
        assert isinstance(config, dict)
        found.append(config["act"])
        searcher.on_trial_complete(str(number), {"loss": 1.0})
    assert sorted(found) == ["a", "b"]
    assert [trial.state for trial in study_of(searcher).trials] == [TrialState.COMPLETE] * 2


# --------------------------------------------------------------------------- storages and logs


def open_storage(path: Path) -> optuna.storages.JournalStorage:
    return optuna.storages.JournalStorage(JournalFileBackend(str(path / "study.log")))


def test_ended_trials_are_stored_once_also_when_the_calls_are_repeated(tmp_path: Path) -> None:
    make = lambda: ready(OptunaSearch(storage=open_storage(tmp_path), study_name="mine", seed=3), LINE)  # noqa: E731
    expected = drive(make(), 12)
    again = make()
    assert drive(again, 12) == expected, "its own trials in the storage are not taken for earlier ones"
    assert suggest(again, "t12") not in expected
    again.on_trial_complete("t12", {"loss": 1.0})
    stored = optuna.load_study(study_name="mine", storage=open_storage(tmp_path))
    ids = [trial.user_attrs["powertrain_trial_id"] for trial in stored.trials]
    assert sorted(ids) == sorted(f"t{number}" for number in range(13))
    assert {trial.params["x"] for trial in stored.trials[:12]} == {config["x"] for config in expected}


def test_a_later_sweep_learns_from_the_stored_trials(tmp_path: Path) -> None:
    run_alone(OptunaSearch(storage=open_storage(tmp_path), seed=3), [1.0, 2.0, 3.0])
    later = ready(OptunaSearch(storage=open_storage(tmp_path), seed=4), LINE)
    suggest(later, "another sweep")
    assert [trial.value for trial in study_of(later).trials] == [1.0, 2.0, 3.0, None]
    with pytest.raises(ConfigError, match="Give another study_name"):
        ready(OptunaSearch(storage=open_storage(tmp_path)), LINE, mode="max").suggest("a")


def test_a_storage_that_fails_later_does_not_end_the_sweep(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage = optuna.storages.InMemoryStorage()
    searcher = ready(OptunaSearch(storage=storage, seed=0), LINE)
    suggest(searcher, "a")

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(storage, "create_new_trial", fail)
    with caplog.at_level(logging.WARNING, "powertrain"):
        searcher.on_trial_complete("a", {"loss": 1.0})
    assert "could not write trial a to its storage: OSError: disk full" in caplog.text
    assert study_of(searcher).trials[0].state is TrialState.COMPLETE


def test_optuna_logs_nothing_and_keeps_its_log_level(tmp_path: Path) -> None:
    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())

    seen: list[str] = []
    keep, before = Keep(), optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    logging.getLogger("optuna").addHandler(keep)
    try:
        run_alone(OptunaSearch(storage=open_storage(tmp_path), seed=0), [1.0, 2.0])
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
        assert seen == []
        optuna.create_study()
        assert len(seen) == 1, "studies of others are logged"
    finally:
        logging.getLogger("optuna").removeHandler(keep)
        optuna.logging.set_verbosity(before)


# --------------------------------------------------------------------------- does it help?


def test_tpe_finds_a_better_minimum_than_random_draws() -> None:
    space = {name: sp.uniform(-5, 5) for name in "abc"}

    def best(searcher: Searcher) -> float:
        ready(searcher, space).set_num_samples(60)
        losses = []
        for number in range(60):
            losses.append(quadratic(suggest(searcher, str(number))))
            searcher.on_trial_complete(str(number), {"loss": losses[-1]})
        return min(losses)

    with_tpe = [best(OptunaSearch(seed=seed)) for seed in range(5)]
    at_random = [best(BasicVariantGenerator(random_state=seed)) for seed in range(5)]
    assert statistics.median(with_tpe) < statistics.median(at_random) / 2


# --------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptunaSearch(3), "OptunaSearch(space=3) is neither a dict"),  # type: ignore[arg-type]
        (lambda: OptunaSearch({"x": sp.uniform(1, 0)}), "'x' of param_space cannot be used"),
        (lambda: OptunaSearch({"a/b": FloatDistribution(0, 1), "a": 3}), "'a' stands twice"),
        (lambda: OptunaSearch({"a": 3, "a/b": FloatDistribution(0, 1)}), "'a/b' stands twice"),
        (lambda: OptunaSearch({"a/b": 3, "a": {"b": 4}}), "'a/b' stands twice"),
        (
            lambda: ready(OptunaSearch(), {"a/b": sp.uniform(0, 1), "a": {"b": sp.uniform(0, 1)}}),
            "'a/b' stands twice",
        ),
        (lambda: OptunaSearch(seed=-1), "OptunaSearch(seed=...) was given -1"),
        (lambda: OptunaSearch(sampler=optuna.samplers.TPESampler), "is not a sampler of Optuna"),  # type: ignore[arg-type]
        (lambda: OptunaSearch(storage=3), "OptunaSearch(storage=3) is not a storage"),  # type: ignore[arg-type]
        (lambda: OptunaSearch(points_to_evaluate=[1]), "not a list of dicts"),  # type: ignore[list-item]
        (
            lambda: OptunaSearch(points_to_evaluate=[{}], evaluated_rewards=[]),
            "1 points_to_evaluate and 0 evaluated",
        ),
        (lambda: OptunaSearch(evaluated_rewards=3), "OptunaSearch(evaluated_rewards=3) is not a list"),  # type: ignore[arg-type]
        (lambda: OptunaSearch(LINE, mode="best"), "'best' is neither 'min' nor 'max'"),
        (lambda: ready(OptunaSearch(LINE), LINE), "OptunaSearch has a space of its own, and param_space"),
        (lambda: ready(OptunaSearch(), {"k": 1}), "OptunaSearch has nothing to search"),
        (lambda: ready(OptunaSearch(), LINE, None), "needs to know what to improve"),
        (lambda: OptunaSearch(LINE).suggest("a"), "needs to know what to improve"),
        (lambda: OptunaSearch(metric="loss", mode="min").suggest("a"), "OptunaSearch has nothing to search"),
        (lambda: ready(OptunaSearch(metric="acc")), "OptunaSearch(metric='acc') differ. Give it once"),
        (
            lambda: ready(OptunaSearch(points_to_evaluate=[{"q": 1}])),
            "points_to_evaluate[0] has the entry 'q'",
        ),
        (
            lambda: ready(OptunaSearch(points_to_evaluate=[{"act": "tanh"}])),
            "points_to_evaluate[0] has 'act'='tanh'",
        ),
        (lambda: ready(OptunaSearch(points_to_evaluate=[{"x": "1e"}])), "points_to_evaluate[0] has 'x'='1e'"),
        (
            lambda: ready(OptunaSearch(points_to_evaluate=[{"x": 5}], evaluated_rewards=[1.0])),
            "cannot be used: ValueError: The value 5",
        ),
        (
            lambda: ready(OptunaSearch(points_to_evaluate=[{"x": 0.5}], evaluated_rewards=[[1.0, 2.0]])),
            "has 2 values for 1 metrics",
        ),
        (
            lambda: ready(OptunaSearch(lambda trial: dict[Any, Any]()[trial]), {}).suggest("a"),
            "failed: KeyError",
        ),
        (lambda: ready(OptunaSearch(lambda trial: 3), {}).suggest("a"), "returned 3. Return a dict"),  # type: ignore[arg-type, return-value]
        (lambda: ready(OptunaSearch(storage="nothing://x"), LINE).suggest("a"), "cannot be opened"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert message in str(refused.value)


def test_a_seed_beside_a_sampler_is_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "powertrain"):
        OptunaSearch(sampler=optuna.samplers.RandomSampler(), seed=3)
    assert "without effect here: OptunaSearch(seed=3)" in caplog.text
