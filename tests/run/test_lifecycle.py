from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.run import events as ev
from powertrain.run import lifecycle as lc
from powertrain.run.lifecycle import RunState, apply
from powertrain.run.record.journal import Journal, read, replay
from powertrain.storage import open_storage

_MAKERS: dict[type[ev.Event], Callable[[int], ev.Event]] = {
    ev.RunStarted: lambda n: ev.RunStarted(
        time=0.0, name="run", lease=n, host="h", pid=1, version="0", engine="local"
    ),
    ev.SlotsRequested: lambda n: ev.SlotsRequested(time=0.0, attempt=n, count=2),
    ev.SlotsWaited: lambda n: ev.SlotsWaited(time=0.0, attempt=n, granted=1, count=2, reason="busy"),
    ev.AttemptStarted: lambda n: ev.AttemptStarted(time=0.0, attempt=n, world_size=2, first_row=n + 1),
    ev.WorkerStarted: lambda n: ev.WorkerStarted(time=0.0, attempt=n, rank=0, pid=1, host="h"),
    ev.StartupMeasured: lambda n: ev.StartupMeasured(time=0.0, attempt=n, rank=0, phase="fork", seconds=0.1),
    ev.TrainingStarted: lambda n: ev.TrainingStarted(time=0.0, attempt=n),
    ev.RanksAbsent: lambda n: ev.RanksAbsent(time=0.0, attempt=n, row=1, ranks=(1,)),
    ev.Committed: lambda n: ev.Committed(time=0.0, attempt=n, row=n, checkpoint=f"checkpoint_{n:06d}"),
    ev.UploadLagged: lambda n: ev.UploadLagged(
        time=0.0, attempt=n, row=1, seconds=10.0, waiting=1, bytes=5, reason="503"
    ),
    ev.CheckpointFailed: lambda n: ev.CheckpointFailed(
        time=0.0, attempt=n, row=1, checkpoint="checkpoint_000001", reason="disk full"
    ),
    ev.ValidationEnded: lambda n: ev.ValidationEnded(
        time=0.0, checkpoint="checkpoint_000001", row=1, status="VALIDATED", metrics={"accuracy": 1.0}
    ),
    ev.Stopping: lambda n: ev.Stopping(time=0.0, attempt=n, cause="interrupt", reason="ctrl-c"),
    ev.Failed: lambda n: ev.Failed(
        time=0.0,
        attempt=n,
        failures=(ev.WorkerFailure(rank=0, kind="raised", summary="rank 0 raised"),),
        decision="retry",
        reason="retry 1 of 3",
    ),
    ev.Lost: lambda n: ev.Lost(time=0.0, attempt=n, ranks=(0,), decision="retry", reason="node gone"),
    ev.Resized: lambda n: ev.Resized(time=0.0, attempt=n, world_size=4, reason="more slots"),
    ev.Notified: lambda n: ev.Notified(time=0.0, attempt=n, ranks=(1,), reason="SIGTERM", deadline=30.0),
    ev.HangNoticed: lambda n: ev.HangNoticed(
        time=0.0, attempt=n, row=1, ranks=(1,), waiting=(0,), seconds=6.0, message="rank 1 never came"
    ),
    ev.HangOver: lambda n: ev.HangOver(time=0.0, attempt=n, seconds=9.0, ranks=(1,)),
    ev.Warned: lambda n: ev.Warned(time=0.0, message="look"),
    ev.Informed: lambda n: ev.Informed(time=0.0, message="look"),
}


def every_fact(number: int) -> list[ev.Event]:
    endings: list[ev.Event] = [ev.Ended(time=0.0, state=state, reason="end") for state in sorted(lc.ENDED)]
    return [maker(number) for maker in _MAKERS.values()] + endings


def is_legal(run: RunState, event: ev.Event) -> bool:
    try:
        apply(run, event)
    except lc.IllegalTransition:
        return False
    return True


