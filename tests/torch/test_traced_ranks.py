"""Where ranks wait for a late one: whatever exchanges the gradients, and wherever the late one lost its time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from powertrain.torch.backend import TorchBackend
from powertrain.torch.config import TorchConfig
from powertrain.torch.prepare import prepare_model
from powertrain.trace.recording import current, patch_choice, patches, phases
from powertrain.trace.recording.recorder import Recorder
from powertrain.worker.data import batch_plan

GLOO = TorchConfig(backend="gloo", timeout_s=30)
#: Seconds that the second rank is late, long beside anything that these small models do.
LATE = 0.03
STEPS = 6
#: How often it is measured, at most: on a machine that does much else a rank may not come to its turn for longer.
TRIES = 3


class Net(nn.Module):
    """Blocks in a list, each of which FSDP shards by itself. Can be made to take its time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("count", torch.zeros(1))
        self.late_in = ""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.late_in == "forward":
            time.sleep(LATE)
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        if self.late_in == "backward":
            cast(Any, rows).register_hook(lambda _: time.sleep(LATE))
        return rows.sum()


def prepared(net: nn.Module) -> nn.Module:
    return prepare_model(net)


def weighted(net: nn.Module) -> nn.Module:
    """Ranks count unequally, for which Powertrain takes DDP's communication hook."""
    model = prepare_model(net)
    batch_plan.gradient_weight.set(0.5 + dist.get_rank())
    return model


def compressed(net: nn.Module) -> nn.Module:
    model: Any = prepare_model(net)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def users_own(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def users_own_compressed(net: nn.Module) -> nn.Module:
    model = DistributedDataParallel(net)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return model


def sharded(net: nn.Module) -> nn.Module:
    return prepare_model(net, parallel_strategy="fsdp")


def unwrapped(net: nn.Module) -> nn.Module:
    """Its gradients are averaged by the loop itself."""
    return net


#: Where a rank is late -> the phase that its time belongs to.
PLACES = {
    "input": phases.INPUT,
    "forward": phases.FORWARD,
    "loss": phases.INSIDE,
    "backward": phases.BACKWARD,
    "clipping": phases.INSIDE,
    "logging": phases.OUTSIDE,
}


def average_by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= dist.get_world_size()


def clip(model: nn.Module) -> None:
    """Of sharded parameters the norm is known when all ranks have given theirs."""
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def nothing(model: nn.Module) -> None:
    pass


def train(model: nn.Module, net: Net, late_in: str, exchange: Callable[[nn.Module], None]) -> None:
    net.late_in = late_in
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(LATE if late_in == "input" else 0.0)
        return torch.stack(rows)

    batches: Any = DataLoader(torch.ones(2 * STEPS, 8), batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    for rows in batches:
        optimizer.zero_grad()
        loss = model(rows)
        time.sleep(LATE if late_in == "loss" else 0.0)
        loss.backward()
        time.sleep(LATE if late_in == "clipping" else 0.0)
        exchange(model)
        optimizer.step()
        time.sleep(LATE if late_in == "logging" else 0.0)


def usual_steps(wrap: Callable[[nn.Module], nn.Module], places: list[str]) -> dict[str, list[float]]:
    """For each place where the second rank is late, a usual step of this one by phase, in units of LATE."""
    batch_plan.gradient_weight.reset()
    recorder = Recorder()
    current.use(recorder)
    patches.install(recorder, patch_choice.choose())
    net = Net()
    model = wrap(net)
    exchanges: dict[Any, Callable[[nn.Module], None]] = {unwrapped: average_by_hand, sharded: clip}
    exchange = exchanges.get(wrap, nothing)
    found = {}
    try:
        train(model, net, "", exchange)
        for place in places:
            recorder.flush()
            done = recorder.steps
            dist.barrier()
            train(model, net, place if dist.get_rank() == 1 else "", exchange)
            recorder.flush()
            data = recorder.drain(done)[1]
            steps = [phases.unpack_from(data, at) for at in range(0, len(data), phases.RECORD_SIZE)]
            assert len(steps) == STEPS
            # The first has the wait at the barrier before it.
            columns = zip(*(step.phases for step in steps[1:]), strict=True)
            found[place] = [statistics.median(column) / LATE for column in columns]
    finally:
        patches.uninstall()
        current.use(None)
        batch_plan.gradient_weight.reset()
    return found


@pytest.fixture
def two(forked: Callable[[int], Any]) -> Any:
    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    return group


@pytest.mark.parametrize(
    ("wrap", "places"),
    [
        (prepared, list(PLACES)),
        (sharded, list(PLACES)),
        (weighted, ["loss", "backward"]),
        (compressed, ["loss", "backward"]),
        (users_own, ["loss", "backward"]),
        (users_own_compressed, ["loss", "backward"]),
        (unwrapped, ["loss", "backward"]),
    ],
)
def test_the_others_wait_for_a_late_rank_and_it_does_not_wait(
    two: Any, wrap: Callable[[nn.Module], nn.Module], places: list[str]
) -> None:
    for _ in range(TRIES):
        waiting, late = two.execute(usual_steps, wrap, places)
        wrong = [place for place in places if not is_told_right(waiting[place], late[place], PLACES[place])]
        if not wrong:
            return
    pytest.fail(f"late in {wrong}: {[(waiting[place], late[place]) for place in wrong]}")


def is_told_right(waiting: list[float], late: list[float], phase: int) -> bool:
    """Of usual steps of two ranks, of which the second lost its time in ``phase``."""
    waits = waiting[phases.COLLECTIVE]
    # On a busy machine a late rank waits a little in each of many collectives too.
    return late[phase] > 0.9 and 0.6 < waits == max(waiting) and late[phases.COLLECTIVE] < 0.6 * waits


def gradients(wrap: Callable[[nn.Module], nn.Module], is_traced: bool) -> tuple[list[float], int]:
    """What two backward passes leave on this rank, and how often its model's own hook was called."""
    batch_plan.gradient_weight.reset()
    recorder = Recorder()
    if is_traced:
        patches.install(recorder, patch_choice.choose())
    calls = []
    try:
        torch.manual_seed(3)
        net = Net()
        model: Any = wrap(net)

        def halve(state: Any, bucket: Any) -> Any:
            calls.append(1)
            bucket.buffer().div_(2)
            return default_hooks.allreduce_hook(state, bucket)

        halve.__annotations__.clear()
        model.register_comm_hook(dist.group.WORLD, halve)
        for step in range(2):
            model(torch.full((2, 8), 0.1 * (1 + step + dist.get_rank()))).backward()
        return [float(cast(Any, parameter.grad).sum()) for parameter in net.parameters()], len(calls)
    finally:
        patches.uninstall()
        batch_plan.gradient_weight.reset()


@pytest.mark.parametrize("wrap", [prepared, weighted, users_own])
def test_a_users_own_communication_hook_does_what_it_does_untraced(
    two: Any, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    plain = two.execute(gradients, wrap, False)
    traced = two.execute(gradients, wrap, True)
    assert traced == plain
    assert all(calls >= 2 for _, calls in traced)
