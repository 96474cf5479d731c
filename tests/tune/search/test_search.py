"""Searchers without a model: what is suggested follows from the seed and the calls, and nothing is left out."""

from __future__ import annotations

import copy
import logging
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.tune import search
from powertrain.tune import space as sp
from powertrain.tune.search import (
    FINISHED,
    TRIAL_INDEX,
    BasicVariantGenerator,
    ConcurrencyLimiter,
    OptunaSearch,
    Repeater,
    Searcher,
)
from powertrain.tune.search.base import find_number

SPACE: dict[str, Any] = {
    "lr": sp.loguniform(1e-4, 1),
    "act": sp.grid_search(["relu", "gelu"]),
    "deep": {"layers": sp.grid_search([1, 2, 3]), "p": sp.uniform(0, 1)},
    "double": sp.sample_from(lambda spec: spec.config.lr * 2),
    "kept": 7,
}


def ready(searcher: Searcher, space: Mapping[str, Any] = SPACE, num_samples: int = 1) -> Searcher:
    searcher.set_search_properties(None, None, space)
    searcher.set_num_samples(num_samples)
    return searcher


def take(searcher: Searcher, most: int = 1000) -> list[dict[str, Any]]:
    """The suggestions up to FINISHED or ``most``, with every trial ending at once."""
    taken: list[dict[str, Any]] = []
    while len(taken) < most:
        trial = str(len(taken))
        config = searcher.suggest(trial)
        if config == FINISHED:
            break
        assert isinstance(config, dict)
        taken.append(config)
        searcher.on_trial_complete(trial, {"loss": float(len(taken))})
    return taken


class Recorder(Searcher):
    """Suggests 0, 1, 2, ... and keeps the results that it gets."""

    def __init__(self, metric: Any = None, mode: Any = None) -> None:
        super().__init__(metric, mode)
        self.suggested: list[str] = []
        self.reported: list[str] = []
        self.told: list[tuple[str, Any, bool]] = []

    def suggest(self, trial_id: str) -> dict[str, Any]:
        self.suggested.append(trial_id)
        return {"x": len(self.suggested) - 1, "deep": {"list": []}}

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        self.reported.append(trial_id)

    def on_trial_complete(
        self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False
    ) -> None:
        self.told.append((trial_id, result, error))


# --------------------------------------------------------------------------- random draws and grids


@given(
    seed=st.integers(0, 2**64),
    num_samples=st.integers(1, 4),
    points=st.lists(
        st.sampled_from([{}, {"act": "relu"}, {"deep": {"p": 0.5}}, {"lr": 0.1, "act": "tanh"}]), max_size=3
    ),
    is_constant=st.booleans(),
)
def test_the_same_seed_gives_the_same_trials_and_as_many_as_announced(
    seed: int, num_samples: int, points: list[dict[str, Any]], is_constant: bool
) -> None:
    def make() -> Searcher:
        return ready(BasicVariantGenerator(points, 0, is_constant, seed), num_samples=num_samples)

    trials = take(make())
    assert trials == take(make())
    assert len(trials) == make().total_trials()
    assert all(config["double"] == config["lr"] * 2 and config["kept"] == 7 for config in trials)
    assert all(0 <= config["deep"]["p"] <= 1 for config in trials)


@given(st.integers(1, 5), st.integers(0, 1000))
def test_every_sample_is_the_whole_grid(num_samples: int, seed: int) -> None:
    trials = take(ready(BasicVariantGenerator(random_state=seed), num_samples=num_samples))
    pairs = [(config["act"], config["deep"]["layers"]) for config in trials]
    assert pairs == [(act, layers) for act in ("relu", "gelu") for layers in (1, 2, 3)] * num_samples
    assert len({config["lr"] for config in trials}) == len(trials), "drawn anew for each trial"


