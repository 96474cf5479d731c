"""Steps as a Chrome trace: what a viewer needs, every phase in its place, and one event at a time."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.diagnosis import synthetic
from tests.diagnosis.looks import by_rank, looks

from powertrain.diagnosis import chrome
from powertrain.diagnosis.tables.steps import StepTable
from powertrain.trace.recording import phases


def spans(events: list[chrome.Event], rank: int, row: int) -> list[chrome.Event]:
    return [event for event in events if event["ph"] == "X" and (event["pid"], event["tid"]) == (rank, row)]


def test_what_is_written_is_json_that_a_viewer_reads() -> None:
    file = io.BytesIO()
    count = chrome.write(file, [synthetic.run(0, steps=5)], by_rank(looks(0, 3, cpu=1.5)))
    trace = json.loads(file.getvalue())
    assert len(trace["traceEvents"]) == count
    assert {event["ph"] for event in trace["traceEvents"]} == {"M", "X", "C"}
    for event in trace["traceEvents"]:
        assert event["ph"] == "M" or event["ts"] >= 0


def test_an_empty_run_is_an_empty_trace() -> None:
    file = io.BytesIO()
    assert chrome.write(file, []) == 0
    assert json.loads(file.getvalue())["traceEvents"] == []


def test_ranks_are_processes_named_with_their_hosts() -> None:
    events = list(chrome.events([synthetic.run(0, steps=3, hosts=["node-a", ""])]))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0 on node-a", 1: "rank 1"}
    rows = {event["tid"] for event in events if event["name"] == "thread_name"}
    assert rows == {chrome.STEPS, chrome.PHASES}


def test_the_phases_of_a_step_fill_it_from_end_to_end() -> None:
    steps = synthetic.run(0, steps=4)
    events = list(chrome.events([steps]))
    of_steps, of_phases = (spans(events, 1, row) for row in (chrome.STEPS, chrome.PHASES))
    assert [event["name"] for event in of_steps] == [f"step {number}" for number in range(4)]
    assert sum(event["dur"] for event in of_phases) == pytest.approx(sum(event["dur"] for event in of_steps))
    for event, following in itertools.pairwise(of_phases):
        assert event["ts"] + event["dur"] == pytest.approx(following["ts"], abs=1)
    first = [event["name"] for event in of_phases[:8]]
    assert first == ["outside", "report", "input", "forward", "inside", "backward", "collective", "optimizer"]


def test_times_on_a_device_have_a_row_of_their_own() -> None:
    steps = synthetic.run(0, steps=3)
    device = np.zeros_like(steps.device)
    device[:, 0, phases.FORWARD] = 0.004
    device[:, 0, phases.BACKWARD] = 0.008
    events = list(chrome.events([replace(steps, device=device)]))
    on_device = spans(events, 0, chrome.DEVICE)
    assert [event["name"] for event in on_device] == ["forward", "backward"] * 3
    assert on_device[1]["dur"] == pytest.approx(8000)
    assert spans(events, 1, chrome.DEVICE) == []


def test_times_on_a_device_that_are_the_usual_ones_are_not_drawn_as_measured() -> None:
    steps = synthetic.run(0, steps=4)
    device, flags = np.zeros_like(steps.device), np.full_like(steps.flags, phases.TIMED_ON_DEVICE)
    device[:, :, phases.FORWARD] = 0.004
    flags[1:3, 0] |= phases.AS_USUAL_ON_DEVICE
    flags[:, 1] |= phases.AS_USUAL_ON_DEVICE
    memory = np.full_like(steps.memory, 100.0)
    events = list(chrome.events([replace(steps, device=device, flags=flags, memory=memory)]))
    of_steps, on_device = (spans(events, 0, row) for row in (chrome.STEPS, chrome.DEVICE))
    within = [
        any(step["ts"] <= event["ts"] < step["ts"] + step["dur"] for event in on_device) for step in of_steps
    ]
    assert within == [True, False, False, True]
    assert [step["args"].get("device", "") != "" for step in of_steps] == [False, True, True, False]
    assert [step["args"].get("MiB", 0) for step in of_steps] == [100, 0, 0, 100]
    assert spans(events, 1, chrome.DEVICE) == []
    named = [event for event in events if event["ph"] == "M" and event["args"].get("name") == "device"]
    assert [event["pid"] for event in named] == [0]


def test_a_device_that_is_timed_only_later_has_a_named_row() -> None:
    steps = synthetic.run(0, steps=6)
    device = np.zeros_like(steps.device)
    device[4:, 1, phases.FORWARD] = 0.004
    events = list(chrome.events(chrome.parts(replace(steps, device=device), 2)))
    assert [e["pid"] for e in events if e["ph"] == "M" and e["args"].get("name") == "device"] == [1]


@pytest.mark.parametrize("size", [1, 7, 30, 100])
def test_parts_make_the_same_trace_as_the_whole(size: int) -> None:
    steps, samples = synthetic.run(0, steps=30), by_rank(looks(0, 3, cpu=1.5))
    whole, in_parts = io.BytesIO(), io.BytesIO()
    chrome.write(whole, [steps], samples)
    chrome.write(in_parts, chrome.parts(steps, size), samples)
    assert in_parts.getvalue() == whole.getvalue()


def test_a_long_trace_is_written_in_pieces_as_it_is_made() -> None:
    class Pieces(io.BytesIO):
        longest = 0

        def write(self, data: Any) -> int:
            self.longest = max(self.longest, memoryview(data).nbytes)
            return super().write(data)

    file = Pieces()
    count = chrome.write(file, chrome.parts(synthetic.run(0, steps=1500)))
    assert len(file.getvalue()) > 1.5 * file.longest
    assert len(json.loads(file.getvalue())["traceEvents"]) == count


@pytest.mark.parametrize(("count", "first"), [(1, 9), (4, 6), (10, 0), (50, 0)])
def test_the_newest_steps_come_with_the_looks_since_they_began(count: int, first: int) -> None:
    steps = synthetic.run(0, steps=10)
    starts = np.stack([1000.0 + np.arange(10), 2000.0 + np.arange(10)], axis=1)
    times = {0: 1000.5 + np.arange(10), 1: 2000.5 + np.arange(10), 2: 1000.5 + np.arange(10)}
    samples = by_rank(*(looks(rank, 10, time=time) for rank, time in times.items()))
    kept, seen = chrome.newest(replace(steps, start=starts), samples, count)
    assert kept.numbers.tolist() == list(range(first, 10))
    assert kept.phases.shape == (10 - first, 2, phases.COUNT)
    assert {rank: len(table) for rank, table in seen.items()} == dict.fromkeys(range(3), 10 - first)


def test_looks_are_curves_of_what_was_measured() -> None:
    events = list(chrome.events([synthetic.run(0, steps=2)], by_rank(looks(1, 3, rss=[100.0, 200.0, 300.0]))))
    curve = [event for event in events if event["ph"] == "C"]
    assert [event["args"]["value"] for event in curve] == [100, 200, 300]
    assert {(event["pid"], event["name"]) for event in curve} == {(1, "process memory (MiB)")}
    assert curve[1]["ts"] - curve[0]["ts"] == pytest.approx(1e6)


def test_parts_are_read_only_as_the_trace_is_written() -> None:
    read = []

    def parts() -> Iterator[StepTable]:
        for part in range(3):
            read.append(part)
            yield synthetic.run(part, steps=10)

    events = chrome.events(parts())
    next(events)
    assert read == [0]
    names = [event["name"] for event in events]
    assert read == [0, 1, 2]
    assert names.count("process_name") == 1


def test_no_number_becomes_no_broken_json() -> None:
    steps = synthetic.run(0, steps=3)
    broken = replace(
        steps,
        phases=np.full_like(steps.phases, np.nan),
        start=np.full_like(steps.start, np.inf),
        memory=steps.start,
    )
    file = io.BytesIO()
    chrome.write(file, [broken], by_rank(looks(0, 2, rss=np.nan, cpu=[np.inf, 1.0])))
    assert b"null" not in file.getvalue()
    assert all(event.get("ts", 0) < 1e9 for event in json.loads(file.getvalue())["traceEvents"])
