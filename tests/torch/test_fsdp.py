"""FSDP2: a sharded model trains like a replicated one, and its state moves between any numbers of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, FSDPModule, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

from powertrain.errors import ConfigError
from powertrain.torch import fsdp, prepare
from powertrain.torch.prepare import prepare_model
from powertrain.worker.data import batch_plan
from powertrain.worker.data.batch_plan import plan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.tanh(self.inner(rows))


class Transformer(nn.Module):
    """Blocks in a list, odd sizes, a buffer, a scalar and a tensor that no rank can have a share of."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(6, 1)
        self.single = nn.Parameter(torch.ones(1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.into(rows)
        for block in self.blocks:
            rows = block(rows)
        result: torch.Tensor = self.out(self.norm(rows)) * self.single
        return result


def prepared(strategy: str, **kwargs: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = prepare_model(Transformer(), parallel_strategy=strategy, parallel_strategy_kwargs=kwargs)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        # The same rows on every rank: then the mean of the gradients does not depend on how many there are.
        rows = torch.rand(8, 5, generator=torch.Generator().manual_seed(step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluate(model: nn.Module) -> None:
    """A forward without a backward, after which FSDP2 leaves the whole parameters registered in the root module."""
    model.eval()
    with torch.no_grad():
        model(torch.ones(8, 5))
    model.train()


def whole(state: Any) -> Any:
    """A copy of a state dict with every shard gathered."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    if not isinstance(state, torch.Tensor):
        return state
    return (state.full_tensor() if isinstance(state, DTensor) else state).clone()


def assert_same(left: Any, right: Any, where: str = "") -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, torch.Tensor):
        torch.testing.assert_close(left, right, msg=lambda text: f"{where}: {text}")
    else:
        assert left == right, where


def save(
    directory: str, strategy: str, kwargs: dict[str, Any] | None = None, *, evaluates: bool = False
) -> Any:
    """Train and save on this rank; what the whole model and optimizer state were."""
    from powertrain.checkpoint.state.saver import StateSaver

    torch.manual_seed(dist.get_rank())
    model, optimizer = prepared(strategy, **(kwargs or {}))
    train(model, optimizer)
    if evaluates:
        evaluate(model)
    own = Path(directory, f"rank-{dist.get_rank()}")
    own.mkdir(parents=True)
    saver = StateSaver(dist.get_rank(), dist.get_world_size())
    saver.save({"model": model, "optimizer": optimizer, "epoch": 3}, str(own))
    return whole(dict(model.state_dict())), whole(optimizer.state_dict())


def load(
    directory: str, strategy: str, kwargs: dict[str, Any] | None = None, *, evaluates: bool = False
) -> Any:
    """Load on this rank, train on; the whole state as it was loaded and as it is in the end."""
    from powertrain.checkpoint.state.saver import StateLoader

    torch.manual_seed(100 + dist.get_rank())
    model, optimizer = prepared(strategy, **(kwargs or {}))
    if evaluates:
        evaluate(model)
    loader = StateLoader(directory, dist.get_rank(), dist.get_world_size())
    extras = loader.load({"model": model, "optimizer": optimizer})
    assert extras == {"epoch": 3}
    loaded = whole(dict(model.state_dict())), whole(optimizer.state_dict())
    train(model, optimizer, 1)
    return loaded, whole(dict(model.state_dict()))


def merged(directory: Path, world_size: int) -> str:
    """What the ranks saved, put together as the run would."""
    for rank in range(world_size):
        shutil.copytree(directory / f"rank-{rank}", directory / "merged", dirs_exist_ok=True)
    return str(directory / "merged")


def hybrid() -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return {"mesh": mesh, "sharding_strategy": "HYBRID_SHARD"}


# -- training


def test_a_sharded_model_trains_like_a_replicated_one(ranks: Callable[[int], Any]) -> None:
    def run(strategy: str) -> Any:
        torch.manual_seed(dist.get_rank())  # rank 0's weights count, as with DDP
        model, optimizer = prepared(strategy)
        train(model, optimizer)
        return whole(dict(model.state_dict()))

    group = ranks(2)
    (sharded, other), (replicated, _) = group.execute(run, "fsdp"), group.execute(run, "ddp")
    assert_same(sharded, replicated)
    assert_same(sharded, other)


def test_the_members_of_module_lists_are_sharded_by_themselves(ranks: Callable[[int], Any]) -> None:
    def look() -> Any:
        net = Transformer()
        model: Any = prepare_model(net, parallel_strategy="fsdp")
        again = prepare_model(model, parallel_strategy="fsdp")
        return (
            [name for name, part in model.named_modules() if isinstance(part, FSDPModule)],
            model.module is net and again is model,
            model.into.weight.to_local().shape,
        )

    names, one_object, shape = ranks(2).execute(look)[0]
    assert names == ["", "blocks.0", "blocks.1"]
    assert one_object
    assert shape == (3, 5)


# -- ranks with unequal numbers of samples


class Line(nn.Module):
    """Two layers without an activation, sharded apart, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5, dtype=torch.float64)])
        self.out = nn.Linear(5, 1, dtype=torch.float64)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.layers[0](rows))
        return result


def rows_of(total: int) -> torch.Tensor:
    return torch.rand(total, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(total))


def error_of_one_step(model: Any, total: int, limit: int | None = None) -> float:
    """How far the gradients of one step are from those of a single process with all the rows."""
    part = plan(total, dist.get_rank(), dist.get_world_size(), limit)
    batch_plan.gradient_weight.set(part.weight)
    batch = rows_of(total)
    model.zero_grad()
    for micro in part:
        model.set_requires_gradient_sync(micro.is_last)
        rows = batch[micro.start : micro.start + micro.size]
        (model(rows).square().mean() * micro.loss_scale).backward()
    alone = Line()
    alone.load_state_dict(whole(dict(model.state_dict())))
    alone(batch).square().mean().backward()
    got = [parameter.grad.full_tensor() for parameter in model.parameters()]
    wanted = [parameter.grad for parameter in alone.parameters()]
    return max((one - other).abs().max().item() for one, other in zip(got, wanted, strict=True))


def test_unequal_ranks_of_a_sharded_model_give_the_gradients_of_the_whole_batch(
    ranks: Callable[[int], Any],
) -> None:
    def look() -> list[float]:
        model = prepare_model(Line(), parallel_strategy="fsdp")
        steps = ((15, None), (16, None), (2, None), (16, 2), (2, 1), (5, 1), (15, 4))
        return [error_of_one_step(model, total, limit) for total, limit in steps]

    for errors in ranks(3).execute(look):
        assert max(errors) <= 1e-12, errors


def test_a_model_that_the_user_sharded_and_one_prepared_twice_are_weighted_once(
    ranks: Callable[[int], Any],
) -> None:
    def look() -> list[float]:
        torch.manual_seed(0)
        model = Line()
        fully_shard(model.layers[0])
        fully_shard(model)
        errors = []
        for _ in range(2):
            assert prepare_model(model, parallel_strategy="fsdp") is model
            errors.append(error_of_one_step(model, 16))
        return errors

    for errors in ranks(3).execute(look):
        assert max(errors) <= 1e-12, errors


def test_unequal_ranks_of_a_hybrid_sharded_model_are_exact_too(ranks: Callable[[int], Any]) -> None:
    def look() -> list[float]:
        model = prepare_model(Line(), parallel_strategy="fsdp", parallel_strategy_kwargs=hybrid())
        return [error_of_one_step(model, total) for total in (16, 18, 3)]

    for errors in ranks(4).execute(look):
        assert max(errors) <= 1e-12, errors


def test_where_gradients_cannot_be_weighted_the_first_unequal_weight_is_refused(
    ranks: Callable[[int], Any],
) -> None:
    def look() -> list[str]:
        def refusal(act: Callable[[], Any]) -> str:
            try:
                act()
            except ConfigError as error:
                return str(error)
            return ""

        kwargs = hybrid()  # of two ranks: two replicas of one shard
        model = prepare_model(Line(), parallel_strategy="fsdp", parallel_strategy_kwargs=kwargs)
        even = refusal(lambda: error_of_one_step(model, 4))
        replicated = refusal(lambda: error_of_one_step(model, 3))
        prepare.begin()
        older = prepare_model(Line(), parallel_strategy="fsdp")
        for part in older.modules():
            if isinstance(part, FSDPModule):
                for group in fsdp._parameter_groups(part):
                    del group._reduce_scatter_comm
        return [even, replicated, refusal(lambda: batch_plan.gradient_weight.set(0.5))]

    even, replicated, older = ranks(2).execute(look)[0]
    assert even == ""
    assert "replicated, not sharded" in replicated
    assert "a newer torch does" in older
    for message in (replicated, older):
        assert "a global batch size that the number of workers divides" in " ".join(message.split())


# -- state


@pytest.mark.timeout(120)
def test_state_of_two_ranks_loads_on_three_and_on_one_and_without_fsdp(
    ranks: Callable[[int], Any], tmp_path: Path
) -> None:
    saved = ranks(2).execute(save, str(tmp_path), "fsdp")[0]
    directory = merged(tmp_path, 2)
    ends = []
    for world_size, strategy in ((3, "fsdp"), (1, "fsdp"), (2, "ddp")):
        for loaded, end in ranks(world_size).execute(load, directory, strategy):
            assert_same(dict(zip("mo", loaded, strict=True)), dict(zip("mo", saved, strict=True)))
            ends.append(end)
    for end in ends:
        assert_same(end, ends[0])


def test_state_of_a_replicated_model_loads_into_a_sharded_one(
    ranks: Callable[[int], Any], tmp_path: Path
) -> None:
    saved = ranks(3).execute(save, str(tmp_path), "ddp")[0]
    for loaded, _ in ranks(2).execute(load, merged(tmp_path, 3), "fsdp"):
        assert_same(dict(zip("mo", loaded, strict=True)), dict(zip("mo", saved, strict=True)))


def test_state_that_is_saved_and_loaded_after_an_evaluation_names_the_parameters_of_the_optimizer(
    ranks: Callable[[int], Any], tmp_path: Path
) -> None:
    saved = ranks(2).execute(partial(save, evaluates=True), str(tmp_path), "fsdp")[0]
    for loaded, _ in ranks(2).execute(partial(load, evaluates=True), merged(tmp_path, 2), "fsdp"):
        assert_same(dict(zip("mo", loaded, strict=True)), dict(zip("mo", saved, strict=True)))


def test_replicated_shards_are_written_once(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    def save_hybrid(directory: str) -> Any:
        return save(directory, "fsdp", hybrid())

    saved = ranks(4).execute(save_hybrid, str(tmp_path))[0]
    directory = merged(tmp_path, 4)
    written = sum(
        tensor.numel()
        for path in Path(directory, "state").glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if name.startswith("model.")
    )
    assert written == sum(tensor.numel() for tensor in saved[0].values())
    for loaded, _ in ranks(2).execute(load, directory, "fsdp"):
        assert_same(dict(zip("mo", loaded, strict=True)), dict(zip("mo", saved, strict=True)))


# -- arguments


def translated(**arguments: Any) -> Any:
    return fsdp._translated(arguments, Transformer())


def test_arguments_of_fsdp1_are_translated() -> None:
    assert translated(sharding_strategy=ShardingStrategy.FULL_SHARD).shard == {"reshard_after_forward": True}
    assert translated(sharding_strategy="SHARD_GRAD_OP").shard == {"reshard_after_forward": False}
    assert "offload_policy" in translated(cpu_offload=CPUOffload(offload_params=True)).shard
    assert translated(cpu_offload=CPUOffload(offload_params=False)).shard == {}
    mixed = translated(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16))
    assert mixed.shard["mp_policy"].param_dtype is torch.bfloat16
    assert mixed.shard["mp_policy"].reduce_dtype is torch.float32
    assert mixed.buffer_dtype is torch.bfloat16
    layer = nn.Linear(2, 2)
    assert translated(ignored_modules=[layer]).shard == {"ignored_params": set(layer.parameters())}
    assert not translated(sync_module_states=False).from_rank_zero
    assert translated(use_orig_params=True, limit_all_gathers=True, forward_prefetch=False).shard == {}


def test_arguments_of_fsdp2_are_passed_on() -> None:
    assert translated(reshard_after_forward=2, mesh="mesh").shard == {
        "reshard_after_forward": 2,
        "mesh": "mesh",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, 'use parallel_strategy="ddp"'),
        ({"sharding_strategy": ShardingStrategy.HYBRID_SHARD}, "replicas, shards"),
        ({"sharding_strategy": "SHARD_ALL"}, "FULL_SHARD, SHARD_GRAD_OP"),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, "Keep reshard_after_forward"),
        ({"use_orig_params": False}, "always keeps the model's own parameters"),
        ({"forward_prefetch": True}, "set_modules_to_forward_prefetch"),
        ({"backward_prefetch": "BACKWARD_POST"}, "set_modules_to_backward_prefetch"),
        ({"process_group": object()}, "init_device_mesh"),
        ({"param_init_fn": print}, "to_empty"),
        ({"device_id": 0}, "move_to_device"),
        ({"auto_wrap_policy": 3}, "a set of module classes"),
        ({"find_unused_parameters": True}, "'find_unused_parameters', which FSDP2 does not know"),
    ],
)
def test_what_fsdp2_has_not_is_refused_by_name(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translated(**arguments)
    assert words in str(caught.value)
    assert next(iter(arguments)) in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "names"),
    [
        ({Block}, ["blocks.0", "blocks.1"]),
        (ModuleWrapPolicy({Block}), ["blocks.0", "blocks.1"]),
        (partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}), ["blocks.0", "blocks.1"]),
        (CustomPolicy(lambda module: isinstance(module, nn.BatchNorm1d)), ["norm"]),
        (partial(size_based_auto_wrap_policy, min_num_params=42), ["blocks.0.inner", "blocks.1.inner", ""]),
        (None, []),
    ],
)
def test_policies_of_fsdp1_choose_the_same_parts(policy: Any, names: list[str]) -> None:
    model = Transformer()
    name_of = {module: name for name, module in model.named_modules()}
    choose = translated(auto_wrap_policy=policy).choose_parts
    assert [name_of[part] for part in choose(model)] == names


