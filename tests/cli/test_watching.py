"""Watching a run by its journal: facts as they are appended, and whether it is over."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from powertrain.lookup.finding import FoundRun
from powertrain.lookup.watching import RunWatch
from powertrain.run import events as ev
from powertrain.run.record.journal import Journal
from powertrain.run.remote.protocol import Card, LiveRun
from powertrain.storage import Storage, open_storage


@pytest.fixture
def place(tmp_path: Path) -> Storage:
    return open_storage(tmp_path / "run")


def started(lease: int = 1, pid: int = 0, host: str = "") -> ev.RunStarted:
    return ev.RunStarted(
        time=time.time(),
        name="run",
        lease=lease,
        host=host or socket.gethostname(),
        pid=pid or os.getpid(),
        version="0",
        engine="local",
    )


def ended(state: str = "stopped") -> ev.Ended:
    return ev.Ended(time=2.0, state=state, reason="it was enough", seconds=61.0)


def names(facts: list[Any]) -> list[str]:
    return [type(fact).__name__ for fact in facts]


def test_each_fact_is_seen_once_and_only_when_it_is_whole(place: Storage) -> None:
    journal, watch = Journal(place, 1), RunWatch(FoundRun("run", place))
    journal.append(started())
    assert names(watch.look()) == ["RunStarted"]
    path = place.local_path("journal/0001-000001.jsonl")
    assert path is not None
    line = ev.encode(ended()) + b"\n"
    with path.open("ab", buffering=0) as file:
        file.write(line[:10])
        assert names(watch.look()) == []
        assert not watch.is_over
        file.write(line[10:])
    assert names(watch.look()) == ["Ended"]
    assert watch.is_over
    assert watch.ending() == "The run 'run' was stopped after 1 min 01 s: it was enough."
    journal.close()


def test_a_run_whose_process_is_gone_is_over_without_having_ended(place: Storage) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    journal, watch = Journal(place, 1), RunWatch(FoundRun("run", place))
    journal.append(started(pid=gone.pid))
    watch.look()
    assert (watch.is_over, watch.has_ended) == (True, False)
    journal.close()


def test_of_a_run_on_another_machine_nothing_is_guessed(place: Storage) -> None:
    journal, watch = Journal(place, 1), RunWatch(FoundRun("run", place))
    journal.append(started(host="elsewhere", pid=1))
    watch.look()
    assert not watch.is_over
    journal.close()


def test_how_an_earlier_start_ended_says_nothing_of_the_one_under_way(place: Storage, tmp_path: Path) -> None:
    for fact in (started(), ended()):
        first = Journal(place, 1)
        first.append(fact)
        first.close()
    live = LiveRun(Card(name="run", path=place.uri, pid=os.getpid(), lease=2), tmp_path)
    watch = RunWatch(FoundRun("run", place, live))
    watch.look()
    assert not watch.is_over
    second = Journal(place, 2)
    second.append(started(lease=2))
    second.append(ended("failed"))
    second.close()
    watch.look()
    assert (watch.is_over, watch.run.state) == (True, "failed")


def test_facts_are_read_where_they_grow_and_then_from_storage(tmp_path: Path) -> None:
    stored, growing = open_storage(tmp_path / "stored"), open_storage(tmp_path / "growing")
    card = Card(name="run", path=stored.uri, pid=os.getpid(), files=growing.uri, lease=2)
    earlier, later = Journal(stored, 1), Journal(growing, 2)
    for journal, fact in ((earlier, started()), (earlier, ended()), (later, started(lease=2))):
        journal.append(fact)
    watch = RunWatch(FoundRun("run", stored, LiveRun(card, tmp_path)))
    assert names(watch.look()) == ["RunStarted", "Ended", "RunStarted"]
    later.append(ended())
    earlier.close()
    later.close()
    key = "journal/0002-000001.jsonl"
    stored.put(key, growing.get(key))
    growing.delete_tree("journal")
    assert names(watch.look()) == ["Ended"]
    assert watch.is_over