def test_constant_grid_search_draws_once_for_all_combinations_of_a_grid() -> None:
    space = {**SPACE, "scaled": sp.sample_from(lambda spec: (spec.act, spec.double))}
    trials = take(ready(BasicVariantGenerator(constant_grid_search=True, random_state=1), space, 2))
    for sample in (trials[:6], trials[6:]):
        assert len({(config["lr"], config["deep"]["p"], config["double"]) for config in sample}) == 1
        assert all(config["scaled"] == (config["act"], config["double"]) for config in sample)
    assert trials[0]["lr"] != trials[6]["lr"]


def test_points_come_first_and_each_counts_as_a_sample() -> None:
    points: list[dict[str, Any]] = [
        {"act": "gelu", "deep": {"layers": 9}, "lr": 0.5},
        {"deep": {"layers": 3, "p": 0.25}},
    ]
    trials = take(ready(BasicVariantGenerator(points, random_state=0), num_samples=3))
    assert len(trials) == 1 + 2 + 6
    assert (trials[0]["act"], trials[0]["deep"]["layers"], trials[0]["double"]) == ("gelu", 9, 1.0)
    assert [(t["act"], t["deep"]["layers"], t["deep"]["p"]) for t in trials[1:3]] == [
        ("relu", 3, 0.25),
        ("gelu", 3, 0.25),
    ]


def test_more_points_than_samples_are_all_tried() -> None:
    searcher = ready(BasicVariantGenerator([{"x": 1}, {"x": 2}]), {"x": sp.uniform(0, 9)}, 1)
    assert searcher.total_trials() == 2
    assert take(searcher) == [{"x": 1}, {"x": 2}]


def test_samples_without_end_have_no_total() -> None:
    searcher = ready(BasicVariantGenerator(random_state=0), num_samples=-1)
    assert searcher.total_trials() is None
    assert len(take(searcher, most=50)) == 50


@pytest.mark.parametrize("make", [random.Random, np.random.RandomState, np.random.default_rng])
def test_a_generator_of_numpy_or_random_seeds_the_draws(make: Callable[[int], Any]) -> None:
    first, second, other = (take(ready(BasicVariantGenerator(random_state=make(n)))) for n in (5, 5, 6))
    assert first == second
    assert first != other


def test_without_a_seed_numpys_global_seed_has_its_effect() -> None:
    before = np.random.get_state()
    try:
        drawn = []
        for _ in range(2):
            np.random.seed(11)
            drawn.append([take(ready(BasicVariantGenerator())), take(ready(BasicVariantGenerator()))])
    finally:
        np.random.set_state(before)
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_a_trial_may_change_its_configuration_without_changing_the_next() -> None:
    searcher = ready(BasicVariantGenerator(), {"deep": {"a": 1}}, 2)
    first = searcher.suggest("a")
    assert isinstance(first, dict)
    first["deep"]["a"] = 2
    assert searcher.suggest("b") == {"deep": {"a": 1}}


def test_no_more_than_max_concurrent_draws_are_live() -> None:
    searcher = ready(BasicVariantGenerator(max_concurrent=2), num_samples=3)
    assert [isinstance(searcher.suggest(trial), dict) for trial in "abc"] == [True, True, False]
    searcher.on_trial_complete("a")
    assert isinstance(searcher.suggest("c"), dict)
    assert searcher.suggest("d") is None


@pytest.mark.parametrize(
    "wrap",
    [
        lambda searcher: searcher,
        lambda searcher: ConcurrencyLimiter(searcher, 1),
        lambda searcher: Repeater(searcher, 2),
        lambda searcher: ConcurrencyLimiter(Repeater(searcher, 2), 1, batch=True),
    ],
)
def test_a_pickled_searcher_begins_anew_with_the_same_suggestions(
    wrap: Callable[[Searcher], Searcher],
) -> None:
    searcher = ready(wrap(BasicVariantGenerator()), num_samples=2)
    expected = take(searcher)
    assert len(expected) == searcher.total_trials()
    space = {key: value for key, value in SPACE.items() if key != "double"}  # a lambda needs cloudpickle
    ready(searcher, space, 2)
    for config in expected:
        del config["double"]
    searcher.suggest("one that is running")
    assert take(pickle.loads(pickle.dumps(searcher))) == expected
    assert take(copy.deepcopy(searcher)) == expected