def test_experts_inside_a_block_stay_with_their_block() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Sequential(nn.ModuleList([nn.Linear(1, 1)]))]), nn.Linear(1, 1))
    name_of = {module: name for name, module in model.named_modules()}
    assert [name_of[part] for part in fsdp.repeated_parts(model)] == ["0.0"]


# -- in whole runs


def sharded_loop(config: dict[str, Any]) -> Any:
    """Two more epochs from where the last run of this name ended; what the whole model and optimizer are."""
    import powertrain
    from powertrain.worker.checkpoints.state import load_state, save_state

    model, optimizer = prepared("fsdp")
    loaded = load_state(model=model, optimizer=optimizer)
    before = whole(dict(model.state_dict())), whole(optimizer.state_dict())
    start = loaded["epoch"] + 1 if loaded else 0
    for epoch in range(start, start + 2):
        train(model, optimizer)
        saved = save_state(model=model, optimizer=optimizer, epoch=epoch)
        powertrain.report({"epoch": epoch}, checkpoint=saved)
    return loaded, before, (whole(dict(model.state_dict())), whole(optimizer.state_dict()))


@pytest.mark.timeout(120)
def test_a_sharded_run_goes_on_with_another_number_of_workers() -> None:
    from powertrain import RunConfig, ScalingConfig
    from powertrain.torch import TorchTrainer

    def run(workers: int) -> Any:
        return TorchTrainer(
            sharded_loop,
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=RunConfig(name="sharded", verbose=0),
        ).fit()

    ended = None
    for number, workers in enumerate((2, 3, 1)):
        loaded, before, after = run(workers).return_value
        assert loaded == (None if ended is None else {"epoch": 2 * number - 1})
        if ended is not None:
            assert_same(dict(zip("mo", before, strict=True)), dict(zip("mo", ended, strict=True)))
        ended = after
