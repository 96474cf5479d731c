"""Real loops on the CPU, traced without a word in them; and torch as it was when tracing ends."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trace.records import clock, phases_longer_than, sleep, steps
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, dataloader
from torch.utils.data._utils import fetch

import powertrain
from powertrain import trace
from powertrain.errors import ConfigError
from powertrain.torch import prepare
from powertrain.trace.recording import batch_sizes, cuda, current, marks, patch_choice, patches, phases, ring
from powertrain.trace.recording.phases import StepRecord
from powertrain.trace.recording.recorder import Recorder
from powertrain.trace.recording.timed_loaders import MakingTimes

SOURCES = str(Path(powertrain.__file__).parents[1])
LONG = 0.03


class Slow(nn.Module):
    """Takes a while, on its way there and back."""

    def __init__(
        self, forward: float = 0.0, backward: float = 0.0, sleep: Callable[[float], None] = sleep
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.inner = nn.Linear(4, 4)
        self.seconds = forward
        self.backward_seconds = backward
        self.sleep = sleep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sleep(self.seconds)
        y: torch.Tensor = self.inner(x) * self.weight
        if self.backward_seconds and y.requires_grad:
            y.register_hook(lambda _: self.sleep(self.backward_seconds))
        return y.sum()


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    recorder = Recorder(bytearray(ring.ring_size(100)), clock=clock)
    current.use(recorder)
    yield recorder
    patches.uninstall()
    current.use(None)


def long_phases(record: StepRecord) -> set[str]:
    """The names of calls that took as long as the test made them take."""
    return phases_longer_than(record, LONG * 0.9)


def seen(record: StepRecord) -> set[str]:
    return {name for name, seconds in zip(phases.NAMES, record.phases, strict=True) if seconds > 0}


def loader(workers: int = 0, rows: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(rows, 4)), batch_size=4, num_workers=workers)


def train(model: Any, batches: Any, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in batches:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


# --------------------------------------------------------------------------- what is seen


def test_each_phase_of_a_plain_loop_is_seen_where_it_is(recorder: Recorder) -> None:
    trace.init()
    train(Slow(), loader())
    assert [seen(step) for step in steps(recorder)] == [
        {"input", "forward", "backward", "optimizer", "inside", "outside"}
    ] * 2
    assert [step.samples for step in steps(recorder)] == [4, 4]


def test_an_optimizer_that_calls_the_step_of_its_base_steps_once(recorder: Recorder) -> None:
    class Slower(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            found = super().step(closure)
            sleep(LONG)
            return found

    torch.optim.SGD(
        [torch.zeros(1, requires_grad=True)]
    )  # from here on torch itself calls hooks in the base's step
    trace.init()
    model = Slow()
    train(model, loader(rows=12), Slower(model.parameters(), lr=0.1))
    found = steps(recorder)
    assert len(found) == 3
    assert [long_phases(step) for step in found] == [{"optimizer"}] * 3


def test_files_that_a_loop_saves_count_as_reporting(recorder: Recorder, tmp_path: Path) -> None:
    trace.init()
    model = Slow()
    train(model, loader(rows=4))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    train(model, loader(rows=4))
    first, second = steps(recorder)
    assert "report" not in seen(first)
    assert "report" in seen(second)
    patches.uninstall()
    assert torch.save is torch.serialization.save
    assert not hasattr(torch.save, "__wrapped__")


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer", "inside", "outside"])
def test_a_slow_phase_is_the_one_that_is_long(recorder: Recorder, phase: str) -> None:
    trace.init()
    model = Slow(forward=LONG if phase == "forward" else 0, backward=LONG if phase == "backward" else 0)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if phase == "optimizer":
        plain = optimizer._optimizer_step_code
        optimizer._optimizer_step_code = lambda: (sleep(LONG), plain())
    delays = {"input": 0.0, "inside": 0.0, "outside": 0.0} | {phase: LONG}

    def collate(rows: list[Any]) -> torch.Tensor:
        sleep(delays["input"])
        return torch.stack([row[0] for row in rows])

    batches: Any = DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=4, collate_fn=collate)
    for x in batches:
        loss = model(x)
        sleep(delays["inside"])
        loss.backward()
        optimizer.step()
        sleep(delays["outside"])
    for step in steps(recorder)[1:]:
        assert long_phases(step) == {phase}


def test_a_batch_made_in_the_loop_is_made_for_as_long_as_it_is_waited_for(recorder: Recorder) -> None:
    trace.init()
    train(Slow(), loader())
    found = steps(recorder)
    assert all(step.fetch == pytest.approx(step.phases[phases.INPUT], abs=2e-3) for step in found[1:])


class SlowRows(Dataset[Any]):
    """Takes a while for each four rows."""

    def __len__(self) -> int:
        return 32

    def __getitems__(self, indices: list[int]) -> list[Any]:
        time.sleep(LONG)
        return [(torch.ones(4),) for _ in indices]


class SlowStream(IterableDataset[Any]):
    """As many rows from each process, which take a while too."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(16):
            time.sleep(LONG / 4)
            yield (torch.ones(4),)