def test_what_was_drawn_is_known_by_path_until_the_trial_ends() -> None:
    repeater = ready(Repeater(BasicVariantGenerator([{"deep": {"layers": 9}}]), 2))
    limiter = ConcurrencyLimiter(repeater, 5)
    configs = [config for config in map(limiter.suggest, "ab") if isinstance(config, dict)]
    for index, (trial, config) in enumerate(zip("ab", configs, strict=True)):
        assert limiter.drawn_values(trial) == {
            "lr": config["lr"],
            "act": "relu",
            "deep/layers": 9,
            "deep/p": config["deep"]["p"],
            "double": config["lr"] * 2,
            TRIAL_INDEX: index,
        }
    limiter.on_trial_complete("a", {})
    assert limiter.drawn_values("a") == {}


# --------------------------------------------------------------------------- limits and repetitions


@given(
    ends=st.lists(st.integers(0, 20), max_size=60),
    limit=st.integers(1, 4),
    is_batch=st.booleans(),
)
def test_the_limiter_never_has_more_live_trials_than_its_limit(
    ends: list[int], limit: int, is_batch: bool
) -> None:
    inner = Recorder("loss", "min")
    limiter, live, number = ConcurrencyLimiter(inner, limit, is_batch), [], 0
    for end in ends:
        while isinstance(limiter.suggest(str(number)), dict):
            live.append(str(number))
            number += 1
        assert len(live) <= limit
        assert live, "it would wait for ever"
        trial = live.pop(end % len(live))
        limiter.on_trial_result(trial, {"loss": 0.0})
        limiter.on_trial_complete(trial, {"loss": 0.0}, error=end == 3)
    told = [trial for trial, _, _ in inner.told]
    assert len(set(told)) == len(told)
    assert len(inner.reported) == len(ends)
    assert not set(told) & set(live)
    assert len(told) == len(ends) // limit * limit if is_batch else len(told) == len(ends)


def test_a_batch_reaches_the_searcher_in_the_order_of_its_ends_once_all_have_ended() -> None:
    inner = Recorder("loss", "min")
    limiter = ConcurrencyLimiter(inner, 3, batch=True)
    for trial in "abc":
        limiter.suggest(trial)
    limiter.on_trial_complete("c", {"loss": 3.0})
    limiter.on_trial_complete("a", None, error=True)
    assert inner.told == []
    assert limiter.suggest("d") is None, "ended trials count until the batch is over"
    limiter.on_trial_complete("b", {"loss": 2.0})
    assert inner.told == [("c", {"loss": 3.0}, False), ("a", None, True), ("b", {"loss": 2.0}, False)]
    assert isinstance(limiter.suggest("d"), dict)


def test_a_limiter_around_a_limiter_sets_the_limit_of_the_inner_one() -> None:
    limiter = ConcurrencyLimiter(ConcurrencyLimiter(Recorder(), 5), 2)
    assert [isinstance(limiter.suggest(trial), dict) for trial in "abc"] == [True, True, False]
    limiter.on_trial_complete("b", {})
    assert isinstance(limiter.suggest("c"), dict)


@given(st.integers(1, 4), st.lists(st.floats(-1e6, 1e6), min_size=4, max_size=4))
def test_the_searcher_gets_the_mean_of_a_group(repeat: int, losses: list[float]) -> None:
    inner = Recorder("loss", "min")
    repeater = Repeater(inner, repeat)
    configs = [repeater.suggest(str(number)) for number in range(repeat)]
    assert [config[TRIAL_INDEX] for config in configs if isinstance(config, dict)] == list(range(repeat))
    for number in reversed(range(repeat)):
        assert inner.told == []
        repeater.on_trial_complete(str(number), {"loss": losses[number]})
    [(trial, result, error)] = inner.told
    assert (trial, error, inner.suggested) == ("0", False, ["0"])
    assert result["loss"] == pytest.approx(sum(losses[:repeat]) / repeat)
    assert isinstance(repeater.suggest("next"), dict)
    assert inner.suggested == ["0", "next"]


