"""prepare_model(mixed_precision=...): low precision in the forward pass, full precision everywhere else."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from powertrain.errors import ConfigError
from powertrain.torch import device, prepare
from powertrain.torch.mixed_precision import LossScaler, ScaledOptimizer, precision_of
from powertrain.torch.older_api import accelerate, backward, prepare_optimizer
from powertrain.torch.prepare import prepare_model


class Net(nn.Module):
    """Notes what its layers compute in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)
        self.types: set[torch.dtype] = set()

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.layers[0](rows)
        self.types.add(hidden.dtype)
        return {"out": self.head(hidden), "count": torch.tensor(3)}


def whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(strategy: str | None, precision: Any, steps: int = 5) -> dict[str, Any]:
    """Train a few steps; what was computed in which type, and the weights in the end."""
    prepare.begin(gpus=0)
    torch.manual_seed(0)
    if precision in ("fp16", torch.float16):  # torch begins with 65536, which overflows here for two steps
        device.settings().scaler = LossScaler("cpu", init_scale=64.0)
    net = Net()
    model = prepare_model(net, parallel_strategy=strategy, mixed_precision=precision)
    optimizer = prepare_optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    rows = torch.rand(8, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(steps):
        output = model(rows)
        optimizer.zero_grad()
        backward((output["out"] - 1).square().mean())
        optimizer.step()
    return {
        "computed": net.types,
        "returned": (output["out"].dtype, output["count"].dtype),
        "parameters": {one.dtype for one in model.parameters()},
        "gradients": {one.grad.dtype for one in model.parameters() if one.grad is not None},
        "moments": {one["exp_avg"].dtype for one in optimizer.state.values()},
        "is_scaled": isinstance(optimizer, ScaledOptimizer),
        "weights": torch.cat([whole(one).detach().flatten() for one in model.parameters()]),
    }


#: parallel_strategy, mixed_precision, and what it means.
CASES = [
    ("ddp", "bf16", torch.bfloat16),
    ("ddp", torch.float16, torch.float16),
    ("fsdp", torch.bfloat16, torch.bfloat16),
    ("fsdp", "fp16", torch.float16),
    (None, "bf16", torch.bfloat16),
]


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_the_forward_pass_is_in_low_precision(ranks: Callable[[int], Any], world_size: int) -> None:
    group = ranks(world_size)
    for strategy, given, low in CASES:
        full = group.execute(trained, strategy, None)
        for seen, exact in zip(group.execute(trained, strategy, given), full, strict=True):
            assert exact["computed"] == {torch.float32}
            assert not exact["is_scaled"]
            assert seen["computed"] == {low}
            assert seen["returned"] == (torch.float32, torch.int64)
            assert seen["parameters"] == seen["gradients"] == seen["moments"] == {torch.float32}
            assert seen["is_scaled"] is (low is torch.float16)
            # Five steps of 0.01 each: one more or less would be seen.
            assert 0 < (seen["weights"] - exact["weights"]).abs().max().item() < 0.005


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_infinite_gradient_of_one_rank_leaves_the_step_out_on_all(
    ranks: Callable[[int], Any], strategy: str
) -> None:
    def look() -> Any:
        torch.manual_seed(0)
        model = prepare_model(nn.Linear(4, 1), parallel_strategy=strategy, mixed_precision="fp16")
        optimizer: Any = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        before = torch.cat([whole(one).detach().flatten().clone() for one in model.parameters()])
        factor = float("inf") if dist.get_rank() == 1 else 1.0
        scale = optimizer.scaler.get_scale()
        backward((model(torch.ones(2, 4)) * factor).sum())
        optimizer.step()
        after = torch.cat([whole(one).detach().flatten() for one in model.parameters()])
        return torch.equal(before, after), optimizer.scaler.get_scale() / scale

    assert ranks(2).execute(look) == [(True, 0.5)] * 2


def test_a_choice_for_one_model_has_precedence_over_amp(ranks: Callable[[int], Any]) -> None:
    def look() -> Any:
        accelerate(amp=True)
        seen = []
        for precision in (None, "no", "fp16"):
            net = Net()
            prepare_model(net, mixed_precision=precision)(torch.ones(2, 4))
            seen.append(net.types)
        return seen

    [seen] = ranks(1).execute(look)
    assert seen == [{torch.bfloat16}, {torch.float32}, {torch.float16}]


def test_copies_and_pickles_of_prepared_models_keep_their_precision(ranks: Callable[[int], Any]) -> None:
    def look() -> Any:
        seen = []
        for model in (
            prepare_model(nn.Linear(4, 4), mixed_precision="bf16"),
            prepare_model(nn.Linear(4, 4), parallel_strategy=None, mixed_precision="bf16"),
        ):
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
                with torch.no_grad():
                    for one in twin.parameters():
                        one.fill_(1.001)  # 1 in bfloat16
                seen.append(twin(torch.ones(1, 4)).tolist() == [[5.0] * 4])
        return seen

    assert ranks(1).execute(look) == [[True] * 4]


def test_a_model_that_is_wrapped_already_computes_in_low_precision(ranks: Callable[[int], Any]) -> None:
    def look() -> Any:
        seen = []
        for wrap in (DistributedDataParallel, prepare_model):
            net = Net()
            model = wrap(net)
            assert prepare_model(model, mixed_precision="bf16") is model
            model(torch.ones(2, 4))
            seen.append(net.types)
        return seen

    assert ranks(1).execute(look) == [[{torch.bfloat16}] * 2]


def test_two_words_for_the_precision_of_a_sharded_model_are_refused(ranks: Callable[[int], Any]) -> None:
    def look() -> None:
        with pytest.raises(ConfigError, match=r"mixed_precision .*and mp_policy"):
            prepare_model(
                nn.Linear(2, 2),
                parallel_strategy="fsdp",
                parallel_strategy_kwargs={"mp_policy": MixedPrecisionPolicy()},
                mixed_precision="bf16",
            )
        sharded = nn.Linear(2, 2)
        fully_shard(sharded)
        with pytest.raises(ConfigError, match="sharded already"):
            prepare_model(sharded, parallel_strategy="fsdp", mixed_precision="bf16")

    ranks(1).execute(look)


@pytest.mark.parametrize("value", ["bf-16", "fp8", torch.float64, 16, True])
def test_a_precision_that_is_not_there_is_refused_with_those_that_are(value: Any) -> None:
    with pytest.raises(ConfigError, match='it must be "bf16", "fp16"'):
        precision_of(value)


def test_full_precision_by_its_names_is_none() -> None:
    assert {precision_of(value) for value in (None, "no", "fp32", "float32", torch.float32)} == {None}
    assert device._Settings().scaler is None