@pytest.mark.timed
@pytest.mark.unsteady(
    reason="a held-up machine makes the loop wait for processes that it is ahead of otherwise"
)
@pytest.mark.parametrize("rows", [SlowRows(), SlowStream()])
def test_processes_of_a_loader_say_how_long_they_made_a_batch(rows: Any) -> None:
    recorder = Recorder(bytearray(ring.ring_size(100)))
    current.use(recorder)
    trace.init()
    train(Slow(forward=LONG, sleep=time.sleep), DataLoader(rows, batch_size=4, num_workers=2))
    found = steps(recorder)
    assert [step.samples for step in found] == [4] * 8
    assert all(step.fetch > 0.9 * LONG for step in found)
    assert sorted(step.phases[phases.INPUT] for step in found)[4] < LONG, "two make them while one computes"


def test_of_processes_that_say_nothing_nothing_is_known() -> None:
    times = MakingTimes(2)
    assert times.newest() == 0.0
    times.add(1, 0.25)
    times.add(0, 0.75)
    assert times.newest() == 0.5
    assert times.newest() == 0.5, "as long as no other batch was made"
    times.add(1, 2.0)
    assert times.newest() == 2.0


def test_a_loader_that_was_there_before_reports_no_time_and_is_read_on(recorder: Recorder) -> None:
    batches = iter(loader(workers=1))
    trace.init()
    train(Slow(), batches)
    found = steps(recorder)
    assert [(step.samples, step.fetch) for step in found] == [(4, 0), (4, 0)]
    assert all(step.phases[phases.INPUT] > 0 for step in found)


