"""A rank's record of its own start: durations by one clock, reported once."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from powertrain.wire.from_worker import FirstStep
from powertrain.worker.progress import Progress
from powertrain.worker.startup import StartupStamps, first_loaded, most_loaded


class Noted:
    """A rank's start at times of a clock of its own."""

    def __init__(self) -> None:
        self.now = 10.0
        self.told: list[FirstStep] = []
        self.progress = Progress()
        self.progress.startup = StartupStamps(lambda: self.now)
        self.startup = self.progress.startup
        self.startup.begin(self.told.append)

    def takes(self, seconds: float) -> None:
        self.now += seconds


def parts(told: FirstStep) -> tuple[float, float, float, float]:
    return told.function, told.setup, told.data, told.step


def test_the_first_optimizer_step_ends_the_start_and_nothing_is_reported_after_it() -> None:
    rank = Noted()
    rank.takes(1.0)
    rank.startup.loaded()
    rank.takes(2.0)
    with rank.startup.waiting():
        rank.takes(4.0)
    rank.progress.batch()
    rank.takes(8.0)
    rank.progress.step()
    rank.progress.step()
    rank.progress.report()
    rank.startup.over()
    (told,) = rank.told
    assert parts(told) == (1.0, 2.0, 4.0, 8.0)
    assert told.stepped


def test_a_report_is_a_first_step_as_well() -> None:
    rank = Noted()
    rank.startup.loaded()
    rank.takes(3.0)
    rank.progress.report()
    assert [parts(told) for told in rank.told] == [(0.0, 0.0, 0.0, 3.0)]


def test_a_function_that_ends_without_a_step_says_so() -> None:
    rank = Noted()
    rank.startup.loaded()
    rank.takes(3.0)
    rank.startup.over()
    (told,) = rank.told
    assert (told.stepped, told.step) == (False, 3.0)


def test_waits_within_waits_count_once_and_those_after_the_first_batch_not_at_all() -> None:
    rank = Noted()
    rank.startup.loaded()
    with rank.startup.waiting():
        rank.takes(1.0)
        with rank.startup.waiting():
            rank.takes(2.0)
    rank.takes(0.5)
    with rank.startup.waiting():
        rank.takes(4.0)
    rank.progress.batch()
    with rank.startup.waiting():
        rank.takes(8.0)
    rank.startup.wait_ended()  # of a wait that began before it was noted
    rank.progress.step()
    assert [parts(told) for told in rank.told] == [(0.0, 0.5, 7.0, 8.0)]


def test_a_function_that_fails_while_it_waits_for_data_has_waited_until_then() -> None:
    rank = Noted()
    rank.startup.loaded()
    rank.startup.wait_began()
    rank.takes(5.0)
    rank.startup.over()
    assert [parts(told) for told in rank.told] == [(0.0, 0.0, 5.0, 0.0)]


def test_a_rank_that_did_not_get_its_training_function_reports_nothing() -> None:
    progress = Progress()
    assert not progress.startup.is_noted
    progress.batch()
    progress.step()
    progress.report()
    progress.startup.over()


actions = st.sampled_from(["load", "wait", "go on", "batch", "step", "report"])


@given(st.lists(st.tuples(actions, st.floats(0, 100))))
@example([("wait", 1.8833505899610685), ("load", 18.875072565417195), ("load", 99.13619464387442)])
def test_in_whatever_order_things_happen_the_parts_add_up_to_the_time_it_took(
    happened: list[tuple[str, float]],
) -> None:
    rank = Noted()
    rank.startup.loaded()
    for action, seconds in happened:
        rank.takes(seconds)
        if rank.told:
            break
        {
            "load": lambda: None,
            "wait": rank.startup.wait_began,
            "go on": rank.startup.wait_ended,
            "batch": rank.progress.batch,
            "step": rank.progress.step,
            "report": rank.progress.report,
        }[action]()
        if rank.told:
            break
    rank.startup.over()
    (told,) = rank.told
    assert min(parts(told)) >= 0
    assert sum(parts(told)) == pytest.approx(rank.now - 10.0)


def test_a_function_that_imports_much_before_its_first_step_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seconds, count, expected in ((2.0, 350, "large"), (2.0, 20, ""), (0.5, 350, "")):
        rank = Noted()
        rank.startup.loaded()
        with monkeypatch.context() as imports:
            for number in range(count):
                imports.setitem(sys.modules, f"large.module_{number}", pytest)
            rank.takes(seconds)
            rank.progress.report()
        assert rank.told[0].imported == expected


def test_a_package_is_named_rather_than_those_that_it_loads() -> None:
    modules = [
        "logging2",
        "outer.trainer",
        "outer.models",
        *(f"inner.module_{n}" for n in range(30)),
        "outer.last",
    ]
    assert first_loaded(modules) == "outer"
    assert first_loaded(["a"]) == "a"
    assert first_loaded([]) == ""


def test_a_slow_load_names_the_package_of_most_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Noted()
    for name in ("large", "large.models", "large.models.one", "small"):
        monkeypatch.setitem(sys.modules, name, pytest)
    rank.takes(2.0)
    rank.startup.loaded()
    rank.progress.report()
    assert rank.told[0].loaded == "large"
    assert most_loaded([]) == ""
