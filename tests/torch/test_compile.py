"""torch.compile before and after prepare_model: the same training, and a state under the model's own names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from powertrain.config import TorchConfig
from powertrain.torch.backend import TorchBackend
from powertrain.torch.prepare import prepare_model

GLOO = TorchConfig(backend="gloo", timeout_s=30)
#: How a model is compiled and prepared, by name.
ORDERS: dict[str, Callable[..., nn.Module]] = {
    "not compiled": lambda net, backend, **how: prepare_model(net, **how),
    "before": lambda net, backend, **how: prepare_model(torch.compile(net, backend=backend), **how),
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


@pytest.fixture
def ranks(forked: Callable[[int], Any]) -> Callable[[int], Any]:
    """Start a group of ranks that are in their process group."""

    def start(world_size: int) -> Any:
        group = forked(world_size)
        TorchBackend().on_start(group, GLOO)
        return group

    return start


def train(order: str, backend: str, save_to: str = "", load_from: str = "", **how: Any) -> Any:
    """Train three steps and save, or load and train three more; the losses, and the names in the state."""
    from powertrain.checkpoint.state import capture
    from powertrain.checkpoint.state_saver import StateLoader, StateSaver

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


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ({}, "aot_eager"),
        ({"mixed_precision": "bf16"}, "eager"),
        ({"parallel_strategy": "fsdp"}, "eager"),
        ({"parallel_strategy": None, "mixed_precision": "bf16"}, "aot_eager"),
    ],
    ids=["ddp", "ddp in bf16", "fsdp", "one model for each rank in bf16"],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_compiled_model_trains_saves_and_resumes_like_another(
    ranks: Callable[[int], Any], tmp_path: Path, how: dict[str, Any], backend: str, world_size: int
) -> None:
    group = ranks(world_size)
    expected, names, compiled = group.execute(train, "not compiled", backend, str(tmp_path / "plain"), **how)[
        0
    ]
    assert not compiled
    start = merged(tmp_path / "plain", world_size)
    resumed, _, _ = group.execute(train, "not compiled", backend, load_from=start, **how)[0]
    for order in list(ORDERS)[1:]:
        place = tmp_path / order.replace(" ", "-")
        losses, own_names, compiled = group.execute(train, order, backend, str(place), **how)[0]
        assert compiled, f"{order}: nothing was compiled"
        assert losses == pytest.approx(expected, rel=2e-2 if how.get("mixed_precision") else 1e-5), order
        assert own_names == names, order
        # What one has saved the other loads.
        crossed, _, _ = group.execute(train, order, backend, load_from=start, **how)[0]
        assert crossed == pytest.approx(resumed, rel=2e-2 if how.get("mixed_precision") else 1e-5), order
        back, _, _ = group.execute(
            train, "not compiled", backend, load_from=merged(place, world_size), **how
        )[0]
        assert back == pytest.approx(resumed, rel=2e-2 if how.get("mixed_precision") else 1e-5), order


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler")
def test_code_of_inductor_trains_like_the_model_itself(
    ranks: Callable[[int], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = ranks(1)
    [(expected, _, _)] = group.execute(train, "not compiled", "inductor")
    [(losses, _, compiled)] = group.execute(train, "before", "inductor")
    assert compiled
    assert losses == pytest.approx(expected, rel=1e-4)