def test_a_heavy_loss_is_inside_and_not_forward(recorder: Recorder) -> None:
    class HeavyLoss(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            sleep(LONG)
            return y.sum()

    trace.init()
    model, loss = Slow(), HeavyLoss()
    train(lambda x: loss(model(x)), loader(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert [long_phases(step) - {"outside"} for step in steps(recorder)] == [{"inside"}] * 2


def test_a_forward_that_is_called_directly_is_seen_in_its_parts(recorder: Recorder) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Slow(forward=LONG)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.part(x)
            return result

    trace.init()
    model = Outer()
    train(model.forward, loader(), torch.optim.SGD(model.parameters(), lr=0.1))
    assert [long_phases(step) - {"outside"} for step in steps(recorder)] == [{"forward"}] * 2


def test_a_compiled_model_is_seen_and_compiles_as_it_did(recorder: Recorder) -> None:
    import torch._dynamo

    def compiled(model: Any) -> Any:
        return torch.compile(model, backend="eager", fullgraph=True)

    trace.init()
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 1)))
    wrapped = compiled(model)
    function = compiled(lambda x: model(x).sum() + x.to("cpu").to(torch.float32).sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch._dynamo.utils.counters.clear()
    for call in (wrapped, function):
        train(lambda x, call=call: call(x).sum(), loader(), optimizer)
    found = steps(recorder)
    assert [step.phases[phases.FORWARD] > 0 for step in found] == [True, True, False, False]
    assert all(step.phases[phases.BACKWARD] > 0 for step in found)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("is_loaded_before", [True, False], ids=["compiler-loaded", "compiler-loaded-later"])
def test_compiled_modules_are_compiled_under_their_own_names(tmp_path: Path, is_loaded_before: bool) -> None:
    program = tmp_path / "compiled.py"
    program.write_text(
        """
import sys
import torch
from torch import nn
from powertrain import trace

class Inner(nn.Module):
    def forward(self, x):
        return x.relu()

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Inner(), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)

if sys.argv[1] == "True":
    import torch._dynamo
assert ("torch._dynamo" in sys.modules) == (sys.argv[1] == "True")
trace.init()
torch.compile(Outer(), backend="eager")(torch.ones(2, 4))
from torch._dynamo.utils import get_compilation_metrics
print(sorted({metrics.co_filename for metrics in get_compilation_metrics() if metrics.co_filename}))
"""
    )
    done = subprocess.run(
        [sys.executable, str(program), str(is_loaded_before)], capture_output=True, text=True, check=True
    )
    assert str(program) in done.stdout
    assert "powertrain" not in done.stdout.splitlines()[0]


def test_a_compiled_optimizer_still_ends_steps_and_compiles_as_it_did(
    recorder: Recorder, recwarn: pytest.WarningsRecorder
) -> None:
    import torch._dynamo

    def graphs_of_training() -> int:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step, backend="eager")
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            step()
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    prepare.watch_optimizer_steps()
    plain = graphs_of_training()
    trace.init()
    assert graphs_of_training() == plain
    assert [step.phases[phases.OPTIMIZER] > 0 for step in steps(recorder)] == [True] * 3
    assert not [warning for warning in recwarn if "Dynamo does not know" in str(warning.message)]
    torch._dynamo.reset()


def test_what_is_computed_again_in_backward_is_backward(recorder: Recorder) -> None:
    trace.init()
    part = Slow(forward=LONG)

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = part

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.part, x, use_reentrant=False)

    train(Saving(), loader())
    assert [long_phases(step) - {"outside"} for step in steps(recorder)] == [{"forward", "backward"}] * 2


def test_a_closure_is_taken_out_of_the_optimizer(recorder: Recorder) -> None:
    trace.init()
    model = Slow(forward=LONG)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4))
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    found = steps(recorder)
    assert [long_phases(step) - {"outside"} for step in found] == [{"forward"}] * 2
    assert all({"backward", "optimizer"} <= seen(step) for step in found)


def test_a_scaler_makes_a_step_also_where_it_leaves_the_optimizer_out(recorder: Recorder) -> None:
    trace.init()
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(model(torch.ones(1, 4)) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [step.phases[phases.OPTIMIZER] > 0 for step in steps(recorder)] == [True] * 3


def test_marked_steps_are_blocks_and_calls_of_a_decorated_function(recorder: Recorder) -> None:
    trace.init()
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @trace.trace_step
    def one(x: torch.Tensor) -> str:
        model(x).backward()
        optimizer.step()
        optimizer.step()
        return "made"

    with trace.trace_step(model):
        assert one(torch.ones(1, 4)) == "made"
    assert one(torch.ones(1, 4)) == "made"
    assert trace.trace_step(model)(lambda: "too")() == "too"
    assert [step.flags for step in steps(recorder)] == [phases.MARKED] * 3


def test_an_exception_within_a_step_leaves_everything_right(recorder: Recorder) -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    trace.init()
    failing, model = Failing(), Slow(forward=LONG)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 4)
    with pytest.raises(ValueError, match="no"), trace.trace_step(failing):
        failing(x)
    with pytest.raises(RuntimeError, match="does not require grad"), trace.trace_step(model):
        torch.ones(1).backward()
    with trace.trace_step(model):
        train(model, [(x,)], optimizer)
    (step,) = steps(recorder)
    assert long_phases(step) - {"outside"} == {"forward"}
    assert recorder.depth == 0


