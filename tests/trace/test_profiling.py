"""Profiles of some steps of a loop, made with torch's profiler while it trains."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import powertrain
from powertrain.diagnosis.profiles.hotspots import summarize
from powertrain.diagnosis.profiles.trace_events import read_trace
from powertrain.trace.device import activity_window
from powertrain.trace.profiling.orders import ProfileOrder, ProfileResult
from powertrain.trace.profiling.user_lines import lines_of
from powertrain.trace.profiling.window import ProfileWindow
from powertrain.trace.recording import patch_choice, patches
from powertrain.trace.recording.recorder import Recorder

SOURCES = str(Path(powertrain.__file__).parents[1])


class Loop:
    """A loop of two optimizers, and the window that looks at it."""

    def __init__(self) -> None:
        self.model, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (self.model, self.other)]
        self.recorder = Recorder()
        self.results: list[ProfileResult] = []
        self.packed = threading.Event()
        self.window = ProfileWindow(self.recorder, self._deliver)

    def _deliver(self, result: ProfileResult) -> None:
        self.results.append(result)
        self.packed.set()

    def step(self) -> None:
        for optimizer in self.optimizers:
            loss_of(self.model, self.other).backward()
            optimizer.step()


def loss_of(model: nn.Module, other: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = other(model(torch.ones(4, 8))).square().mean()
    return loss


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    patches.install(loop.recorder, patch_choice.choose("auto"))
    try:
        yield loop
    finally:
        loop.window.close()
        patches.uninstall()


def test_a_profile_begins_after_the_window_in_which_kernels_are_recorded(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activity_window, "_open", {1: None})
    loop.window.begin(ProfileOrder(ask=7, steps=1))
    loop.step()
    assert not torch._C._autograd._profiler_enabled()
    activity_window._open.clear()
    for _ in range(2):
        loop.step()
    loop.window.close()
    (result,) = loop.results
    assert (result.error, result.steps) == ("", 1)


def test_as_many_steps_are_profiled_as_were_asked_for_also_with_two_optimizers(loop: Loop) -> None:
    loop.step()
    loop.window.begin(ProfileOrder(ask=7, steps=3))
    for _ in range(6):
        loop.step()
    loop.window.close()
    (result,) = loop.results
    assert (result.ask, result.error, result.steps) == (7, "", 3)
    trace = read_trace(result.trace)
    forwards = sum(one.name == "aten::addmm" for one in trace.operators)
    assert forwards == 3 * 2 * 2, "a step has two passes through two models"


def test_operators_are_attributed_to_the_lines_that_called_them_and_backward_to_its_forward(
    loop: Loop,
) -> None:
    loop.window.begin(ProfileOrder(steps=2, memory=True))
    for _ in range(4):
        loop.step()
    loop.window.close()
    (result,) = loop.results
    summary = summarize(read_trace(result.trace), result.steps, result.cost.steps)
    lines = {spot.name for spot in summary.lines}
    here = next(line for line in lines if line.endswith("in loss_of") and "backward" not in line)
    assert Path(here.partition(":")[0]).name == "test_profiling.py"
    assert f"backward of {here}" in lines
    assert any(spot.name == here for spot in summary.allocations)
    assert summary.device_ms is None
    assert 0 < summary.operators_ms <= summary.step_ms


def test_one_profile_at_a_time(loop: Loop) -> None:
    loop.window.begin(ProfileOrder(ask=1))
    loop.window.begin(ProfileOrder(ask=2))
    assert [(one.ask, one.error) for one in loop.results] == [
        (2, "another profile of this rank is under way")
    ]
    for _ in range(5):
        loop.step()
    loop.window.close()
    assert [(one.ask, one.error) for one in loop.results[1:]] == [(1, "")]
    loop.window.begin(ProfileOrder(ask=3, steps=1))
    for _ in range(2):
        loop.step()
    loop.window.close()
    assert (loop.results[2].ask, loop.results[2].steps) == (3, 1)


def test_a_loop_that_ends_within_the_window_gives_the_steps_that_it_made(loop: Loop) -> None:
    loop.window.begin(ProfileOrder(ask=1, steps=50))
    for _ in range(3):
        loop.step()
    loop.window.close()
    (result,) = loop.results
    assert (result.error, result.steps) == ("", 2), "the profile begins with the end of a step"


def test_a_window_that_never_opened_says_so(loop: Loop) -> None:
    loop.window.begin(ProfileOrder(ask=1, after=100))
    loop.step()
    loop.window.close()
    (result,) = loop.results
    assert result.error == "the function ended before step 100"


def test_a_second_window_that_never_opened_says_so_too(loop: Loop) -> None:
    loop.window.begin(ProfileOrder(ask=1, steps=1))
    for _ in range(3):
        loop.step()
    loop.packed.wait(60)
    loop.window.begin(ProfileOrder(ask=2))
    loop.window.close()
    assert [(one.ask, one.error) for one in loop.results] == [(1, ""), (2, "no step ended any more")]


def test_a_window_opens_after_the_given_number_of_steps() -> None:
    loop = Loop()
    loop.optimizers = loop.optimizers[:1]
    patches.install(loop.recorder, patch_choice.choose("auto"))
    try:
        loop.window.begin(ProfileOrder(steps=1, after=4))
        for step in range(6):
            loop.step()
            assert bool(loop.recorder.at_step_end) == (step < 4)
        loop.window.close()
    finally:
        patches.uninstall()
    (result,) = loop.results
    assert (result.error, result.steps) == ("", 1)


def test_the_profiler_of_the_training_function_goes_first(loop: Loop) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        loop.window.begin(ProfileOrder(ask=1))
        loop.step()
    (result,) = loop.results
    assert result.error == "RuntimeError: the training function's own profiler is running"


def test_the_trace_is_one_that_viewers_open(loop: Loop) -> None:
    loop.window.begin(ProfileOrder(steps=1))
    for _ in range(3):
        loop.step()
    loop.window.close()
    trace = json.loads(gzip.decompress(loop.results[0].trace))
    assert {"traceEvents", "displayTimeUnit", "powertrain"} <= trace.keys()
    assert all(event["ph"] for event in trace["traceEvents"])


def test_a_profiler_with_stacks_and_a_forward_with_any_argument_work_in_a_traced_program() -> None:
    program = """if True:
        import torch
        from powertrain import trace
        trace.init()
        class Model(torch.nn.Linear):
            def forward(self, module):
                return super().forward(module)
        model = Model(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.profiler.profile(with_stack=True) as profiler:
            for _ in range(3):
                model(module=torch.ones(1, 2)).sum().backward()
                optimizer.step()
        print(any("Model" in event.name() for event in profiler.profiler.kineto_results.events()))
    """
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": SOURCES, "PATH": ""},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert "True" in done.stdout


class Node:
    """As the profiler's own, of which only these attributes are read."""

    start_time_ns, end_time_ns = 5, 9

    def __init__(
        self, tag: str, operator: int = 0, caller: Any = None, children: tuple[Any, ...] = (), name: str = ""
    ) -> None:
        self.tag, self.correlation_id, self.children, self.name = tag, operator, children, name
        self.extra_fields = self
        self.caller = caller


class Caller:
    def __init__(self, file: str, line: int) -> None:
        self.file_name, self.line_number, self.function_name = file, line, "f"


def test_the_innermost_line_outside_of_libraries_counts(tmp_path: Path) -> None:
    mine = tmp_path / "model.py"
    mine.touch()
    inner = Node("PyCall", caller=Caller("torch/nn/functional.py", 5), children=(Node("TorchOp", 3),))
    outer = Node("PyCall", caller=Caller(str(mine), 12), children=(inner, Node("TorchOp", 4)))
    root = Node(
        "PyCall", caller=Caller("<frozen importlib._bootstrap>", 1), children=(outer, Node("TorchOp", 5))
    )
    found = lines_of([root])
    assert found.lines == [f"{mine}:12 in f"]
    assert found.operators == {3: 0, 4: 0}


def test_a_call_that_waits_for_the_device_outside_of_operators_has_its_line(tmp_path: Path) -> None:
    mine = tmp_path / "train.py"
    mine.touch()
    wait = Node(
        "PyCCall", name="<built-in function _cuda_synchronize>", caller=Caller("torch/cuda/__init__.py", 5)
    )
    other = Node("PyCCall", name="<built-in function sum>", caller=Caller(str(mine), 13))
    root = Node("PyCall", caller=Caller(str(mine), 12), children=(wait, other))
    found = lines_of([root])
    assert found.waits == [(5, 9, found.lines.index(f"{mine}:12 in f"))]
