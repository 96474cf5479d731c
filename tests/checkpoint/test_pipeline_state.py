"""Ranks that hold different tensors save all of them, and get them back by name, however layers are spread then."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from powertrain.checkpoint.parallel.fitting import _group_of
from powertrain.checkpoint.parallel.holdings import Holdings, needs_agreement
from powertrain.checkpoint.state.pieces import TensorPiece
from powertrain.errors import CheckpointError


class Block(nn.Module):
    """A layer with a buffer."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = rows + self.down(torch.tanh(self.up(rows)))
        return result

    def get_extra_state(self) -> dict[str, Any]:
        """What is not a tensor, and a tensor beside it."""
        return {"kept": int(self.calls), "as tensor": self.calls.clone()}

    def set_extra_state(self, kept: dict[str, Any]) -> None:
        assert kept["kept"] == int(kept["as tensor"])


class Net(nn.Module):
    """Four layers by number; a stage keeps some of them, under the numbers they have in the whole."""

    def __init__(self, layers: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        torch.manual_seed(5)
        whole = [Block() for _ in range(4)]
        self.layers = nn.ModuleDict({str(number): whole[number] for number in layers})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            rows = layer(rows)
        return rows


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [one for one in model.parameters() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in model.parameters() if one.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, foreach=False)


def train_each_layer(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Train layers apart from each other: then each ends the same wherever it is."""
    for step in range(steps):
        for number, layer in model.layers.items():  # type: ignore[union-attr,operator]
            rows = torch.rand(4, 6, generator=torch.Generator().manual_seed(10 * step + int(number)))
            layer(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors of this rank: those of the model, and what the optimizer keeps about each."""
    tensors = {key: whole(one) for key, one in model.state_dict().items() if isinstance(one, torch.Tensor)}
    for key, parameter in model.named_parameters():
        for kept, one in optimizer.state[parameter].items():
            tensors[f"{key}:{kept}"] = whole(one)
    return tensors


def save(directory: str, objects: dict[str, Any]) -> None:
    from powertrain.checkpoint.state.saver import StateSaver

    own = Path(directory, f"rank-{dist.get_rank()}")
    own.mkdir(parents=True)
    StateSaver(dist.get_rank(), dist.get_world_size()).save(objects, str(own))


def load(directory: str, objects: dict[str, Any]) -> dict[str, Any]:
    from powertrain.checkpoint.state.saver import StateLoader

    return StateLoader(directory, dist.get_rank(), dist.get_world_size()).load(objects)


def merged(directory: Path, world_size: int) -> str:
    for rank in range(world_size):
        shutil.copytree(directory / f"rank-{rank}", directory / "merged", dirs_exist_ok=True)
    return str(directory / "merged")


def save_stages(directory: str, stages: list[tuple[int, ...]]) -> dict[str, Any]:
    model = Net(stages[dist.get_rank()])
    optimizer = optimizer_of(model)
    train_each_layer(model, optimizer)
    save(directory, {"model": model, "optimizer": optimizer, "rank": dist.get_rank()})
    return by_name(model, optimizer)


def load_stages(directory: str, stages: list[tuple[int, ...]]) -> Any:
    model = Net(stages[dist.get_rank()])
    optimizer = optimizer_of(model)
    extras = load(directory, {"model": model, "optimizer": optimizer})
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    return by_name(model, optimizer), extras["rank"], decays


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for key in left:

        def named(text: str, key: str = key) -> str:
            return f"{key}: {text}"

        torch.testing.assert_close(left[key], right[key], msg=named)


TWO_BY_TWO: list[tuple[int, ...]] = [(0, 1), (2, 3), (0, 1), (2, 3)]


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    model = Net()
    optimizer = optimizer_of(model)
    train_each_layer(model, optimizer)
    return by_name(model, optimizer)


# -- pipelines


@pytest.mark.timeout(120)
def test_stages_come_back_by_name_also_where_the_pipeline_is_cut_elsewhere(
    ranks: Callable[[int], Any], tmp_path: Path, expected: dict[str, Any]
) -> None:
    group = ranks(4)
    group.execute(save_stages, str(tmp_path), TWO_BY_TWO)
    directory = merged(tmp_path, 4)
    layouts: list[list[tuple[int, ...]]] = [
        TWO_BY_TWO,
        [(0,), (1,), (2,), (3,)],
        [(3, 0), (1, 2), (0, 3), (1, 2)],
        [(0, 1, 2, 3)] * 4,
    ]
    for stages in layouts:
        for rank, (tensors, own, decays) in enumerate(group.execute(load_stages, directory, stages)):
            layers = tuple(f"layers.{number}." for number in stages[rank])
            assert_same(tensors, {key: one for key, one in expected.items() if key.startswith(layers)})
            assert own == rank
            assert decays == [0.1, 0.0]
    for tensors, own, _ in ranks(2).execute(load_stages, directory, [(0, 1, 2), (3,)]):
        assert tensors.items()
        assert all(torch.equal(one, expected[key]) for key, one in tensors.items())
        assert own == 0


def test_a_stage_is_written_once_by_the_ranks_that_hold_it(
    ranks: Callable[[int], Any], tmp_path: Path, expected: dict[str, Any]
) -> None:
    ranks(4).execute(save_stages, str(tmp_path), TWO_BY_TWO)
    by_rank = [
        load_file(Path(merged(tmp_path, 4), "state", f"rank-{rank:05d}.safetensors")) for rank in range(4)
    ]
    shared = [key for tensors in by_rank for key in tensors if key.startswith(("model.", "optimizer.state."))]
    own = [key for key in by_rank[0] if "_extra_state" in key]
    assert len(shared) - len(own) == len(expected)
    assert len(set(shared)) == len(shared)
    assert all(any(key in tensors for key in shared) for tensors in by_rank), "replicas share the work"


def test_a_replicated_state_loads_into_stages_and_back(
    ranks: Callable[[int], Any], tmp_path: Path, expected: dict[str, Any]
) -> None:
    def save_replicated(directory: str) -> None:
        model = nn.parallel.DistributedDataParallel(Net())
        optimizer = optimizer_of(model)
        train_each_layer(model.module, optimizer)
        save(directory, {"model": model, "optimizer": optimizer, "rank": dist.get_rank()})

    group = ranks(2)
    group.execute(save_replicated, str(tmp_path))
    for tensors, _, decays in group.execute(load_stages, merged(tmp_path, 2), [(0, 1), (2, 3)]):
        assert len(tensors) == len(expected) / 2
        assert all(torch.equal(one, expected[key]) for key, one in tensors.items())
        assert decays == [0.1, 0.0]


def test_a_layer_that_no_rank_takes_is_named(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    group = ranks(2)
    group.execute(save_stages, str(tmp_path), [(0, 1), (2, 3)])
    with pytest.raises(CheckpointError, match=r"'model', which lacks 'model\.layers\.3"):
        group.execute(load_stages, merged(tmp_path, 2), [(0, 1), (2,)])


def test_a_stage_is_read_outside_a_run_only_as_the_whole_model(
    ranks: Callable[[int], Any], tmp_path: Path, expected: dict[str, Any]
) -> None:
    from powertrain.checkpoint.state.saver import StateLoader

    ranks(2).execute(save_stages, str(tmp_path), [(0, 1), (2, 3)])
    loader = StateLoader(merged(tmp_path, 2), 0, 1)
    model = Net()
    loader.load({"model": model}, generators=False)
    assert torch.equal(model.layers["3"].up.weight, expected["layers.3.up.weight"])  # type: ignore[union-attr,arg-type]
    with pytest.raises(CheckpointError, match="which lacks"):
        loader.load({"model": Net((0, 1))}, generators=False)


def test_one_rank_alone_loads_a_whole_model(
    ranks: Callable[[int], Any], tmp_path: Path, expected: dict[str, Any]
) -> None:
    def load_whole(directory: str) -> torch.Tensor:
        model = Net()
        load(directory, {"model": model})
        return model.state_dict()["layers.3.up.weight"]

    def load_another(directory: str) -> None:
        load(directory, {"model": nn.Linear(1, 1)})

    group = ranks(2)
    group.execute(save_stages, str(tmp_path), [(0, 1), (2, 3)])
    directory = merged(tmp_path, 2)
    assert torch.equal(group.execute_single(0, load_whole, directory), expected["layers.3.up.weight"])
    with pytest.raises(CheckpointError, match=r"it lacks 'model\.bias', 'model\.weight'"):
        group.execute_single(0, load_another, directory)


# -- tensors that contradict each other


def test_different_values_under_one_name_are_refused_on_all_ranks(
    ranks: Callable[[int], Any], tmp_path: Path
) -> None:
    def attempt(directory: str) -> str:
        torch.manual_seed(dist.get_rank())
        try:
            save(directory, {"model": nn.Sequential(nn.Linear(3, 3))})
        except CheckpointError as error:
            return str(error)
        return ""

    one, other = ranks(2).execute(attempt, str(tmp_path))
    assert one == other
    assert "different values of 'model.0.bias' (ranks 0 and 1), 'model.0.weight' (ranks 0 and 1)" in one
    assert "save_state(model=model.state_dict())" in one


def test_values_that_part_after_the_first_save_are_refused_too(
    ranks: Callable[[int], Any], tmp_path: Path
) -> None:
    def attempt(directory: str) -> str:
        from powertrain.checkpoint.state.saver import StateSaver

        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        saver = StateSaver(dist.get_rank(), dist.get_world_size())
        for number in range(3):
            own = Path(directory, f"{number}-{dist.get_rank()}")
            own.mkdir()
            try:
                saver.save({"layer": layer}, str(own))
            except CheckpointError as error:
                return f"{number}: {error}"
            with torch.no_grad():  # within what kernels may differ, then not
                layer.weight += dist.get_rank() * (1e-6 if number == 0 else 0.1)
        return ""

    for said in ranks(2).execute(attempt, str(tmp_path)):
        assert said.startswith("2: Ranks have different values of 'layer.weight'")


def test_another_shape_under_one_name_is_refused(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    def attempt(directory: str) -> None:
        save(directory, {"model": nn.Linear(3, 2 + dist.get_rank(), bias=False)})

    with pytest.raises(CheckpointError, match=r"shape \(2, 3\) on rank 0 and .* of shape \(3, 3\) on rank 1"):
        ranks(2).execute(attempt, str(tmp_path))


def test_an_optimizer_without_its_module_cannot_hide_that_ranks_differ(
    ranks: Callable[[int], Any], tmp_path: Path
) -> None:
    def attempt(directory: str) -> None:
        model = Net((dist.get_rank(),))
        save(directory, {"optimizer": optimizer_of(model)})

    with pytest.raises(CheckpointError, match=r"different values of 'optimizer\.params\.0'"):
        ranks(2).execute(attempt, str(tmp_path))


def test_a_state_dict_is_kept_for_each_rank(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    def keep(directory: str) -> None:
        torch.manual_seed(dist.get_rank())
        save(directory, {"model": nn.Linear(3, 3).state_dict()})

    def read(directory: str) -> bool:
        torch.manual_seed(dist.get_rank())
        mine = nn.Linear(3, 3).state_dict()
        loaded = load(directory, {})["model"]
        return all(torch.equal(loaded[key], mine[key]) for key in mine)

    group = ranks(2)
    group.execute(keep, str(tmp_path))
    assert group.execute(read, merged(tmp_path, 2)) == [True, True]


def test_parts_that_leave_a_hole_or_overlap_are_refused() -> None:
    def rows(start: int, stop: int) -> TensorPiece:
        return TensorPiece("weight", torch.float32, (4, 2), (start, 0), (stop - start, 2))

    assert Holdings.of([[rows(0, 2)], [rows(2, 4)]]).alike
    with pytest.raises(CheckpointError, match=r"'weight' .* 4 of 8 elements"):
        Holdings.of([[rows(0, 2)], [rows(0, 2)]])
    with pytest.raises(CheckpointError, match="do not make up the whole"):
        Holdings.of([[rows(0, 4)], [rows(0, 2)]])


def test_parameters_of_groups_with_different_settings_do_not_become_one_group() -> None:
    saved = [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 0.2, "params": ["c"]}]
    assert _group_of("optimizer", ["b"], saved) == {"lr": 0.1, "params": ["b"]}
    with pytest.raises(CheckpointError, match="different values of lr"):
        _group_of("optimizer", ["b", "c"], saved)
    with pytest.raises(CheckpointError, match="no parameter group of any rank has 'd'"):
        _group_of("optimizer", ["b", "d"], saved)


# -- tensor parallel


PLAN = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def parallel(
    shape: tuple[int, ...], stage: tuple[int, ...] = (0, 1, 2, 3), *, fsdp: bool = True
) -> nn.Module:
    """The net over a mesh of (data, tensor), or (stages, data, tensor), parallel ranks."""
    names = ("pp", "dp", "tp")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = parallelize_module(Net(stage), mesh["tp"], PLAN)
    if fsdp:
        for layer in model.layers.values():  # type: ignore[operator]
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def save_parallel(directory: str, shape: tuple[int, ...], fsdp: bool) -> bool:
    torch.manual_seed(0)
    model = parallel(shape, fsdp=fsdp)
    optimizer = optimizer_of(model)
    train_each_layer(model, optimizer)
    save(directory, {"model": model, "optimizer": optimizer, "rank": dist.get_rank()})
    return needs_agreement({"model": model, "optimizer": optimizer}, dist.get_world_size())


def load_parallel(directory: str, shape: tuple[int, ...], fsdp: bool) -> dict[str, Any]:
    model = parallel(shape, fsdp=fsdp)
    optimizer = optimizer_of(model)
    load(directory, {"model": model, "optimizer": optimizer})
    return by_name(model, optimizer)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("fsdp", [True, False], ids=["fsdp", "replicas"])
def test_a_mesh_of_two_by_two_resumes_on_any_other(
    ranks: Callable[[int], Any], tmp_path: Path, expected: dict[str, Any], fsdp: bool
) -> None:
    group = ranks(4)
    group.execute(save_parallel, str(tmp_path), (2, 2), fsdp)
    directory = merged(tmp_path, 4)
    if not fsdp:
        sizes = [
            sum(one.numel() for key, one in load_file(path).items() if key.startswith("model.layers"))
            for path in sorted(Path(directory, "state").glob("*.safetensors"))
        ]
        parameters = sum(one.numel() for key, one in expected.items() if ":" not in key)
        assert sum(sizes) - 4 == parameters, (
            "replicas write nothing twice; four numbers are rank 0's extra state"
        )
    for shape in ((2, 2), (4, 1), (1, 4)):
        for tensors in group.execute(load_parallel, directory, shape, fsdp):
            assert_same(tensors, expected)
    for tensors in ranks(2).execute(load_parallel, directory, (1, 2), fsdp):
        assert_same(tensors, expected)


def test_stages_of_a_pipeline_may_be_tensor_parallel(
    ranks: Callable[[int], Any], tmp_path: Path, expected: dict[str, Any]
) -> None:
    def stage_of(shape: tuple[int, ...], stages: list[tuple[int, ...]]) -> nn.Module:
        return parallel(shape, stages[dist.get_rank() // 2], fsdp=False)

    def save_both(directory: str) -> None:
        model = stage_of((2, 1, 2), [(0, 1), (2, 3)])
        optimizer = optimizer_of(model)
        train_each_layer(model, optimizer)
        save(directory, {"model": model, "optimizer": optimizer, "rank": dist.get_rank()})

    def load_both(directory: str) -> dict[str, Any]:
        model = stage_of((2, 1, 2), [(0,), (1, 2, 3)])
        optimizer = optimizer_of(model)
        load(directory, {"model": model, "optimizer": optimizer})
        return by_name(model, optimizer)

    group = ranks(4)
    group.execute(save_both, str(tmp_path))
    directory = merged(tmp_path, 4)
    found: set[str] = set()
    for tensors in group.execute(load_both, directory):
        assert_same(tensors, {key: expected[key] for key in tensors})
        found |= tensors.keys()
    assert found == expected.keys()
    for tensors, _, _ in ranks(2).execute(load_stages, directory, [(0, 1), (2, 3)]):
        assert_same(tensors, {key: expected[key] for key in tensors})


# -- what costs an exchange


def test_ranks_that_hold_the_same_by_construction_exchange_nothing(ranks: Callable[[int], Any]) -> None:
    def look() -> list[bool]:
        ddp = nn.parallel.DistributedDataParallel(Net())
        plain = Net()
        sharded = parallel((2, 2))
        compiled = torch.compile(ddp)
        own = dist.new_subgroups(2)[0]
        part = nn.parallel.DistributedDataParallel(Net(), process_group=own)
        return [
            needs_agreement(objects, 4)
            for objects in (
                {"model": ddp, "optimizer": optimizer_of(ddp), "epoch": 1},
                {"model": sharded, "optimizer": optimizer_of(sharded)},
                {"model": compiled},
                {"epoch": 1},
                {"model": plain},
                {"model": part},
                {"optimizer": optimizer_of(ddp)},
            )
        ]

    for answers in ranks(4).execute(look):
        assert answers == [False, False, False, False, True, True, True]
