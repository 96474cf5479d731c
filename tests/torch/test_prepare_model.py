"""A prepared model averages gradients, and its state dict is that of the model inside."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from powertrain.errors import ConfigError
from powertrain.torch import device, prepare
from powertrain.torch.backend import TorchBackend
from powertrain.torch.config import TorchConfig
from powertrain.torch.prepare import prepare_model
from powertrain.torch.state_keys import wrapped_key
from powertrain.worker.data import batch_plan
from powertrain.worker.data.batch_plan import plan

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


def test_one_worker_exchanges_nothing_and_trains_as_the_model_inside(alone: Callable[..., Any]) -> None:
    def train() -> tuple[bool, bool, int]:
        torch.manual_seed(0)
        net = Net()
        plain = copy.deepcopy(net)
        model: Any = prepare_model(net)
        asked: list[str] = []
        model.reducer = _Refuses(asked)  # what a step of DDP's cannot do without
        for trained in (plain, model):
            optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
            for step in range(3):
                rows = torch.full((4, 3), float(step))
                with model.no_sync() if step == 1 else contextlib.nullcontext():
                    trained(rows).sum().backward()
                if step != 1:
                    optimizer.step()
                    optimizer.zero_grad()
        return equal(plain.state_dict(), model.state_dict()), model.module is net, len(asked)

    assert alone(train) == (True, True, 0)


class _Refuses:
    """Notes each name that is looked up, and has none of them."""

    def __init__(self, asked: list[str]) -> None:
        self._asked = asked

    def __getattr__(self, name: str) -> Any:
        self._asked.append(name)
        raise AssertionError(f"reducer.{name} was used")


def test_the_state_dict_has_the_models_own_keys_order_values_and_versions(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        net = Net()
        plain: Any = net.state_dict()
        state: Any = prepare_model(net).state_dict()
        versions, own = state._metadata, plain._metadata
        return [equal(state, plain), all(versions[name] == own[name] for name in own)]

    assert alone(look) == [True, True]


def test_state_dicts_load_with_and_without_prefix(alone: Callable[..., Any]) -> None:
    def look() -> list[bool]:
        saved = Net().state_dict()
        prefixed = {f"module.{key}": value for key, value in saved.items()}
        answers = []
        for state in (saved, dict(saved), prefixed):
            model: Any = prepare_model(Net())
            before = set(state)
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
        model: Any = prepare_model(Net())
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
        model: Any = prepare_model(Net())
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


# -- ranks with unequal numbers of samples


class Weighted(nn.Module):
    """Parameters of two kinds, one of which not every row needs."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.always = nn.Linear(3, 2, dtype=dtype)
        self.sometimes = nn.Linear(3, 2, dtype=torch.float32)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.always(rows)
        if rows[0, 0] > 0:
            out = out + self.sometimes(rows.float())
        return out.square().sum(1)


def rows_of(total: int) -> torch.Tensor:
    return torch.rand(total, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(total)) + 0.1


def make_linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, dtype=torch.float64)


def loss_of_linear(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(rows).square().sum(1).mean()
    return loss


def one_step(model: Any, total: int, limit: int | None = None, filler: float | None = None) -> None:
    """The loop of BatchPlan's own description. ``filler`` fills the row of a rank that has none."""
    part = plan(total, dist.get_rank(), dist.get_world_size(), limit)
    batch_plan.gradient_weight.set(part.weight)
    batch = rows_of(total)
    for micro in part:
        rows = batch[micro.start : micro.start + micro.size]
        if part.samples == 0 and filler is not None:
            rows = torch.full_like(rows, filler)
        with contextlib.nullcontext() if micro.is_last else model.no_sync():
            (loss_of_linear(model, rows) * micro.loss_scale).backward()


def full_batch_gradients(total: int) -> list[torch.Tensor]:
    """What a single process computes from all rows at once."""
    model = make_linear()
    loss_of_linear(model, rows_of(total)).backward()
    return gradients_of(model)


def gradients_of(model: Any) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def difference(gradients: list[torch.Tensor], expected: list[torch.Tensor], factor: float = 1.0) -> float:
    return max(
        (got - factor * wanted).abs().max().item() for got, wanted in zip(gradients, expected, strict=True)
    )


@pytest.fixture
def three(forked: Callable[[int], Any]) -> Any:
    """Three ranks in their process group."""
    group = forked(3)
    TorchBackend().on_start(group, GLOO)
    return group


def test_unequal_ranks_give_the_gradients_of_the_whole_batch(three: Any) -> None:
    def look() -> list[float]:
        answers = []
        model = prepare_model(make_linear())
        # 15 divides evenly; then the hook is put into a model in use; 2 leaves a rank with a filler only.
        for total, limit in ((15, None), (16, None), (2, None), (16, 2), (2, 1), (5, 1), (15, 4)):
            model.zero_grad()
            one_step(model, total, limit)
            answers.append(difference(gradients_of(model), full_batch_gradients(total)))
        return answers

    for differences in three.execute(look):
        assert max(differences) <= 1e-12, differences


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
    ],
    ids=lambda options: "+".join(options),
)
def test_unequal_ranks_are_exact_with_every_option_of_ddp(three: Any, options: dict[str, Any]) -> None:
    def look() -> list[float]:
        answers = []
        model = prepare_model(make_linear(), parallel_strategy_kwargs=options)
        # A single pass first: torch itself fails where the first pass with a static graph is under no_sync().
        for total, limit in ((16, None), (16, 2), (2, 1), (15, 2)):
            model.zero_grad()
            one_step(model, total, limit)
            answers.append(difference(gradients_of(model), full_batch_gradients(total)))
        return answers

    for differences in three.execute(look):
        assert max(differences) <= 1e-12, differences