def test_a_loader_that_is_left_early_or_fails_leaves_everything_right(recorder: Recorder) -> None:
    trace.init()
    model = Slow()
    for _ in range(2):
        for (x,) in loader(workers=1):
            train(model, [(x,)])
            break

    def fails(rows: list[Any]) -> Any:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        next(iter(DataLoader(TensorDataset(torch.ones(4, 4)), collate_fn=fails)))
    assert recorder.depth == 0
    assert len(steps(recorder)) == 2


def test_what_other_threads_do_is_not_counted(recorder: Recorder) -> None:
    trace.init()
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    made = 0
    thread = threading.Thread(target=train, args=(Slow(), loader(rows=400)))
    thread.start()
    while thread.is_alive() or not made:
        model(torch.ones(1, 4)).backward()
        optimizer.step()
        made += 1
    thread.join()
    found = steps(recorder)[-100:]
    assert recorder.steps == made, "a hundred steps of the other thread are not among them"
    assert not any(step.samples for step in found)


# --------------------------------------------------------------------------- by hand


def test_wrappers_see_what_nothing_is_patched_for(recorder: Recorder) -> None:
    trace.init(mode="manual")
    assert nn.Module.__call__ is nn.Module._wrapped_call_impl
    model = trace.wrap_forward(Slow(forward=LONG))
    optimizer = trace.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for (x,) in trace.wrap_dataloader_fetch(loader()):
        trace.wrap_backward(model.forward(trace.wrap_h2d(x).to("cpu"))).backward()
        optimizer.step()
    found = steps(recorder)
    assert [seen(step) for step in found] == [
        {"input", "forward", "backward", "optimizer", "inside", "outside"}
    ] * 2
    assert [long_phases(step) - {"outside"} for step in found] == [{"forward"}] * 2
    assert [step.samples for step in found] == [4, 4]


def test_wrappers_beside_patches_count_once(recorder: Recorder) -> None:
    trace.init()
    model = trace.wrap_forward(trace.wrap_forward(Slow()))
    optimizer = trace.wrap_optimizer(trace.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))
    backward = trace.wrap_backward(lambda loss: loss.backward())
    for (x,) in trace.wrap_dataloader_fetch(iter(loader())):
        backward(model(x))
        optimizer.step()
    assert [step.samples for step in steps(recorder)] == [4, 4]


def test_wrapped_things_stay_what_they_are(recorder: Recorder) -> None:
    model = trace.wrap_forward(Slow())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.weight.zero_()
    assert twin(torch.ones(1, 4)) == 0
    assert model(torch.ones(1, 4)) != 0, "a copy computes with its own parameters"
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(torch.ones(1, 4)), model(torch.ones(1, 4)))
    batches = trace.wrap_dataloader_fetch(loader())
    assert (len(batches), batches.batch_size) == (2, 4)
    assert trace.wrap_h2d(torch.ones(3)).shape == (3,)
    assert trace.wrap_backward(torch.ones(1)).item() == 1

    class Steps:
        def step(self) -> int:
            return 5

    assert trace.wrap_optimizer(trace.wrap_optimizer(Steps())).step() == 5
    assert len(steps(recorder)) == 1


def test_accelerates_optimizer_is_wrapped_by_what_it_steps(recorder: Recorder) -> None:
    optimizers = pytest.importorskip("accelerate.optimizer")
    pytest.importorskip("accelerate").Accelerator(cpu=True)  # makes the state that its optimizers need
    model = torch.nn.Linear(2, 1)
    optimizer = trace.wrap_optimizer(
        optimizers.AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    )
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    recorder.flush()
    assert recorder.steps == 3


