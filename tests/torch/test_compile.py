"""torch.compile before and after prepare_model: the same training, and a state under the model's own names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from powertrain.torch.prepare import prepare_model

#: Seconds for a collective: the compiler takes its time.
GROUP_TIMEOUT_S = 240
#: How a model is compiled and prepared, by name.
ORDERS: dict[str, Callable[..., Any]] = {
    "not compiled": lambda net, backend, **how: prepare_model(net, **how),
    "before": lambda net, backend, **how: prepare_model(
        cast(nn.Module, torch.compile(net, backend=backend)), **how
    ),
    "after": lambda net, backend, **how: torch.compile(prepare_model(net, **how), backend=backend),
    "in place": lambda net, backend, **how: compiled_in_place(net, backend, **how),
    "a part": lambda net, backend, **how: with_compiled_part(net, backend, **how),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = torch.relu(layer(rows))
        result: torch.Tensor = self.head(self.norm(rows))
        return result


def compiled_in_place(net: nn.Module, backend: str, **how: Any) -> nn.Module:
    net.compile(backend=backend)
    return prepare_model(net, **how)


def with_compiled_part(net: Any, backend: str, **how: Any) -> nn.Module:
    net.head = torch.compile(net.head, backend=backend)
    return prepare_model(net, **how)


def train(order: str, backend: str, save_to: str = "", load_from: str = "", **how: Any) -> Any:
    """Train three steps and save, or load and train three more; the losses, and the names in the state."""
    from powertrain.checkpoint.state.capture import capture
    from powertrain.checkpoint.state.saver import StateLoader, StateSaver

    calls: list[int] = []
    torch._dynamo.reset()
    torch._dynamo.callback.on_compile_start(lambda *_: calls.append(1))
    torch.manual_seed(0 if save_to else 1)
    model = ORDERS[order](Net(), backend, **how)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    objects = {"model": model, "optimizer": optimizer}
    if load_from:
        StateLoader(load_from, dist.get_rank(), dist.get_world_size()).load(objects)
    losses = []
    for step in range(3):
        rows = torch.rand(8, 4, generator=torch.Generator().manual_seed(step + 3 * bool(load_from)))
        loss = (model(rows) - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if save_to:
        own = Path(save_to, f"rank-{dist.get_rank()}")
        own.mkdir(parents=True)
        StateSaver(dist.get_rank(), dist.get_world_size()).save(objects, str(own))
    names = sorted(capture(objects, rng=False).tensors)
    return losses, names, len(calls)


def merged(directory: Path, world_size: int) -> str:
    """What the ranks saved, put together as the run would."""
    for rank in range(world_size):
        shutil.copytree(directory / f"rank-{rank}", directory / "merged", dirs_exist_ok=True)
    return str(directory / "merged")


def on_all(group: Any, order: str, backend: str, **arguments: Any) -> Any:
    """Rank 0's answer. The compiler takes its time on a machine that has other work."""
    answers = [one.result(timeout=240) for one in group.execute_async(train, order, backend, **arguments)]
    return answers[0]


@pytest.mark.parametrize(
    ("world_size", "how", "orders"),
    [
        (1, {}, {"before": "eager", "after": "eager"}),
        (2, {}, {"before": "aot_eager", "after": "eager", "in place": "eager", "a part": "eager"}),
        (2, {"mixed_precision": "bf16"}, {"before": "eager", "after": "eager"}),
        (2, {"parallel_strategy": "fsdp"}, {"before": "eager", "after": "eager"}),
        (1, {"parallel_strategy": None, "mixed_precision": "bf16"}, {"before": "eager"}),
    ],
    ids=["alone", "ddp", "ddp in bf16", "fsdp", "unwrapped in bf16"],
)
def test_a_compiled_model_trains_saves_and_resumes_like_another(
    ranks: Callable[[int], Any], tmp_path: Path, world_size: int, how: dict[str, Any], orders: dict[str, str]
) -> None:
    group = ranks(world_size)
    tolerance = 2e-2 if how.get("mixed_precision") else 1e-5
    losses, names, compiled = on_all(group, "not compiled", "", save_to=str(tmp_path / "plain"), **how)
    assert not compiled
    start = merged(tmp_path / "plain", world_size)
    later, _, _ = on_all(group, "not compiled", "", load_from=start, **how)
    for order, backend in orders.items():
        place = tmp_path / order.replace(" ", "-")
        own, own_names, compiled = on_all(group, order, backend, save_to=str(place), **how)
        assert compiled, f"{order}: nothing was compiled"
        assert own == pytest.approx(losses, rel=tolerance), order
        assert own_names == names, order
        # Each loads what the other has saved.
        resumed, _, _ = on_all(group, order, backend, load_from=start, **how)
        assert resumed == pytest.approx(later, rel=tolerance), order
        back, _, _ = on_all(group, "not compiled", "", load_from=merged(place, world_size), **how)
        assert back == pytest.approx(later, rel=tolerance), order


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")
def test_code_of_inductor_trains_like_the_model_itself(ranks: Callable[[int], Any]) -> None:
    group = ranks(1)
    losses, _, _ = on_all(group, "not compiled", "")
    own, _, compiled = on_all(group, "before", "inductor")
    assert compiled
    assert own == pytest.approx(losses, rel=1e-4)