def test_trials_that_failed_are_left_out_of_the_mean() -> None:
    inner = Recorder(["loss", "eval/acc"], ["min", "max"])
    repeater = Repeater(inner, 3, set_index=False)
    for trial in "abcdef":
        config = repeater.suggest(trial)
        assert isinstance(config, dict)
        assert TRIAL_INDEX not in config
        config["deep"]["list"].append(trial)
        assert config["deep"]["list"] == [trial], "a group shares no values"
    repeater.on_trial_complete("a", {"loss": 1.0, "eval": {"acc": 0.5}})
    repeater.on_trial_complete("b", {"loss": 9.0}, error=True)
    repeater.on_trial_complete("b", {"loss": 9.0})
    repeater.on_trial_complete("c", {"loss": 3.0, "eval": {"acc": float("nan")}})
    for trial in "def":
        repeater.on_trial_complete(trial, None, error=True)
    assert inner.told == [("a", {"loss": 2.0, "eval/acc": 0.5}, False), ("d", None, True)]


def test_num_samples_counts_the_repetitions(caplog: pytest.LogCaptureFixture) -> None:
    repeater = ready(Repeater(BasicVariantGenerator(), 2), {"x": sp.uniform(0, 1)}, 6)
    assert repeater.total_trials() == 6
    configs = take(repeater)
    assert [config["x"] for config in configs[::2]] == [config["x"] for config in configs[1::2]]
    assert len({config["x"] for config in configs}) == 3
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "powertrain"):
        repeater.set_num_samples(5)
    assert "num_samples=5 is not a multiple of Repeater(repeat=2)" in caplog.text


def test_limits_and_repetitions_work_around_a_study() -> None:
    inner = OptunaSearch(metric="loss", mode="min", seed=0)
    searcher = ready(ConcurrencyLimiter(Repeater(inner, 2), 4, batch=True), {"x": sp.uniform(0, 1)})
    configs = [config for config in map(searcher.suggest, "abcd") if isinstance(config, dict)]
    values = [config["x"] for config in configs]
    assert values[0] == values[1] != values[2] == values[3]
    assert searcher.suggest("e") is None
    for trial, loss in zip("abcd", (1.0, 3.0, 5.0, 7.0), strict=True):
        searcher.on_trial_complete(trial, {"loss": loss})
    assert inner.study is not None
    assert [trial.value for trial in inner.study.trials] == [2.0, 6.0]


# --------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("search_alg", "space", "metric", "expected"),
    [
        (None, {"x": sp.uniform(0, 1)}, "loss", BasicVariantGenerator),
        ("random", {"x": sp.uniform(0, 1)}, "loss", BasicVariantGenerator),
        ("variant_generator", {}, None, BasicVariantGenerator),
        ("optuna", {"x": sp.uniform(0, 1)}, "loss", OptunaSearch),
        ("Optuna", {"x": sp.uniform(0, 1)}, "loss", OptunaSearch),
        ("auto", {"x": sp.uniform(0, 1)}, "loss", OptunaSearch),
        ("auto", {"x": sp.uniform(0, 1)}, None, BasicVariantGenerator),
        ("auto", {"x": sp.uniform(0, 1), "g": sp.grid_search([1])}, "loss", BasicVariantGenerator),
        ("auto", {"x": sp.sample_from(lambda: 1), "k": 3}, "loss", BasicVariantGenerator),
        ("auto", {}, "loss", BasicVariantGenerator),
    ],
)
def test_a_searcher_is_chosen_by_name_and_space(
    search_alg: Any, space: dict[str, Any], metric: str | None, expected: type
) -> None:
    searcher = search.choose_searcher(search_alg, space, metric, "min" if metric else None, seed=4)
    assert type(searcher) is expected
    assert (searcher.metric, getattr(searcher, "seed", None)) == (metric, 4)
    assert isinstance(searcher.suggest("a"), dict)


