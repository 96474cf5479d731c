"""accelerate, prepare_optimizer and backward: Ray Train's older torch functions."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import powertrain.torch as names
from powertrain.errors import ArgumentError, ConfigError
from powertrain.torch import device as torch_device
from powertrain.torch import mixed_precision, older_api
from powertrain.torch.backend import TorchBackend
from powertrain.torch.config import TorchConfig
from powertrain.torch.mixed_precision import LossScaler, ScaledOptimizer
from powertrain.torch.prepare import prepare_model

GLOO = TorchConfig(backend="gloo", timeout_s=30)


@pytest.fixture
def alone(forked: Callable[[int], Any]) -> Callable[[Callable[[], Any]], Any]:
    """Call a function in a lone worker that is in its process group."""
    group = forked(1)
    TorchBackend().on_start(group, GLOO)
    return lambda function: group.execute_single(0, function)


@pytest.fixture
def scaled(as_rank: Any) -> LossScaler:
    """This process is a rank whose losses are scaled by 4, and less after a step with an infinite gradient."""
    scaler = LossScaler("cpu", init_scale=4.0)
    torch_device.settings().scaler = scaler
    return scaler


def sgd(parameter: nn.Parameter) -> torch.optim.SGD:
    return torch.optim.SGD([parameter], lr=1.0)


def test_the_functions_are_public_names_with_rays_arguments() -> None:
    from inspect import signature

    assert list(signature(names.accelerate).parameters) == ["amp"]
    assert list(signature(names.prepare_optimizer).parameters) == ["optimizer"]
    assert list(signature(names.backward).parameters) == ["tensor"]


def test_every_optimizer_step_is_counted_once(alone: Callable[..., Any]) -> None:
    def look() -> list[int]:
        from powertrain.worker.progress import progress

        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        counts = []
        plain = torch.optim.SGD([parameter], lr=0.1)
        for optimizer in (plain, older_api.prepare_optimizer(torch.optim.Adam([parameter]))):
            before = progress.steps
            optimizer.step()
            counts.append(progress.steps - before)
        return counts

    assert alone(look) == [1, 1]


def test_mixed_precision_computes_low_and_answers_in_float32(alone: Callable[..., Any]) -> None:
    def look() -> list[Any]:
        inside: list[torch.dtype] = []
        older_api.accelerate(amp=True)
        net = nn.Linear(2, 2)
        net.register_forward_pre_hook(lambda *_: inside.append(torch.get_autocast_dtype("cpu")))
        model: Any = prepare_model(net)
        optimizer = older_api.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        output = model(torch.ones(1, 2))
        low = torch.allclose(output, output.bfloat16().float())
        older_api.backward(output.sum())
        optimizer.step()
        twin = copy.deepcopy(model.module)
        with torch.no_grad():
            twin.weight.zero_(), twin.bias.zero_()
        return [output.dtype, low, twin(torch.ones(1, 2)).abs().sum().item()]

    assert alone(look) == [torch.float32, True, 0.0]


def test_a_scaled_optimizer_steps_skips_and_schedules_like_its_own() -> None:
    parameter = nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = ScaledOptimizer(inner, scaler)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scaler.scale((parameter * 2).sum()).backward()
    optimizer.step()
    scheduler.step()
    assert parameter.item() == -1.0
    assert inner.param_groups[0]["lr"] == 0.5
    optimizer.zero_grad()
    scaler.scale((parameter * float("inf")).sum()).backward()
    optimizer.step()
    assert parameter.item() == -1.0, "a step with infinite gradients is left out"
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    with pytest.raises(ConfigError, match="closure"):
        optimizer.step(lambda: 0.0)


def test_an_optimizer_whose_step_a_scheduler_has_replaced_is_stepped_through_the_scaler(
    scaled: LossScaler,
) -> None:
    parameter = nn.Parameter(torch.ones(1))
    inner = sgd(parameter)
    torch.optim.lr_scheduler.StepLR(inner, step_size=1)  # replaces inner.step
    optimizer = older_api.prepare_optimizer(inner)
    older_api.backward(parameter.sum())
    optimizer.step()
    assert parameter.item() == 0.0, "the gradient was 1, and not 4"


def test_two_optimizers_of_one_loss_are_unscaled_by_the_scale_it_had(scaled: LossScaler) -> None:
    good, bad = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    first, second = older_api.prepare_optimizer(sgd(bad)), older_api.prepare_optimizer(sgd(good))
    older_api.backward((good + bad * float("inf")).sum())
    first.step()
    second.step()
    assert (bad.item(), good.item()) == (1.0, 0.0)
    assert scaled.get_scale() == 2.0, "the infinite gradient halves the scale of the next loss"
    assert scaled.state_dict()["scale"] == 2.0


def test_gradients_are_clipped_after_they_are_unscaled_once(scaled: LossScaler) -> None:
    parameter = nn.Parameter(torch.zeros(1))
    optimizer: Any = older_api.prepare_optimizer(sgd(parameter))
    older_api.backward((parameter * 10).sum())
    optimizer.scaler.unscale_(optimizer)
    assert nn.utils.clip_grad_norm_([parameter], 0.5).item() == 10.0
    optimizer.step()
    assert parameter.item() == pytest.approx(-0.5, rel=1e-5)


def test_a_prepared_optimizer_is_returned_as_it_is_and_other_objects_are_refused(scaled: LossScaler) -> None:
    optimizer = older_api.prepare_optimizer(sgd(nn.Parameter(torch.ones(1))))
    assert isinstance(optimizer, ScaledOptimizer)
    assert older_api.prepare_optimizer(optimizer) is optimizer
    with pytest.raises(ArgumentError, match=r"prepare_optimizer\(\) was given 3\. Give a torch"):
        older_api.prepare_optimizer(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"backward\(\) was given 'loss'"):
        older_api.backward("loss")  # type: ignore[arg-type]


def test_losses_that_would_be_scaled_after_an_optimizer_was_prepared_are_refused(as_rank: Any) -> None:
    model = nn.Linear(1, 1)
    older_api.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="Call prepare_optimizer afterwards"):
        prepare_model(model, parallel_strategy=None, mixed_precision="fp16")
    prepare_model(model, parallel_strategy=None, mixed_precision="bf16")


def test_amp_on_a_gpu_means_float16_and_scaled_losses(as_rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "own_devices", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(mixed_precision.LossScaler, "__init__", lambda self, device: None)
    older_api.accelerate(amp=True)
    assert torch_device.settings().amp is torch.float16
    assert isinstance(torch_device.settings().scaler, LossScaler)
    older_api.accelerate()
    assert (torch_device.settings().amp, torch_device.settings().scaler) == (None, None)


def test_without_a_scaler_the_optimizer_is_the_users_and_nothing_keeps_it(as_rank: Any) -> None:
    optimizer = sgd(nn.Parameter(torch.ones(1)))
    assert older_api.prepare_optimizer(optimizer) is optimizer
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None