@pytest.mark.parametrize(
    ("wrap", "thing"),
    [
        (trace.wrap_forward, 1),
        (trace.wrap_dataloader_fetch, 1),
        (trace.wrap_backward, 1),
        (trace.wrap_optimizer, 1),
        (trace.wrap_h2d, 1),
    ],
)
def test_a_wrapper_says_what_it_takes(wrap: Callable[[Any], Any], thing: Any) -> None:
    with pytest.raises(ConfigError, match=r"was given an object of type int.* It takes "):
        wrap(thing)


def test_a_generator_is_its_own_loader_process(recorder: Recorder) -> None:
    def made() -> Iterator[tuple[torch.Tensor]]:
        for _ in range(3):
            sleep(LONG)
            yield (torch.ones(2, 4),)

    trace.init()
    train(Slow(), trace.wrap_dataloader_fetch(made()))
    assert [round(step.fetch / LONG) >= 1 and step.samples == 2 for step in steps(recorder)] == [True] * 3


# --------------------------------------------------------------------------- what is chosen


def test_only_what_is_chosen_is_patched(recorder: Recorder) -> None:
    trace.init(mode="selective", patch_dataloader=True, patch_backward=True)
    model = Slow()
    with trace.trace_step(model):
        train(model, loader())
    assert seen(steps(recorder)[0]) == {"input", "backward", "inside", "outside"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "all"}, "mode='all' is not a tracing mode"),
        ({"mode": "auto", "patch_h2d": True}, "patch_h2d=True cannot be used with mode='auto'"),
        ({"mode": "manual", "patch_forward": False}, "patch_forward=False cannot be used with mode='manual'"),
        ({"mode": "selective"}, "nothing would be patched"),
        ({"mode": "selective", "patch_h2d": False}, "nothing would be patched"),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        patch_choice.choose(**arguments)


def test_custom_is_another_word_for_selective() -> None:
    assert patch_choice.choose("custom", patch_h2d=True) == patch_choice.choose("selective", patch_h2d=True)


# --------------------------------------------------------------------------- nothing is left


