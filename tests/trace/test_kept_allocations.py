"""Lines whose allocations outlive their steps, from the allocator's events."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from powertrain.trace.device.allocations import KeptAllocations, kept_lines
from powertrain.trace.profiling.user_lines import FileJudge
from powertrain.trace.recording import patch_choice, patches
from powertrain.trace.recording.recorder import Recorder

MIB = 1 << 20
ENDS = [100, 200, 300, 400]
JUDGE = FileJudge()


def alloc(when: int, address: int, line: int, mib: int = 12) -> dict[str, Any]:
    frames = [
        {"filename": "/usr/lib/python3/dist-packages/torch/functional.py", "line": 1, "name": "einsum"},
        {"filename": "/home/me/train.py", "line": line, "name": "train"},
    ]
    return {"action": "alloc", "time_us": when, "addr": address, "size": mib * MIB, "frames": frames}


def free(address: int) -> dict[str, Any]:
    return {"action": "free_requested", "addr": address, "time_us": 0}


def test_a_line_of_which_every_step_keeps_memory_is_found_with_its_mib_a_step() -> None:
    [found] = kept_lines([alloc(110, 1, 7), alloc(210, 2, 7), alloc(310, 3, 7)], ENDS, JUDGE)
    assert found["where"] == "/home/me/train.py:7 in train"
    assert found["mib_per_step"] == 12
    assert found["mib"] == [12, 12], "the last step may still use its own"


def test_memory_that_is_freed_or_kept_by_one_step_only_is_no_leak() -> None:
    freed = [alloc(110, 1, 7), alloc(210, 2, 7), free(1), free(2)]
    once = [alloc(110, 3, 8)]
    gradients = [alloc(310, 4, 9), alloc(320, 5, 9), alloc(330, 6, 9)]
    assert kept_lines([*freed, *once, *gradients], ENDS, JUDGE) == []


def test_an_address_that_is_used_again_belongs_to_the_new_line() -> None:
    events = [alloc(110, 1, 7), free(1), alloc(150, 1, 8), alloc(250, 2, 8)]
    assert [one["where"] for one in kept_lines(events, ENDS, JUDGE)] == ["/home/me/train.py:8 in train"]


def test_a_few_bytes_a_step_are_no_leak() -> None:
    losses = [{**alloc(110, 1, 7), "size": 512}, {**alloc(210, 2, 7), "size": 512}]
    assert kept_lines(losses, ENDS, JUDGE) == []


def test_allocations_of_libraries_alone_name_no_line() -> None:
    events = [{**alloc(110, 1, 7), "frames": []}, {**alloc(210, 2, 7), "frames": []}]
    assert kept_lines(events, ENDS, JUDGE) == []


@pytest.mark.parametrize(
    ("peaks", "is_suspected"),
    [([1, 20, 40, 60, 80], True), ([1, 20, 40, 40, 60, 80], False), ([1, 2, 3, 4, 5], False)],
    ids=["rises", "pauses", "little"],
)
def test_only_a_peak_that_keeps_rising_is_suspected(
    peaks: list[float], is_suspected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    steps = iter(range(20, 1000, 10))
    monkeypatch.setattr(Recorder, "steps", property(lambda self: next(steps)))
    kept = KeptAllocations(recorder)
    for peak in peaks:
        kept.look(peak)
    assert bool(recorder.at_step_end) == is_suspected
    kept.close()
    assert not recorder.at_step_end


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch's history of allocations was set to, without a GPU."""
    calls: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: False, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {})
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [[]]})
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda enabled, **_: calls.append(enabled)
    )
    return calls


def suspecting(recorder: Recorder) -> KeptAllocations:
    kept = KeptAllocations(recorder)
    recorder.watch_step_ends(kept._on_step_end)
    return kept


def end_steps(recorder: Recorder, count: int) -> None:
    for _ in range(count):
        for listener in list(recorder.at_step_end):
            listener(0)


def test_the_history_is_recorded_for_some_steps_and_then_ended(history: list[Any]) -> None:
    recorder = Recorder()
    patches.install(recorder, patch_choice.choose("auto"))
    try:
        kept = suspecting(recorder)
        end_steps(recorder, 3)
        assert history == ["all"]
        end_steps(recorder, 10)
        assert history == ["all", None]
        assert not recorder.at_step_end
        kept.close()
    finally:
        patches.uninstall()


def test_a_history_that_the_user_starts_meanwhile_is_left_to_them(history: list[Any]) -> None:
    recorder = Recorder()
    patches.install(recorder, patch_choice.choose("auto"))
    try:
        kept = suspecting(recorder)
        end_steps(recorder, 2)
        torch.cuda.memory._record_memory_history("state")
        end_steps(recorder, 10)
        assert history == ["all", "state"]
        assert not recorder.at_step_end
        assert kept.news() is None
        kept.close()
        assert history == ["all", "state"]
    finally:
        patches.uninstall()
