"""A prepared model averages gradients, and its state dict is that of the model inside."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from powertrain.config import TorchConfig
from powertrain.errors import ConfigError
from powertrain.torch import prepare
from powertrain.torch.backend import TorchBackend
from powertrain.torch.prepare import prepare_model, wrapped_key

GLOO = TorchConfig(backend="gloo", timeout_s=30)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 1)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(rows)) * self.scale
        return out


@pytest.fixture
def alone(forked: Callable[[int], Any]) -> Callable[[Callable[[], Any]], Any]:
    """Call a function in a lone worker that is in its process group."""
    group = forked(1)
    TorchBackend().on_start(group, GLOO)
    return lambda function: group.execute_single(0, function)


def equal(left: Any, right: Any) -> bool:
    return list(left) == list(right) and all(torch.equal(left[key], right[key]) for key in left)


def test_gradients_are_the_same_on_every_rank(forked: Callable[[int], Any]) -> None:
    def train() -> tuple[list[float], list[float]]:
        torch.manual_seed(dist.get_rank())
        model = prepare_model(nn.Linear(2, 1), parallel_strategy_kwargs={"find_unused_parameters": True})
        model(torch.full((4, 2), float(dist.get_rank()))).sum().backward()
        module: Any = model.module
        return module.weight.tolist()[0], module.weight.grad.tolist()[0]

    group = forked(2)
    TorchBackend().on_start(group, GLOO)
    first, second = group.execute(train)
    assert first == second, "rank 0's weights and the mean gradient are everywhere"
    assert first[1] == [2.0, 2.0]


def test_one_worker_is_wrapped_too_and_module_is_the_model(alone: Callable[..., Any]) -> None:
    def look() -> tuple[bool, bool]:
        net = Net()
        model = prepare_model(net)
        return isinstance(model, DistributedDataParallel), model.module is net

    assert alone(look) == (True, True)


def test_the_state_dict_has_the_models_own_keys_order_values_and_versions(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        net = Net()
        plain, state = net.state_dict(), prepare_model(net).state_dict()
        versions, own = state._metadata, plain._metadata
        return [equal(state, plain), all(versions[name] == own[name] for name in own)]

    assert alone(look) == [True, True]


def test_state_dicts_load_with_and_without_prefix(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        saved = Net().state_dict()
        prefixed = {f"module.{key}": value for key, value in saved.items()}
        answers = []
        for state in (saved, dict(saved), prefixed):
            model, before = prepare_model(Net()), set(state)
            result = model.load_state_dict(state)
            answers.append(equal(model.module.state_dict(), saved))
            answers.append(not result.missing_keys and not result.unexpected_keys)
            answers.append(set(state) == before)
        plain = Net()
        plain.load_state_dict(prepare_model(plain).state_dict())
        return answers

    assert all(alone(look))


def test_strict_and_assign_mean_what_they_mean_in_torch(alone: Callable[..., Any]) -> None:
    def look() -> list[Any]:
        model = prepare_model(Net())
        state = dict(Net().state_dict())
        model.load_state_dict(state, assign=True)
        assigned = model.module.head.weight.data_ptr() == state["head.weight"].data_ptr()
        state["surplus"] = state.pop("scale")
        loose = model.load_state_dict(state, strict=False)
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            return [assigned, loose.missing_keys, loose.unexpected_keys, str(error)]
        return []

    assigned, missing, unexpected, message = alone(look)
    assert assigned
    assert missing == ["module.scale"]
    assert unexpected == ["module.surplus"]
    assert "scale" in message
    assert "surplus" in message


def test_module_versions_reach_the_inner_modules(alone: Callable[..., Any]) -> None:
    def look() -> list[Any]:
        seen: list[Any] = []

        class Versioned(nn.Linear):
            _version = 7

            def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
                seen.append(local_metadata.get("version"))
                super()._load_from_state_dict(state, prefix, local_metadata, *rest)

        saved = nn.Sequential(Versioned(1, 1)).state_dict()
        prepare_model(nn.Sequential(Versioned(1, 1))).load_state_dict(saved)
        outer = nn.ModuleDict({"part": prepare_model(nn.Sequential(Versioned(1, 1)))})
        outer.load_state_dict(outer.state_dict())
        return seen

    assert alone(look) == [7, 7]


def test_a_prepared_part_of_a_larger_model_keeps_the_larger_models_keys(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        plain = nn.ModuleDict({"first": Net(), "second": nn.Linear(1, 1)})
        saved = copy.deepcopy(plain.state_dict())
        whole = nn.ModuleDict({"first": prepare_model(Net()), "second": nn.Linear(1, 1)})
        same_keys = list(whole.state_dict()) == list(saved)
        whole.load_state_dict(saved)
        return [same_keys, equal(whole.state_dict(), saved)]

    assert alone(look) == [True, True]


def test_torchs_state_dict_hooks_run(alone: Callable[..., Any]) -> None:
    def look() -> list[str]:
        calls: list[str] = []
        model = prepare_model(Net())
        model.register_state_dict_post_hook(lambda *_: calls.append("saved"))
        model.module.register_state_dict_post_hook(lambda *_: calls.append("saved inside"))
        model.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
        saved = model.state_dict()
        calls_of_saving = list(calls)
        calls.clear()
        model.load_state_dict(saved)
        return [*calls_of_saving, *(call for call in calls if call == "loaded")]

    assert alone(look) == ["saved inside", "saved", "loaded"]


def test_torchs_distributed_checkpoint_functions_keep_working(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        from torch.distributed.checkpoint import state_dict as dcp

        net = Net()
        model = prepare_model(net)
        got = dcp.get_model_state_dict(model)
        other = prepare_model(Net())
        dcp.set_model_state_dict(other, dict(got))
        part = nn.ModuleDict({"part": model})
        optimizer = torch.optim.Adam(model.parameters())
        both, _ = dcp.get_state_dict(model, optimizer)
        return [
            equal(got, net.state_dict()),
            equal(other.state_dict(), net.state_dict()),
            list(dcp.get_model_state_dict(part)) == [f"part.{key}" for key in net.state_dict()],
            list(both) == list(net.state_dict()),
        ]

    assert alone(look) == [True] * 4


def test_copies_and_pickles_of_a_prepared_model_work(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        model = prepare_model(nn.Linear(2, 1))
        twin = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return [equal(copied.state_dict(), model.state_dict()) for copied in (twin, loaded)]

    assert alone(look) == [True, True]


def test_the_users_own_communication_hook_is_used(alone: Callable[..., Any]) -> None:
    def look() -> list[float]:
        # Torch wants the annotations themselves, and this module's are strings.
        def double(state: None, bucket: Any) -> Any:
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() * 2)
            return future

        double.__annotations__.clear()
        model: Any = prepare_model(nn.Linear(1, 1, bias=False))
        model.register_comm_hook(None, double)
        model(torch.ones(1, 1)).sum().backward()
        gradient: list[float] = model.module.weight.grad.flatten().tolist()
        return gradient

    assert alone(look) == [2.0]


def test_a_model_without_trainable_parameters_is_returned_as_it_is(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        frozen = nn.Linear(2, 1).requires_grad_(False)
        model = prepare_model(frozen)
        twin = copy.deepcopy(model)
        return [
            model is frozen,
            model.module is frozen,
            twin.module is twin,
            list(model.state_dict()) == ["weight", "bias"],
        ]

    assert alone(look) == [True] * 4


def test_strategy_none_only_moves_and_preparing_twice_is_once(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        net = Net()
        model = prepare_model(net)
        return [prepare_model(net, parallel_strategy=None) is net, prepare_model(model) is model]

    assert alone(look) == [True, True]


def test_the_model_goes_where_it_is_told(alone: Callable[..., Any]) -> None:
    def look() -> str:
        moved = prepare_model(nn.Linear(1, 1), torch.device("meta"), parallel_strategy=None)
        return str(next(moved.parameters()).device)

    assert alone(look) == "meta"


def test_a_strategy_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'zero'; it must be \"ddp\", \"fsdp\" or None"):
        prepare_model(nn.Linear(1, 1), parallel_strategy="zero")


def test_without_a_process_group_the_error_names_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "_context", lambda: None)
    with pytest.raises(ConfigError, match="TorchTrainer"):
        prepare_model(nn.Linear(1, 1))


NAMES = st.sampled_from(["weight", "module.weight", "module.module.weight", "body.0.bias", "module"])


@given(st.sets(NAMES, min_size=1))
def test_a_key_and_its_prefixed_form_mean_the_same(inner_keys: set[str]) -> None:
    for key in inner_keys:
        assert wrapped_key(key, inner_keys) == f"module.{key}"
        if f"module.{key}" not in inner_keys:
            assert wrapped_key(f"module.{key}", inner_keys) == f"module.{key}"


def test_every_optimizer_step_is_counted_once(alone: Callable[..., Any]) -> None:
    def look() -> list[int]:
        from powertrain.worker.progress import progress

        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        counts = []
        plain = torch.optim.SGD([parameter], lr=0.1)
        for optimizer in (plain, prepare.prepare_optimizer(torch.optim.Adam([parameter]))):
            before = progress.steps
            optimizer.step()
            counts.append(progress.steps - before)
        return counts

    assert alone(look) == [1, 1]


def test_mixed_precision_computes_low_and_answers_in_float32(alone: Callable[..., Any]) -> None:
    def look() -> list[Any]:
        inside: list[torch.dtype] = []
        prepare.accelerate(amp=True)
        net = nn.Linear(2, 2)
        net.register_forward_pre_hook(lambda *_: inside.append(torch.get_autocast_dtype("cpu")))
        model = prepare_model(net)
        optimizer = prepare.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        output = model(torch.ones(1, 2))
        low = torch.allclose(output, output.bfloat16().float())
        prepare.backward(output.sum())
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
    optimizer = prepare.ScaledOptimizer(inner, scaler)
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


def test_reproducibility_repeats_numbers_and_asks_for_determinism(alone: Callable[..., Any]) -> None:
    def look() -> list[Any]:
        import random

        import numpy as np

        draws = []
        for _ in range(2):
            prepare.enable_reproducibility(5)
            draws.append((torch.rand(1).item(), random.random(), np.random.rand()))
        return [
            draws[0] == draws[1],
            torch.are_deterministic_algorithms_enabled(),
            os.environ["CUBLAS_WORKSPACE_CONFIG"],
        ]

    assert alone(look) == [True, True, ":4096:8"]
