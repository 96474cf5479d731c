"""Facts about a rank's device, as they are sent: on a stand-in for torch's CUDA where there is none."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest import mock

import pytest
import torch

from powertrain.trace.device import activity_window
from powertrain.trace.device.activity_window import ActivityWindow
from powertrain.trace.device.watch import DeviceWatch
from powertrain.trace.recording import patch_choice, patches
from powertrain.trace.recording.cuda import DeviceTimer
from powertrain.trace.recording.recorder import Recorder

MIB = 1 << 20


class Event:
    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        return 1.0


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder()
    made.time_on(lambda: DeviceTimer(Event, lambda event: None, index=0))
    return made


def step(recorder: Recorder, optimizer: object = None) -> None:
    recorder.optimizer_begins(optimizer)
    recorder.optimizer_ended(optimizer)


def allocator(monkeypatch: pytest.MonkeyPatch, allocations: int = 0, **mib: float) -> None:
    names = {
        "reserved": ("reserved_bytes", "current"),
        "peak": ("allocated_bytes", "peak"),
        "split": ("inactive_split_bytes", "current"),
    }
    stats: dict[str, Any] = {"num_device_alloc": allocations}
    for name, value in mib.items():
        figure, moment = names[name]
        stats[figure] = {"all": {moment: int(value * MIB)}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda gpu: stats)


def test_the_allocators_figures_are_sent_once_and_again_when_they_change(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = DeviceWatch(recorder)
    allocator(monkeypatch, reserved=1000)
    watch.look()
    assert watch.news()["allocator"]["reserved"] == 1000
    watch.look()
    assert "allocator" not in watch.news()
    allocator(monkeypatch, reserved=1020)
    watch.look()
    assert "allocator" not in watch.news()
    allocator(monkeypatch, reserved=1200)
    watch.look()
    assert watch.news()["allocator"]["reserved"] == 1200
    watch.close()


def test_a_higher_peak_is_sent_and_stays_when_the_user_resets_it(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = DeviceWatch(recorder)
    for peak, sent in ((600, 600), (900, 900), (100, None), (910, None)):
        allocator(monkeypatch, reserved=1000, peak=peak)
        watch.look()
        news = watch.news()
        assert (news["allocator"]["peak"] if sent else news) == (sent or {})
    watch.close()


def test_a_loop_that_no_longer_takes_memory_from_the_device_is_known_to_have_stopped(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = DeviceWatch(recorder)
    sent = []
    for number in range(60):
        monkeypatch.setattr(Recorder, "steps", number)
        allocator(monkeypatch, reserved=1000, allocations=30 * min(number, 20))
        watch.look()
        sent += [facts["allocations"]] if (facts := watch.news().get("allocator")) else []
    assert max(sent) == pytest.approx(30.0)
    assert sent[-1] < 2.0
    watch.close()


def test_pieces_that_are_free_only_for_a_moment_do_not_count(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = DeviceWatch(recorder)
    for split in (4000, 0, 4000):
        allocator(monkeypatch, reserved=8000, split=split)
        watch.look()
    assert watch.news()["allocator"]["split"] == 0
    for _ in range(20):
        watch.look()
    assert watch.news()["allocator"]["split"] == 4000, "free all the time since"
    watch.close()


def test_a_device_that_fails_does_not_end_the_telemetry(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gpu: int) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    watch = DeviceWatch(recorder)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", fail)
    watch.look()
    assert "allocator" not in watch.news()
    watch.close()


def test_no_window_is_taken_without_a_gpu() -> None:
    plain = Recorder()
    window = ActivityWindow(plain, after=1)
    step(plain)
    assert not plain.at_step_end
    assert not activity_window.is_any_open()
    window.close()


class Profiler:
    """torch's profiler, as far as a window uses it."""

    made: list[Profiler] = []

    def __init__(self, **options: Any) -> None:
        self.is_entered = self.is_left = False
        self.made.append(self)

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, *error: object) -> None:
        self.is_left = True

    @property
    def kineto_results(self) -> Any:
        raise AttributeError("moved")


@pytest.fixture
def profiler(monkeypatch: pytest.MonkeyPatch) -> type[Profiler]:
    monkeypatch.setattr(Profiler, "made", [])
    monkeypatch.setattr(activity_window, "_others", threading.Event())
    monkeypatch.setattr(activity_window, "_disable", lambda: Profiler.made[-1].__exit__())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.autograd.profiler, "profile", Profiler)
    return Profiler