def touched() -> dict[str, Any]:
    """Everything that patches replace."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives

    owners: list[Any] = [
        nn.Module,
        torch.Tensor,
        torch.autograd,
        dataloader._BaseDataLoaderIter,
        dataloader._MultiProcessingDataLoaderIter,
        fetch._MapDatasetFetcher,
        fetch._IterableDatasetFetcher,
        DataLoader,
        torch.amp.GradScaler,
        DistributedDataParallel,
        dist,
        dist.distributed_c10d,
        dist._functional_collectives,
        dist.Work,
        torch.cuda.CUDAGraph,
    ]
    found = {f"{owner}.{name}": value for owner in owners for name, value in vars(owner).items()}
    hooks = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
    return found | {"hooks": [list(kind.values()) for kind in hooks]}


def test_nothing_is_left_patched_and_nothing_of_the_users_was_touched() -> None:
    before = touched()
    trace.init()
    model = Slow()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, loader(), optimizer)
    changed = {name for name, value in touched().items() if before.get(name) is not value}
    assert len(changed) > 30
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert "forward" not in vars(model)
    assert not optimizer._optimizer_step_pre_hooks
    patches.uninstall()
    patches.uninstall()
    after = touched()
    assert after.pop("hooks") == before.pop("hooks")
    assert {name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)} == set()


def test_a_later_patch_of_other_code_stays() -> None:
    trace.init()
    ours = nn.Module.__call__

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    plain = nn.Module._wrapped_call_impl
    nn.Module.__call__ = theirs  # type: ignore[method-assign]
    try:
        patches.uninstall()
        assert nn.Module.__call__ is theirs
        assert Slow()(torch.ones(1, 4)) is not None
    finally:
        nn.Module.__call__ = plain  # type: ignore[method-assign]


def test_odd_models_and_batches_are_no_reason_to_fail(recorder: Recorder) -> None:
    class Unhashable(Slow):
        __hash__ = None  # type: ignore[assignment]

    class Odd:
        @property
        def shape(self) -> Any:
            raise OSError("not now")

    class Hollow(nn.Module):
        def __init__(self) -> None:
            pass

        def __call__(self, x: Any) -> Any:
            return x

    trace.init()
    model = Unhashable()
    for _ in trace.wrap_dataloader_fetch([Odd(), "words", {}]):
        train(model, [(torch.ones(1, 4),)], torch.optim.SGD([model.weight], lr=0.1))
    with trace.trace_step(Hollow()):
        pass
    assert len(steps(recorder)) == 4


def test_the_second_init_takes_the_place_of_the_first(recorder: Recorder) -> None:
    before = touched()
    trace.init()
    trace.init(mode="manual")
    after = touched()
    changed = {name for name in before if name != "hooks" and before[name] is not after[name]}
    graph = torch.cuda.CUDAGraph
    assert changed == {f"{graph}.capture_begin", f"{graph}.capture_end"}, "which trace nothing"


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_without_a_recorder_nothing_is_patched(mode: str) -> None:
    before = touched()
    current.use(Recorder(bytearray(ring.ring_size(2)), thread=marks.NOBODY))
    trace.init(mode=mode)
    after = touched()
    assert patches.installed() is None
    assert after.pop("hooks") == before.pop("hooks")
    assert {name for name in before if before[name] is not after[name]} == set()
    train(Slow(), loader())
    patches.uninstall()


class Graph:
    """In place of torch's, which only captures what a GPU does."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fails = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self.done.append((pool, capture_error_mode, may_ask()))
        if self.fails:
            raise RuntimeError("no capture")

    def capture_end(self) -> None:
        self.done.append(may_ask())
        if self.fails:
            raise RuntimeError("no graph")


def may_ask() -> bool:
    """Whether a GPU would be asked for its times now."""
    with cuda.captures.kept_out() as allowed:
        return allowed


@pytest.fixture
def graph_class(monkeypatch: pytest.MonkeyPatch) -> type[Graph]:
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    return Graph


@pytest.mark.parametrize("mode", ["auto", "manual"])
def test_a_device_is_not_asked_while_a_graph_is_captured(graph_class: type[Graph], mode: str) -> None:
    trace.init(mode=mode)
    graph, other = graph_class(), graph_class()
    graph.capture_begin("pool", capture_error_mode="relaxed")
    assert not may_ask()
    other.capture_begin()
    other.capture_end()
    assert not may_ask(), "the first one is still captured"
    graph.capture_end()
    assert graph.done == [("pool", "relaxed", False), False]
    assert may_ask()


def test_a_capture_that_fails_is_over(graph_class: type[Graph]) -> None:
    trace.init()
    graph = graph_class()
    graph.fails = True
    with pytest.raises(RuntimeError, match="no capture"):
        graph.capture_begin()
    assert may_ask()
    graph.fails = False
    graph.capture_begin()
    graph.fails = True
    with pytest.raises(RuntimeError, match="no graph"):
        graph.capture_end()
    assert may_ask()


def test_a_capture_that_outlasts_tracing_holds_up_nothing_that_is_traced_later(
    graph_class: type[Graph],
) -> None:
    plain = vars(graph_class)["capture_begin"], vars(graph_class)["capture_end"]
    trace.init()
    graph = graph_class()
    graph.capture_begin()
    patches.uninstall()
    assert (vars(graph_class)["capture_begin"], vars(graph_class)["capture_end"]) == plain
    graph.capture_end()
    assert may_ask()


def test_models_are_not_kept_alive() -> None:
    trace.init()
    model = Slow()
    model(torch.ones(1, 4))
    with trace.trace_step(model):
        pass
    gone = weakref.ref(model)
    del model
    assert gone() is None