def test_not_a_number_in_a_filler_row_reaches_no_gradient(three: Any) -> None:
    def look() -> float:
        model = prepare_model(make_linear())
        one_step(model, 2, filler=float("nan"))
        return difference(gradients_of(model), full_batch_gradients(2))

    assert max(three.execute(look)) <= 1e-12


def test_the_users_hook_is_given_weighted_gradients_whenever_it_comes(three: Any) -> None:
    def look(when: str) -> list[float]:
        def doubled_average(state: dist.ProcessGroup, bucket: dist.GradBucket) -> Any:
            future = default_hooks.allreduce_hook(state, bucket)
            return future.then(lambda done: done.value() * 2)

        doubled_average.__annotations__.clear()
        answers = []
        if when == "after":
            batch_plan.gradient_weight.set(plan(16, dist.get_rank(), 3).weight)
        model: Any = prepare_model(make_linear())
        model.register_comm_hook(dist.group.WORLD, doubled_average)
        for total in (16, 2, 15):
            model.zero_grad()
            one_step(model, total)
            answers.append(difference(gradients_of(model), full_batch_gradients(total), 2.0))
        return answers

    for when in ("before", "after"):
        for differences in three.execute(look, when):
            assert max(differences) <= 1e-12, (when, differences)


def test_parameters_of_several_types_some_unused_are_weighted_alike(three: Any) -> None:
    def look() -> list[float]:
        torch.manual_seed(0)
        alone = Weighted()
        model = prepare_model(copy.deepcopy(alone), parallel_strategy_kwargs={"find_unused_parameters": True})
        rows = rows_of(16)
        rows[:5, 0] = -1.0  # rank 0's rows do not need one of the layers
        part = plan(16, dist.get_rank(), 3)
        batch_plan.gradient_weight.set(part.weight)
        model(rows[part.start : part.start + part.samples]).mean().backward()
        (alone(rows[:5]).sum() / 16).backward()
        (alone(rows[5:]).sum() / 16).backward()
        exact, single = (range(2), range(2, 4))
        got, wanted = gradients_of(model), gradients_of(alone)
        return [difference([got[i] for i in which], [wanted[i] for i in which]) for which in (exact, single)]

    for exact, single in three.execute(look):
        assert exact <= 1e-12
        assert single <= 1e-6