def test_auto_is_random_where_optuna_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    space = {"x": sp.uniform(0, 1)}
    assert type(search.choose_searcher("auto", space, "loss", "min")) is BasicVariantGenerator
    with pytest.raises(ConfigError, match=r"pip install 'powertrain\[tune\]'"):
        search.choose_searcher("optuna", space, "loss", "min")


def test_a_given_searcher_takes_metric_mode_and_space() -> None:
    limiter = ConcurrencyLimiter(OptunaSearch(seed=1), 3)
    assert search.choose_searcher(limiter, {"x": sp.uniform(0, 1)}, "loss", "max", seed=9) is limiter
    assert (limiter.metric, limiter.mode, limiter.searcher.metric) == ("loss", "max", "loss")
    assert isinstance(limiter.searcher, OptunaSearch)
    assert limiter.searcher.seed == 1


def test_a_searcher_with_a_space_of_its_own_takes_constants_only() -> None:
    class Stubborn(Recorder):
        def set_search_properties(self, metric: Any, mode: Any, config: Any, **spec: Any) -> bool:
            return False

    assert isinstance(search.choose_searcher(Stubborn(), {"kept": 1}), Stubborn)
    for space in ({"x": sp.uniform(0, 1)}, {"x": sp.grid_search([1])}):
        with pytest.raises(ConfigError, match="Stubborn has a space of its own"):
            search.choose_searcher(Stubborn(), space)


def test_create_searcher_leaves_out_arguments_that_the_class_does_not_have(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "powertrain"):
        searcher = search.create_searcher("optuna", metric="loss", mode="min", seed=3, n_initial_points=5)
    assert isinstance(searcher, OptunaSearch)
    assert (searcher.metric, searcher.mode, searcher.seed) == ("loss", "min", 3)
    assert "without effect here: create_searcher(n_initial_points=...)" in caplog.text


@pytest.mark.parametrize(
    "name",
    ["ax", "bayesopt", "bohb", "hebo", "hyperopt", "nevergrad", "zoopt", "HyperOptSearch", "BlendSearch"],
)
def test_searchers_of_ray_that_are_not_here_are_refused_by_a_sentence_that_names_optuna(name: str) -> None:
    for refuse in (
        lambda: search.choose_searcher(name, {}),
        lambda: search.create_searcher(name, metric="loss"),
        lambda: getattr(search, name),
    ):
        with pytest.raises(ConfigError) as refused:
            refuse()
        message = str(refused.value)
        assert name in message
        assert "use OptunaSearch(" in message
        assert message.count(". ") == 0


def test_import_lines_of_ray_are_answered_by_what_to_import_instead() -> None:
    with pytest.raises(ConfigError, match=r"HyperOptSearch.*use OptunaSearch"):
        exec("from powertrain.tune.search.hyperopt import HyperOptSearch")
    with pytest.raises(ConfigError, match=r"'bohb'.*use OptunaSearch"):
        exec("from powertrain.tune.search import bohb")
    with pytest.raises(ImportError):
        exec("from powertrain.tune.search.hyperopt import nothing_of_this_name")
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = search.nothing
    names: dict[str, Any] = {}
    exec(
        "from powertrain.tune.search.concurrency_limiter import ConcurrencyLimiter\n"
        "from powertrain.tune.search.searcher import Searcher\n"
        "from powertrain.tune.search.repeater import TRIAL_INDEX\n"
        "from powertrain.tune.search.basic_variant import BasicVariantGenerator\n",
        names,
    )
    assert names["ConcurrencyLimiter"] is ConcurrencyLimiter
    assert names["Searcher"] is Searcher