@pytest.fixture
def begin_to_use_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Does what torch does when CUDA is first used, which it says to those who have asked."""
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", asked.append)

    def begin() -> None:
        for call in asked:
            call()

    return begin


def test_tables_of_torchs_functions_find_what_they_held(begin_to_use_cuda: Callable[[], None]) -> None:
    plain = torch.Tensor.to
    trace.init()
    begin_to_use_cuda()
    assert vars(torch.Tensor).get("to") is not None
    assert torch.Tensor.to is plain
    assert torch.ones(2).to(torch.float64).dtype is torch.float64


def test_tensors_are_left_alone_until_there_is_a_device_to_copy_to(
    begin_to_use_cuda: Callable[[], None],
) -> None:
    before = vars(torch.Tensor).get("to"), vars(torch.Tensor).get("cuda")
    trace.init()
    assert (vars(torch.Tensor).get("to"), vars(torch.Tensor).get("cuda")) == before
    begin_to_use_cuda()
    assert vars(torch.Tensor).get("to") is not before[0]
    patches.uninstall()
    begin_to_use_cuda()
    assert (vars(torch.Tensor).get("to"), vars(torch.Tensor).get("cuda")) == before, "too late"


# --------------------------------------------------------------------------- what a batch is, where a copy goes


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.ones(5, 2), (5, 0)),
        (torch.ones(()), (0, 0)),
        ((torch.ones(3), 1), (3, 0)),
        ({"name": "a", "x": [torch.ones(7, 1)]}, (7, 0)),
        ({"input_ids": torch.ones(2, 6)}, (2, 12)),
        ({"deep": [[[[torch.ones(2)]]]]}, (0, 0)),
        ("words", (0, 0)),
        (None, (0, 0)),
    ],
)
def test_how_much_is_in_a_batch(batch: Any, size: tuple[int, int]) -> None:
    assert batch_sizes.size_of(batch) == size


@pytest.mark.parametrize(
    ("args", "kwargs", "goes"),
    [
        (("cuda",), {}, True),
        (("cuda:1", torch.float16), {}, True),
        ((0,), {}, True),
        ((torch.device("cuda"),), {}, True),
        ((), {"device": "cuda"}, True),
        ((torch.device("cpu"),), {}, False),
        (("cpu",), {}, False),
        (("meta",), {}, False),
        ((torch.float16,), {}, False),
        ((), {"dtype": torch.float16}, False),
        ((torch.ones(1),), {}, False),
        ((), {"other": torch.ones(1)}, False),
    ],
)
def test_only_a_copy_to_a_device_is_one(args: tuple[Any, ...], kwargs: dict[str, Any], goes: bool) -> None:
    assert batch_sizes.goes_to_device(args, kwargs) is goes


# --------------------------------------------------------------------------- other ranks

#: Why tests of two real ranks are unsteady; their figures are medians of eight steps.
HELD_UP = "a rank that the machine holds up in most steps looks like one that is late"
DISTRIBUTED = """
import json, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from powertrain import trace
from powertrain.trace.recording import phases
from powertrain.trace.recording import current
rank, path = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
trace.init()
recorder = current.current()
LONG = 0.05

class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        self.late = 0.0
        self.register_buffer("count", torch.zeros(1))
    def forward(self, x):
        time.sleep(self.late)
        y = self.layers(x)
        y.register_hook(lambda _: time.sleep(self.late))
        return y.sum()