def test_scaled_losses_of_mixed_precision_are_weighted_alike(three: Any) -> None:
    def look() -> float:
        model = prepare_model(make_linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        part = plan(2, dist.get_rank(), 3)
        batch_plan.gradient_weight.set(part.weight)
        rows = rows_of(2)[part.start : part.start + 1]
        if not part.samples:
            rows = torch.full_like(rows, float("inf"))  # must not make the scaler leave the step out
        before = [parameter.detach().clone() for parameter in model.parameters()]
        scaler.scale(loss_of_linear(model, rows)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = [old - new.detach() for old, new in zip(before, model.parameters(), strict=True)]
        return difference(moved, full_batch_gradients(2))

    assert max(three.execute(look)) <= 1e-12


def test_sparse_gradients_are_weighted_too(three: Any) -> None:
    def look(total: int) -> float:
        torch.manual_seed(0)
        table = nn.Embedding(8, 2, sparse=True, dtype=torch.float64)
        alone = copy.deepcopy(table)
        model: Any = prepare_model(table)
        numbers = torch.arange(total) % 8
        part = plan(total, dist.get_rank(), 3)
        batch_plan.gradient_weight.set(part.weight)
        model(numbers[part.start : part.start + max(part.samples, 1)]).square().sum(1).mean().backward()
        alone(numbers).square().sum(1).mean().backward()
        both: list[Any] = [model.module, alone]
        got, wanted = (one.weight.grad.to_dense() for one in both)
        return difference([got], [wanted])

    for total in (16, 2):
        assert max(three.execute(look, total)) <= 1e-12


def test_gradients_averaged_after_every_pass_add_up_to_the_same(three: Any) -> None:
    def look() -> float:
        model = prepare_model(make_linear())
        part = plan(16, dist.get_rank(), 3, 2)
        batch_plan.gradient_weight.set(part.weight)
        for micro in part:
            rows = rows_of(16)[micro.start : micro.start + micro.size]
            (loss_of_linear(model, rows) * micro.loss_scale).backward()
        return difference(gradients_of(model), full_batch_gradients(16))

    assert max(three.execute(look)) <= 1e-12


def test_copies_and_pickles_of_a_weighted_model_are_weighted(three: Any) -> None:
    def look() -> list[float]:
        model: Any = prepare_model(make_linear())
        model.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
        early = copy.deepcopy(model)
        one_step(model, 16)
        model.zero_grad()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        answers = []
        for one in (early, copy.deepcopy(model), torch.load(file, weights_only=False)):
            one_step(one, 16)
            answers.append(difference(gradients_of(one), full_batch_gradients(16)))
        return answers

    for differences in three.execute(look):
        assert max(differences) <= 1e-12, differences


def test_even_ranks_keep_torchs_own_averaging_and_models_are_let_go(three: Any) -> None:
    def look() -> list[Any]:
        model: Any = prepare_model(make_linear())
        one_step(model, 15)
        hooked = [model in prepare._reductions]
        one_step(model, 16)
        one_step(model, 15)
        hooked.append(model in prepare._reductions)
        seen = weakref.ref(model)
        del model
        gc.collect()
        return [hooked, seen() is None]

    assert three.execute(look) == [[[False, True], True]] * 3


def test_a_model_that_the_user_wrapped_and_one_prepared_twice_are_weighted_once(three: Any) -> None:
    def look() -> list[float]:
        wrapped = DistributedDataParallel(make_linear())
        answers = []
        for model in (prepare_model(wrapped), prepare_model(prepare_model(wrapped))):
            assert model is wrapped
            model.zero_grad()
            one_step(model, 16)
            answers.append(difference(gradients_of(model), full_batch_gradients(16)))
        return answers

    for differences in three.execute(look):
        assert max(differences) <= 1e-12, differences


def test_a_second_hook_and_one_put_in_by_the_back_door_are_refused(alone: Callable[..., Any]) -> None:
    def look() -> list[str]:
        texts = []
        twice: Any = prepare_model(make_linear())
        twice.register_comm_hook(None, default_hooks.allreduce_hook)
        try:
            twice.register_comm_hook(None, default_hooks.allreduce_hook)
        except RuntimeError as error:
            texts.append(str(error))
        hidden: Any = prepare_model(make_linear())
        hidden._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        try:
            batch_plan.gradient_weight.set(0.5)
        except ConfigError as error:
            texts.append(str(error))
        return texts

    twice, hidden = alone(look)
    assert "one communication hook" in twice
    assert "register_comm_hook(state, hook)" in hidden
    assert "that the number of workers divides" in hidden


def test_where_ddp_reduces_inside_compiled_code_a_weight_is_refused(alone: Callable[..., Any]) -> None:
    def look() -> list[Any]:
        model: Any = prepare_model(make_linear())
        model._use_python_reducer = True  # what torch sets by its own switch, which would need a compiler
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        try:
            batch_plan.gradient_weight.set(0.5)
        except ConfigError as error:
            return [model._comm_hooks[0][0].__name__, str(error)]
        return []

    hook, message = alone(look)
    assert hook == "fp16_compress_hook", "it is torch's business alone"
    assert "python_reducer" in message


def test_a_new_training_function_begins_with_equal_ranks(alone: Callable[..., Any]) -> None:
    def look() -> float:
        batch_plan.gradient_weight.set(0.5)
        prepare.begin()
        return batch_plan.gradient_weight.value

    assert alone(look) == 1.0


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


def test_the_model_goes_to_the_requested_device(alone: Callable[..., Any]) -> None:
    def look() -> str:
        moved = prepare_model(nn.Linear(1, 1), torch.device("meta"), parallel_strategy=None)
        return str(next(moved.parameters()).device)

    assert alone(look) == "meta"


def test_a_strategy_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'zero'; it must be \"ddp\", \"fsdp\" or None"):
        prepare_model(nn.Linear(1, 1), parallel_strategy="zero")


def test_without_a_process_group_the_error_names_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (device, prepare):
        monkeypatch.setattr(module, "context", lambda caller: None)
    with pytest.raises(ConfigError, match="TorchTrainer"):
        prepare_model(nn.Linear(1, 1))


NAMES = st.sampled_from(["weight", "module.weight", "module.module.weight", "body.0.bias", "module"])


@given(st.sets(NAMES, min_size=1))
def test_a_key_and_its_prefixed_form_mean_the_same(inner_keys: set[str]) -> None:
    for key in inner_keys:
        assert wrapped_key(key, inner_keys) == f"module.{key}"
        if f"module.{key}" not in inner_keys:
            assert wrapped_key(f"module.{key}", inner_keys) == f"module.{key}"


def test_reproducibility_repeats_numbers_and_turns_on_determinism(alone: Callable[..., Any]) -> None:
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
