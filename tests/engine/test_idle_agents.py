"""Agents without a run: which can serve another, each once, and none that ends at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.engine.ray.idle_agents import MOST_OF_NODE, AgentKind, IdleAgents, idle_agents, kind_of

KINDS = [kind_of("01", {}, [], []), kind_of("02", {}, [], [])]
NODES = ["a", "b"]
SECONDS = 60.0
#: Seconds before its end in which an agent is not used any more.
MARGIN = 2.0

keeps = st.tuples(st.just("keep"), st.sampled_from(KINDS), st.sampled_from(NODES), st.just(0.0))
takes = st.tuples(st.just("take"), st.sampled_from(KINDS), st.sampled_from(NODES), st.just(0.0))
waits = st.tuples(st.just("wait"), st.none(), st.none(), st.floats(0.0, 50.0))


@given(st.lists(keeps | takes | waits, max_size=30))
def test_each_agent_serves_once_the_newest_first_and_only_while_it_surely_lives(
    steps: list[tuple[str, Any, Any, float]],
) -> None:
    now, made = 0.0, 0
    resting: list[tuple[AgentKind, str, int, float]] = []
    agents = IdleAgents(lambda: now)
    for verb, kind, node, seconds in steps:
        now += seconds
        if verb == "keep":
            made += 1
            agents.keep(kind, node, made, SECONDS)
            resting.append((kind, node, made, now + SECONDS - MARGIN))
        elif verb == "take":
            usable = [one for one in resting if one[:2] == (kind, node) and one[3] > now]
            expected = usable[-1] if usable else None
            assert agents.take(kind, node) == (expected and expected[2])
            resting = [one for one in resting if one is not expected]


def test_agents_that_have_ended_are_forgotten() -> None:
    now = 0.0
    agents = IdleAgents(lambda: now)
    agents.keep(KINDS[0], "a", "first", 10.0)
    agents.keep(KINDS[1], "b", "second", 20.0)
    now = 12.0
    assert agents.actors() == ["second"]
    agents.take(KINDS[1], "b")
    assert agents.actors() == []


def test_runs_that_need_the_same_agents_have_one_kind() -> None:
    one = kind_of("01", {"env_vars": {"A": "1", "B": "2"}, "working_dir": "gcs://x"}, ["torch"], ["/code"])
    assert one == kind_of(
        "01", {"working_dir": "gcs://x", "env_vars": {"B": "2", "A": "1"}}, ["torch"], ["/code"]
    )


@pytest.mark.parametrize(
    "other",
    [
        lambda: kind_of("02", {}, ["torch"], ["/code"]),
        lambda: kind_of("01", {"env_vars": {"A": "1"}}, ["torch"], ["/code"]),
        lambda: kind_of("01", {}, ["torch", "lightning"], ["/code"]),
        lambda: kind_of("01", {}, ["torch"], ["/other"]),
    ],
    ids=["connection", "runtime_env", "preload", "import_path"],
)
def test_runs_that_differ_have_different_kinds(other: Callable[[], AgentKind]) -> None:
    assert kind_of("01", {}, ["torch"], ["/code"]) != other()


def test_an_agent_that_has_ended_early_is_forgotten_and_the_others_stay() -> None:
    agents = IdleAgents(lambda: 0.0)
    gone = agents.keep(KINDS[0], "a", "first", SECONDS)
    agents.keep(KINDS[0], "a", "second", SECONDS)
    agents.forget(gone)
    agents.forget(gone)
    assert agents.actors() == ["second"]


def test_the_oldest_agents_of_a_node_beyond_a_few_are_given_up() -> None:
    agents = IdleAgents(lambda: 0.0)
    for number in range(MOST_OF_NODE + 2):
        agents.keep(KINDS[number % 2], "a", number, SECONDS)
    agents.keep(KINDS[0], "b", "other", SECONDS)
    assert agents.take_surplus("a") == [0, 1]
    assert agents.take_surplus("a") == []
    assert agents.actors() == [*range(2, MOST_OF_NODE + 2), "other"]


def test_a_fork_of_the_driver_uses_none_of_its_agents() -> None:
    kept = idle_agents.keep(KINDS[0], "a", "actor", SECONDS)
    try:
        child = os.fork()
        if child == 0:
            os._exit(0 if idle_agents.take(KINDS[0], "a") is None else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert idle_agents.take(KINDS[0], "a") == "actor"
    finally:
        idle_agents.forget(kept)