def train(model, steps, between=lambda: None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    done = recorder.steps
    for _ in range(steps):
        model(torch.ones(2, 8)).backward()
        optimizer.step()
        between()
    recorder.flush()
    data = recorder.drain(done)[1]
    rows = [phases.unpack_from(data, at).phases for at in range(0, len(data), phases.RECORD_SIZE)]
    return [dict(zip(phases.NAMES, row)) for row in rows[1:]]

inner = Late()
model = DistributedDataParallel(inner)
found = {}
train(model, 2)
inner.late = LONG if rank == 1 else 0.0
found["late"] = train(model, 8)
inner.late = 0.0
def meet():
    time.sleep(LONG if rank == 1 else 0.0)
    dist.all_reduce(torch.ones(1), async_op=True).wait()
found["explicit"] = train(model, 8, meet)
buffers = Late()
buffers.late = LONG if rank == 0 else 0.0
def late_before():
    time.sleep(LONG if rank == 0 else 0.0)
buffers.late = 0.0
found["buffers"] = train(DistributedDataParallel(buffers), 8, late_before)
found["hooks"] = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
sharded = Late()
sharded.register_buffer("count", None)
fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
train(sharded, 2)
found["sharded"] = train(sharded, 8, lambda: time.sleep(LONG if rank == 1 else 0.0))
from powertrain.trace.recording import patches
patches.uninstall()
found["hooks after"] = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def recordings() -> list[list[dict[str, Any]]]:
    """What :func:`two_ranks` has recorded so far."""
    return []


@pytest.fixture
def two_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, recordings: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """What two ranks have recorded, one of them late. A test that is run again gets a recording of its own."""
    if not recordings or getattr(request.node, "execution_count", 1) > 1:
        recordings.append(record_two_ranks(tmp_path / "store"))
    return recordings[-1]


def record_two_ranks(store: Path) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", DISTRIBUTED, str(rank), str(store)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = []
    for rank in ranks:
        output, errors = rank.communicate(timeout=60)
        assert rank.returncode == 0, errors
        answers.append(json.loads(output))
    return answers


def spent(rank: dict[str, Any], scenario: str, phase: str) -> float:
    """Of a usual step, in units of what the late one was made to take."""
    values = sorted(step[phase] for step in rank[scenario])
    return float(values[len(values) // 2] / 0.05)


@pytest.mark.timed
@pytest.mark.unsteady(reason=HELD_UP)
def test_a_rank_waits_for_a_late_one_where_gradients_are_exchanged(two_ranks: list[dict[str, Any]]) -> None:
    waiting, late = two_ranks
    assert spent(waiting, "late", "collective") > 1.6, "it waits for a slow forward and a slow backward"
    assert spent(waiting, "late", "backward") < 0.5
    assert spent(waiting, "late", "forward") < 0.5
    assert spent(late, "late", "collective") < 0.5
    assert spent(late, "late", "backward") > 0.9
    assert spent(late, "late", "forward") > 0.9


@pytest.mark.timed
@pytest.mark.unsteady(reason=HELD_UP)
def test_a_collective_of_the_users_own_counts_as_one(two_ranks: list[dict[str, Any]]) -> None:
    waiting, late = two_ranks
    assert spent(waiting, "explicit", "collective") > 0.8
    assert spent(late, "explicit", "collective") < 0.5
    assert spent(late, "explicit", "outside") > 0.9


@pytest.mark.timed
@pytest.mark.unsteady(reason=HELD_UP)
def test_waiting_for_buffers_is_not_forward(two_ranks: list[dict[str, Any]]) -> None:
    late, waiting = two_ranks
    assert spent(waiting, "buffers", "collective") > 0.8
    assert spent(waiting, "buffers", "forward") < 0.5
    assert spent(late, "buffers", "outside") > 0.9


@pytest.mark.timed
@pytest.mark.unsteady(reason=HELD_UP)
def test_waiting_for_shards_counts_as_collective(two_ranks: list[dict[str, Any]]) -> None:
    waiting, late = two_ranks
    assert spent(waiting, "sharded", "collective") > 0.8
    assert spent(late, "sharded", "collective") < 0.5


def test_only_the_last_gradients_have_hooks_and_in_the_end_none(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert 1 <= rank["hooks"] <= 4
        assert rank["hooks after"] == 0
