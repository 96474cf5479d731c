"""Where the time of a run went, and what its charts mark."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.recorded_run import EVENTFUL, RAISED, at, attempt

from powertrain.diagnosis.goodput import goodput as shares_of
from powertrain.run import events as ev
from powertrain.views.history import CAUSES, goodput, happenings, marks, spans

START = ev.RunStarted(time=at(0), name="run", lease=1, host="h", pid=1, version="0", engine="local")


def seconds(facts: list[ev.Event], until: float = 0.0) -> dict[str, float]:
    return {one["cause"]: round(one["seconds"], 6) for one in goodput(spans(facts, until))}


def test_the_time_of_a_run_is_divided_by_cause() -> None:
    end = ev.Ended(time=at(11), state="finished", reason="")
    found = seconds([START, *EVENTFUL, end])
    assert sum(found.values()) == pytest.approx(110.0)
    # Facts that are out of order take no time, and without a commit it is not known what was done again.
    assert found == {"training": 100.0, "startup": 3.0, "queue": 5.0, "recovery": 1.0, "resize": 1.0}


def test_reports_and_saves_are_no_training() -> None:
    facts: list[ev.Event] = [START, attempt(0, 1, 1), ev.TrainingStarted(time=at(2), attempt=0)]
    parts = spans(facts, at(12))
    shares = {one["cause"]: one["seconds"] for one in goodput(parts, reporting=0.25)}
    assert (shares["training"], shares["save"]) == (75.0, 25.0)
    assert [one.cause for one in shares_of(parts, reporting=2.0)] == ["startup", "queue", "save"]


def test_training_after_the_checkpoint_that_a_restart_goes_back_to_is_redone() -> None:
    facts: list[ev.Event] = [
        START,
        ev.AttemptStarted(time=at(0), attempt=0, world_size=1, first_row=1),
        ev.TrainingStarted(time=at(0), attempt=0),
        ev.Committed(time=at(4), attempt=0, row=4, checkpoint="c4"),
        ev.Failed(time=at(7), attempt=0, failures=(RAISED,), decision="retry", reason=""),
        ev.AttemptStarted(time=at(8), attempt=1, world_size=1, first_row=5),
        ev.TrainingStarted(time=at(9), attempt=1),
        ev.Ended(time=at(12), state="finished", reason=""),
    ]
    assert seconds(facts) == {"training": 70.0, "redone": 30.0, "startup": 10.0, "recovery": 10.0}


def test_without_a_checkpoint_all_training_is_redone() -> None:
    facts: list[ev.Event] = [
        START,
        ev.AttemptStarted(time=at(0), attempt=0, world_size=1, first_row=1),
        ev.TrainingStarted(time=at(0), attempt=0),
        ev.Failed(time=at(7), attempt=0, failures=(RAISED,), decision="retry", reason=""),
        ev.AttemptStarted(time=at(7), attempt=1, world_size=1, first_row=1),
        ev.TrainingStarted(time=at(7), attempt=1),
    ]
    assert seconds(facts, at(9)) == {"training": 20.0, "redone": 70.0}


def test_a_hang_counts_from_where_progress_ended() -> None:
    hang = ev.HangNoticed(
        time=at(5), attempt=0, row=1, ranks=(0,), waiting=(1,), seconds=20.0, message="rank 0 hangs"
    )
    facts: list[ev.Event] = [
        START,
        ev.AttemptStarted(time=at(0), attempt=0, world_size=2, first_row=1),
        ev.TrainingStarted(time=at(0), attempt=0),
        hang,
        ev.HangOver(time=at(6), attempt=0, seconds=30.0),
    ]
    assert seconds(facts, at(8)) == {"training": 50.0, "hang": 30.0}
    assert [(one["kind"], one["row"]) for one in marks(facts)] == [("hang", 1)]


def test_time_between_two_starts_of_a_run_is_nobodys() -> None:
    again = ev.RunStarted(time=at(100), name="run", lease=2, host="h", pid=1, version="0", engine="local")
    facts: list[ev.Event] = [START, attempt(0, 1, 1), ev.TrainingStarted(time=at(1), attempt=0)]
    facts += [ev.Committed(time=at(3), attempt=0, row=2, checkpoint="c"), again]
    assert sum(seconds(facts, at(101)).values()) == pytest.approx(30.0 + 10.0)


FACTS = st.sampled_from(
    [
        lambda t: ev.RunStarted(time=t, name="r", lease=1, host="h", pid=1, version="0", engine="local"),
        lambda t: ev.SlotsRequested(time=t, attempt=0, count=1),
        lambda t: ev.SlotsWaited(time=t, attempt=0, granted=0, count=1, reason="GPUs"),
        lambda t: ev.AttemptStarted(time=t, attempt=1, world_size=2, first_row=3),
        lambda t: ev.TrainingStarted(time=t, attempt=0),
        lambda t: ev.Committed(time=t, attempt=0, row=2, checkpoint="c"),
        lambda t: ev.Failed(time=t, attempt=0, failures=(), decision="retry", reason="r"),
        lambda t: ev.Lost(time=t, attempt=0, ranks=(0,), decision="retry", reason="r"),
        lambda t: ev.HangNoticed(time=t, attempt=0, row=1, ranks=(), waiting=(), seconds=9.0, message=""),
        lambda t: ev.HangOver(time=t, attempt=0, seconds=1.0),
        lambda t: ev.Ended(time=t, state="finished", reason=""),
    ]
)


@given(st.lists(st.tuples(FACTS, st.floats(0, 1000)), max_size=30), st.floats(0, 2000))
def test_spans_of_any_journal_follow_each_other_and_their_shares_add_up(made: list, until: float) -> None:  # type: ignore[type-arg]
    facts = [make(time) for make, time in made]
    found = spans(facts, until)
    assert all(span.cause in CAUSES and span.seconds > 0 for span in found)
    assert all(before.end <= after.begin + 1e-6 for before, after in itertools.pairwise(found))
    if found:
        assert sum(one["share"] for one in goodput(found)) == pytest.approx(1.0)
    marks(facts)
    happenings(facts)