@st.composite
def legal_journals(draw: st.DrawFn) -> list[ev.Event]:
    """A walk through the table: at each step any fact that is legal there."""
    run, journal = RunState(), []
    for number in range(draw(st.integers(0, 25))):
        event = draw(st.sampled_from([event for event in every_fact(number) if is_legal(run, event)]))
        journal.append(event)
        run = apply(run, event)
    return journal


any_journals = st.lists(st.integers(0, 5).flatmap(lambda n: st.sampled_from(every_fact(n))), max_size=25)


def test_every_kind_of_fact_is_made_here() -> None:
    assert {type(event) for event in every_fact(0)} == set(ev.Event.__args__)  # type: ignore[attr-defined]


@given(legal_journals(), st.data())
def test_any_prefix_of_a_legal_journal_replays_whole(journal: list[ev.Event], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(journal)))
    run = RunState()
    for event in journal[:cut]:
        run = apply(run, event)
    assert replay(journal[:cut]) == run
    assert run.facts == cut
    assert run.state in lc.STATES


@given(any_journals)
def test_a_new_start_is_legal_after_anything(journal: list[ev.Event]) -> None:
    again = apply(replay(journal), _MAKERS[ev.RunStarted](9))
    assert again.state == lc.WAITING
    assert again.lease == 9
    assert again.failures == 0


@given(any_journals)
def test_replay_of_any_facts_never_fails_and_counts_what_it_used(journal: list[ev.Event]) -> None:
    run = replay(journal)
    assert 0 <= run.facts <= len(journal)
    assert run.state in lc.STATES


@given(legal_journals(), st.data())
def test_a_journal_cut_anywhere_replays_up_to_the_cut(
    tmp_path_factory: pytest.TempPathFactory, journal: list[ev.Event], data: st.DataObject
) -> None:
    storage = open_storage(Path(tmp_path_factory.mktemp("cut")))
    writer = Journal(storage, 1)
    for event in journal:
        writer.append(event)
    writer.close()
    path = storage.local_path("journal/0001-000001.jsonl")
    assert path is not None
    content = path.read_bytes()
    kept = content[: data.draw(st.integers(0, len(content)))]
    path.write_bytes(kept)
    whole_lines = kept.count(b"\n") + (not kept.endswith(b"\n") and is_whole(kept.rpartition(b"\n")[2]))
    assert read(storage) == journal[:whole_lines]
    assert replay(read(storage)) == replay(journal[:whole_lines])


def is_whole(line: bytes) -> bool:
    """Cut exactly before the line end, the fact is whole."""
    return line.endswith(b"}") and line.count(b"{") == line.count(b"}")


@given(legal_journals())
def test_facts_survive_encoding(journal: list[ev.Event]) -> None:
    assert [ev.decode(ev.encode(event)) for event in journal] == journal


def test_an_ended_run_takes_no_fact_that_would_revive_it_but_a_start() -> None:
    for state in lc.ENDED:
        run = RunState(state=state)
        reviving = [
            event for event in every_fact(1) if is_legal(run, event) and apply(run, event).state != state
        ]
        assert [type(event) for event in reviving] == [ev.RunStarted]


def test_every_state_but_new_can_end() -> None:
    for state in set(lc.STATES) - {lc.NEW} - lc.ENDED:
        assert any(
            is_legal(RunState(state=state), event) for event in every_fact(0) if isinstance(event, ev.Ended)
        )


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 10)), max_size=6),
    st.integers(0, 5),
    st.integers(1, 12),
)
def test_a_row_is_live_until_a_later_attempt_begins_at_or_before_it(
    branches: list[tuple[int, int]], attempt: int, row: int
) -> None:
    run = RunState(branches=tuple(lc.Branch(a, first) for a, first in branches))
    overtaken = [first for later, first in branches if later > attempt and first <= row]
    assert run.is_live(attempt, row) == (not overtaken)