def test_searchers_are_imported_without_optuna_torch_or_pandas() -> None:
    heavy = ("optuna", "torch", "pandas", "matplotlib", "pyarrow")
    program = (
        "import sys; from powertrain.tune.search.optuna import OptunaSearch; import powertrain.tune.search; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_metrics_are_found_by_path_and_only_numbers_count() -> None:
    result = {
        "loss": np.float32(0.5),
        "eval": {"acc": 1, "ok": True},
        "eval/flat": 3,
        "text": "1",
        "nan": float("nan"),
    }
    assert find_number(result, "loss") == 0.5
    assert find_number(result, "eval/acc") == 1.0
    assert find_number(result, "eval/flat") == 3.0
    assert find_number(result, "eval/ok") == 1.0
    for name in ("eval", "eval/none", "text", "nan", "loss/deeper"):
        assert find_number(result, name) is None
    assert find_number(None, "loss") is None


class HyperOptSearch:
    """A class of the name of one of Ray's."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BasicVariantGenerator({"x": 1}), "which is not a list of dicts"),  # type: ignore[arg-type]
        (
            lambda: BasicVariantGenerator(max_concurrent=-1),
            "BasicVariantGenerator(max_concurrent=...) was given -1",
        ),
        (lambda: BasicVariantGenerator(random_state="x"), "random_state='x' is neither"),
        (lambda: BasicVariantGenerator(constant_grid_search=3), "neither True nor False"),  # type: ignore[arg-type]
        (
            lambda: ready(BasicVariantGenerator([{"deep": {"q": 1}}])),
            "points_to_evaluate[0] has the entry 'deep/q'",
        ),
        (lambda: ready(BasicVariantGenerator(), num_samples=-2), "TuneConfig(num_samples=...) was given -2"),
        (
            lambda: ready(BasicVariantGenerator(), {"x": sp.uniform(1, 0)}),
            "'x' of param_space cannot be used",
        ),
        (lambda: BasicVariantGenerator().add_evaluated_point({}, 1.0), "cannot take an evaluated point"),
        (
            lambda: ConcurrencyLimiter(BasicVariantGenerator(), 0),
            "ConcurrencyLimiter(max_concurrent=...) was given 0",
        ),
        (lambda: ConcurrencyLimiter("optuna", 1), "ConcurrencyLimiter(searcher='optuna') is not a Searcher"),  # type: ignore[arg-type]
        (lambda: Repeater(BasicVariantGenerator(), 0), "Repeater(repeat=...) was given 0"),
        (lambda: Recorder("loss", "best"), "'best' is neither 'min' nor 'max'"),
        (lambda: Recorder(["a", "b"], ["min"]), "give one mode for each metric"),
        (lambda: Recorder(["a"], "min"), "give one mode for each metric"),
        (lambda: Recorder("a").set_search_properties("b", "min", {}), "differ. Give it once"),
        (
            lambda: Recorder("a", "max").set_search_properties("a", "min", {}),
            "TuneConfig(mode='min') and Recorder",
        ),
        (
            lambda: ConcurrencyLimiter(Recorder("a", "max"), 1).set_search_properties("b", None, {}),
            "Recorder(metric='a') differ",
        ),
        (lambda: search.choose_searcher("best", {}), "search_alg='best' is not the name of a searcher"),
        (lambda: search.choose_searcher(OptunaSearch, {}), "search_alg=OptunaSearch is a class. Call it"),
        (lambda: search.choose_searcher(3, {}), "search_alg=3 is not a Searcher"),
        (
            lambda: search.choose_searcher(HyperOptSearch(), {}),
            "use OptunaSearch() of powertrain.tune.search",
        ),
        (lambda: search.choose_searcher("optuna", {"x": sp.uniform(0, 1)}), "Set both in TuneConfig"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        make()
    assert message in str(refused.value)
