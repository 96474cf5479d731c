"""Search spaces: what is drawn lies where it should, and a bad entry is named."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.errors import ConfigError
from powertrain.tune import space as sp

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False).map(lambda x: round(x, 3))
SEEDS = st.integers(0, 2**32)


@given(st.tuples(NUMBERS, NUMBERS).filter(lambda pair: pair[0] < pair[1]), SEEDS)
def test_a_uniform_value_lies_between_its_bounds(bounds: tuple[float, float], seed: int) -> None:
    assert bounds[0] <= sp.uniform(*bounds).sample(random.Random(seed)) <= bounds[1]


@given(st.floats(1e-8, 1.0), st.floats(1.001, 1e6), SEEDS)
def test_a_loguniform_value_lies_between_its_bounds(lower: float, factor: float, seed: int) -> None:
    assert lower <= sp.loguniform(lower, lower * factor).sample(random.Random(seed)) <= lower * factor


@given(st.integers(-1000, 1000), st.integers(1, 1000), st.sampled_from([0.1, 0.25, 0.5, 2.0]), SEEDS)
def test_a_quantized_value_is_a_multiple_within_the_bounds(
    lower: int, width: int, q: float, seed: int
) -> None:
    domain = sp.quniform(lower / 10, (lower + width * 10) / 10 + q, q)
    value = domain.sample(random.Random(seed))
    assert domain.lower <= value <= domain.upper
    assert abs(value / q - round(value / q)) < 1e-6


@given(st.integers(-1000, 1000), st.integers(1, 1000), SEEDS)
def test_randint_leaves_its_upper_bound_out_and_qrandint_does_not(lower: int, width: int, seed: int) -> None:
    rng = random.Random(seed)
    assert lower <= sp.randint(lower, lower + width).sample(rng) < lower + width
    assert lower <= sp.qrandint(lower, lower + width).sample(rng) <= lower + width


@given(st.integers(1, 1000), st.integers(2, 1000), st.integers(1, 7), SEEDS)
def test_logarithmic_integers_keep_to_bounds_and_steps(lower: int, width: int, q: int, seed: int) -> None:
    rng = random.Random(seed)
    assert lower <= sp.lograndint(lower, lower + width).sample(rng) < lower + width
    value = sp.qlograndint(lower, lower + width + q, q).sample(rng)
    assert value % q == 0
    assert lower <= value <= lower + width + q


def test_every_integer_and_category_is_drawn() -> None:
    rng = random.Random(0)
    assert {sp.randint(0, 4).sample(rng) for _ in range(200)} == {0, 1, 2, 3}
    assert {sp.lograndint(1, 5).sample(rng) for _ in range(400)} == {1, 2, 3, 4}
    assert {
        sp.choice("abc").sample(rng) if False else sp.choice(["a", "b"]).sample(rng) for _ in range(50)
    } == {
        "a",
        "b",
    }


def test_the_same_seed_gives_the_same_configurations() -> None:
    space = {"lr": sp.loguniform(1e-4, 1e-1), "deep": {"width": sp.randint(1, 9)}, "noise": sp.randn()}
    one, two = ([sp.resolve(space, rng) for _ in range(5)] for rng in (random.Random(7), random.Random(7)))
    assert one == two
    assert one[0] != one[1]


def test_a_configuration_can_be_changed_without_changing_the_space() -> None:
    space = {"model": {"layers": [1, 2], "width": 3}}
    config = sp.resolve(space, random.Random(0))
    config["model"]["width"] = 9
    assert space["model"]["width"] == 3


def test_a_function_sees_other_entries_whatever_the_order() -> None:
    space = {
        "half": sp.sample_from(lambda spec: spec.config.twice / 4),
        "twice": sp.sample_from(lambda spec: spec["x"] * 2),
        "x": sp.choice([8]),
        "deep": {"y": sp.sample_from(lambda spec: spec.config.deep.z + 1), "z": 1},
        "constant": sp.sample_from(lambda: 5),
        "conditional": sp.sample_from(lambda spec: sp.uniform(1, 2) if spec.x > 4 else None),
    }
    config = sp.resolve(space, random.Random(0))
    assert (config["x"], config["twice"], config["half"], config["constant"]) == (8, 16, 4.0, 5)
    assert config["deep"] == {"y": 2, "z": 1}
    assert 1 <= config["conditional"] <= 2


def test_grids_give_every_combination_in_order() -> None:
    space = {"a": sp.grid_search([1, 2]), "deep": {"b": {"grid_search": ["x", "y"]}}, "c": 3}
    points = sp.grid_points(space)
    configs = [sp.resolve(space, random.Random(0), point) for point in points]
    assert [(c["a"], c["deep"]["b"], c["c"]) for c in configs] == [
        (1, "x", 3),
        (1, "y", 3),
        (2, "x", 3),
        (2, "y", 3),
    ]
    assert sp.grid_points({"a": 1}) == [{}]


#: A value that a checker of types would refuse.
TEXT: Any = "a"
BAD: list[tuple[Any, str]] = [
    ([1], "is not a dict"),
    ({"lr": sp.uniform(2, 1)}, "'lr' of param_space cannot be used: lower=2 is not below upper=1"),
    (
        {"opt": {"lr": sp.loguniform(0, 1)}},
        "'opt/lr' of param_space cannot be used: lower=0 must be greater than 0",
    ),
    ({"lr": sp.uniform(TEXT, 1)}, "must be finite numbers"),
    ({"lr": sp.uniform(0, float("inf"))}, "must be finite numbers"),
    ({"lr": sp.quniform(0, 1, 0)}, "q=0 must be a number greater than 0"),
    ({"lr": sp.quniform(0.11, 0.19, 0.1)}, "no multiple of q=0.1"),
    ({"n": sp.randint(3, 3)}, "is not below"),
    ({"n": sp.qrandint(1, 4, 5)}, "no multiple of q=5"),
    ({"n": sp.qrandint(1, 4, 1.5)}, "q=1.5 must be a whole number"),  # type: ignore[arg-type]
    ({"s": sp.randn(0, 0)}, "sd=0 must be greater than 0"),
    ({"c": sp.choice([])}, "choice has no values"),
    ({"c": sp.choice("abc")}, "choice takes a list of values"),
    ({"g": sp.grid_search([])}, "grid_search has no values"),
    ({"g": sp.grid_search(4)}, "grid_search takes a list of values"),  # type: ignore[arg-type]
    ({"f": sp.sample_from(3)}, "sample_from takes a function"),  # type: ignore[arg-type]
    ({"l": [sp.uniform(0, 1)]}, "distributions in a list are not drawn"),
    ({3: sp.uniform(0, 1)}, "the key is not a string"),
    ({"u": sp.Float}, "Float is a class"),
]


@pytest.mark.parametrize(("space", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_a_bad_entry_is_named(space: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        sp.check_space(space)
    assert message in str(refused.value)


def test_functions_that_wait_for_each_other_or_fail_are_named() -> None:
    circle = {"a": sp.sample_from(lambda s: s.b), "b": sp.sample_from(lambda s: s.a)}
    with pytest.raises(ConfigError, match="'a', 'b' of param_space: the function of sample_from asks for"):
        sp.resolve(circle, random.Random(0))
    with pytest.raises(
        ConfigError, match="'a' of param_space: the function of sample_from failed: ZeroDivisionError"
    ):
        sp.resolve({"a": sp.sample_from(lambda s: 1 / 0)}, random.Random(0))


def test_points_to_evaluate_replace_entries_by_constants() -> None:
    space = {"lr": sp.uniform(0, 1), "deep": {"a": sp.uniform(0, 1), "b": 2}}
    assert sp.resolve(sp.with_values(space, {"lr": 0.5, "deep": {"a": 0.25}}), random.Random(0)) == {
        "lr": 0.5,
        "deep": {"a": 0.25, "b": 2},
    }