@pytest.fixture
def windows_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_window, "_LEAST_SECONDS", 0.0)
    monkeypatch.setattr(activity_window, "_LEAST_STEPS", 1)


@pytest.mark.usefixtures("windows_of_one_step")
def test_a_window_is_opened_after_some_steps_and_closed_by_the_same_optimizer(
    recorder: Recorder, profiler: type[Profiler]
) -> None:
    generator, critic = object(), object()
    window = ActivityWindow(recorder, after=2)
    step(recorder, generator)
    assert not profiler.made
    step(recorder, generator)
    assert profiler.made[0].is_entered
    assert activity_window.is_any_open()
    step(recorder, critic)
    assert not profiler.made[0].is_left
    step(recorder, generator)
    assert profiler.made[0].is_left
    assert not activity_window.is_any_open()
    assert not recorder.at_step_end
    assert recorder.copied_marks is None
    window.close()
    assert window.news() is None, "what the profiler returned could not be read"


def test_an_error_of_the_profiler_ends_the_window_and_nothing_else(
    recorder: Recorder, profiler: type[Profiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Profiler) -> None:
        raise RuntimeError("CUPTI is in use")

    monkeypatch.setattr(Profiler, "__enter__", fail)
    window = ActivityWindow(recorder, after=1)
    step(recorder)
    assert not recorder.at_step_end
    assert not activity_window.is_any_open()
    window.close()


def test_a_function_that_ends_within_a_window_leaves_nothing_behind(
    recorder: Recorder, profiler: type[Profiler]
) -> None:
    window = ActivityWindow(recorder, after=1)
    step(recorder)
    assert activity_window.is_any_open()
    window.close()
    assert profiler.made[0].is_left
    assert not activity_window.is_any_open()
    assert recorder.copied_marks is None


@pytest.mark.parametrize("name", ["CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID"])
def test_a_program_under_nvidias_profilers_is_left_alone(
    recorder: Recorder, profiler: type[Profiler], name: str
) -> None:
    window = ActivityWindow(recorder, after=1)
    with mock.patch.dict(os.environ, {name: "1"}):
        step(recorder)
    assert not profiler.made
    assert not recorder.at_step_end
    window.close()


def test_a_window_makes_way_for_the_users_profiler_and_none_is_taken_any_more(
    recorder: Recorder, profiler: type[Profiler]
) -> None:
    window = ActivityWindow(recorder, after=1)
    step(recorder)
    assert activity_window.is_any_open()
    activity_window.make_way()
    assert profiler.made[0].is_left
    assert not activity_window.is_any_open()
    later = ActivityWindow(recorder, after=1)
    step(recorder)
    assert len(profiler.made) == 1
    window.close()
    later.close()


def test_a_profiler_that_the_loop_starts_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(activity_window, "make_way", lambda: calls.append("made way"))
    patches.install(Recorder(), patch_choice.choose("auto"))
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.ones(1) + 1
    finally:
        patches.uninstall()
    assert calls
    calls.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        torch.ones(1) + 1
    assert not calls, "restored with the other patches"


@pytest.mark.usefixtures("windows_of_one_step")
def test_nothing_is_started_or_stopped_while_a_graph_is_captured(
    recorder: Recorder, profiler: type[Profiler], monkeypatch: pytest.MonkeyPatch
) -> None:
    window = ActivityWindow(recorder, after=1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step(recorder)
    assert not profiler.made
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step(recorder)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    step(recorder)
    assert not profiler.made[0].is_left
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    step(recorder)
    assert profiler.made[0].is_left
    window.close()


def test_of_ranks_that_are_threads_of_one_process_one_has_the_profiler_at_a_time(
    recorder: Recorder, profiler: type[Profiler]
) -> None:
    window = ActivityWindow(recorder, after=1)
    step(recorder)
    others: list[bool] = []

    def other_rank() -> None:
        mine = Recorder()
        mine.time_on(lambda: DeviceTimer(Event, lambda event: None, index=0))
        waiting = ActivityWindow(mine, after=1)
        step(mine)
        others.append(len(profiler.made) == 1 and bool(mine.at_step_end))
        waiting.close()

    thread = threading.Thread(target=other_rank)
    thread.start()
    thread.join()
    assert others == [True]
    assert activity_window.is_any_open(), "the first is still open"
    window.close()


def test_a_step_of_too_many_operators_is_not_recorded(recorder: Recorder, profiler: type[Profiler]) -> None:
    window = ActivityWindow(recorder, after=1, is_too_large=lambda: True)
    step(recorder)
    assert not profiler.made
    assert not recorder.at_step_end
    window.close()
