"""save_state keeps everything a loop needs to go on, and load_state puts it back or says why it cannot."""

from __future__ import annotations

import collections
import contextlib
import math
import os
import random
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from powertrain.checkpoint.checkpoint import Checkpoint
from powertrain.checkpoint.state import segments as segments_module
from powertrain.errors import CheckpointError, OutsideWorkerError
from powertrain.worker import session as worker_session
from powertrain.worker.checkpoints import state as state_module
from powertrain.worker.checkpoints.state import automatic_checkpoint, load_state, register_state, save_state
from powertrain.worker.data.shards import Shards
from powertrain.worker.place import AttemptStart, SavingSettings


class FakeStaging:
    """Directories below one root, and segments in a directory of their own."""

    def __init__(self, root: Path, segments: str) -> None:
        self.root, self.segments = root, segments

    def new_directory(self) -> str:
        self.root.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="open-", dir=self.root)


class Worker:
    """This process as some rank of some world, one after the other."""

    def __init__(self, root: Path, segments: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.segments, self._patch = root, segments, monkeypatch
        self.notes: list[str] = []

    def become(
        self, rank: int = 0, world_size: int = 1, checkpoint: Checkpoint | None = None, frequency: int = 0
    ) -> Any:
        place = SimpleNamespace(
            rank=rank,
            world_size=world_size,
            local_world_size=world_size,
            start=AttemptStart(checkpoint=checkpoint.path if checkpoint else ""),
            saving=SavingSettings(frequency=frequency, staging=str(self.root)),
        )
        session: Any = SimpleNamespace(
            place=place,
            registered={},
            is_saving_state=True,
            staging=FakeStaging(self.root / f"rank-{rank}", self.segments),
            service=SimpleNamespace(post=lambda message: self.notes.append(message.message)),
        )
        session.data = Shards(session)
        self._patch.setattr(worker_session, "_session", session)
        self._patch.setattr(worker_session, "checkpoint_to_resume_from", lambda _: checkpoint)
        self._patch.setattr(state_module, "_rank_state", None)
        return session

    def save_on(self, world_size: int, objects: Callable[[int], dict[str, Any]]) -> Checkpoint:
        """What ``world_size`` ranks save, put together as the run would."""
        merged = Path(tempfile.mkdtemp(dir=self.root))
        for rank in range(world_size):
            self.become(rank, world_size)
            saved = save_state(**objects(rank))
            shutil.copytree(saved.path, merged, dirs_exist_ok=True)
        return Checkpoint(merged)


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    monkeypatch.setattr(segments_module, "_PLENTY", 2**60)
    shared = tempfile.mkdtemp(prefix="powertrain-test-", dir="/dev/shm")
    one = Worker(tmp_path, shared, monkeypatch)
    one.become()
    yield one
    monkeypatch.setattr(state_module, "_rank_state", None)
    shutil.rmtree(shared)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.head = nn.Linear(4, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(rows))
        return out


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        rows = torch.rand(8, 3) + random.random() + float(np.random.rand())
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(left: Any, right: Any) -> bool:
    """Equal values of equal types, tensors and containers of them included."""
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and bool((left == right).all())
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and left.keys() == right.keys()
            and all(same(left[k], right[k]) for k in left)
        )
    if isinstance(left, (list, tuple)):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    return type(left) is type(right) and (left == right or left != left)


# -- going on


def test_a_resumed_loop_ends_bit_identical_to_an_uninterrupted_one(worker: Worker) -> None:
    def begin() -> dict[str, Any]:
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3])
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def go_on(parts: dict[str, Any]) -> dict[str, torch.Tensor]:
        for _ in range(3):
            train(parts["model"], parts["optimizer"], 2)
            parts["scheduler"].step()
        return {key: value.clone() for key, value in parts["model"].state_dict().items()}

    first = begin()
    go_on(first)
    checkpoint = save_state(**first, epoch=3)
    expected = go_on(first)
    random.seed(1)
    torch.manual_seed(1)
    np.random.seed(1)
    second = begin()
    assert load_state(checkpoint, **second) == {"epoch": 3}
    assert same(go_on(second), expected)


def test_what_is_saved_does_not_change_with_the_objects(worker: Worker) -> None:
    model = Net()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    checkpoint = save_state(model=model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_state(checkpoint, model=model)
    assert same(dict(model.state_dict()), before)


def test_each_kind_of_optimizer_and_scheduler_comes_back_exactly(worker: Worker) -> None:
    def optimizers(parameters: list[nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
            torch.optim.AdamW(parameters, lr=0.1, amsgrad=True, betas=(0.5, 0.6)),
            torch.optim.Adam(parameters, lr=torch.tensor(0.1), capturable=False, foreach=False),
            torch.optim.Adafactor(parameters, lr=0.1),
            torch.optim.LBFGS(parameters, lr=0.1),
        ]

    for number in range(5):
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizer, fresh = (
            optimizers(list(model.parameters()))[number],
            optimizers(list(other.parameters()))[number],
        )
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.rand(4, 3)).sum().backward()
            optimizer.step(lambda: model(torch.rand(4, 3)).square().sum())  # noqa: B023
        load_state(save_state(model=model, optimizer=optimizer), model=other, optimizer=fresh)
        assert same(fresh.state_dict(), optimizer.state_dict()), type(optimizer)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 4]),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
)
def test_schedulers_come_back_exactly(worker: Worker, make: Callable[[Any], Any]) -> None:
    def scheduled() -> tuple[Any, Any]:
        optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
        return optimizer, make(optimizer)

    (optimizer, scheduler), (_, fresh) = scheduled(), scheduled()
    optimizer.step()
    for _ in range(3):
        scheduler.step(*([1.0] if "Plateau" in type(scheduler).__name__ else []))
    load_state(save_state(scheduler=scheduler), scheduler=fresh)
    assert same(fresh.state_dict(), scheduler.state_dict())


def test_plain_values_come_back_exactly(worker: Worker) -> None:
    values = {
        "epoch": 7,
        "loss": -0.0,
        "worst": math.inf,
        "nothing": None,
        "flag": True,
        "name": "größe",
        "raw": b"\x00\xff",
        "big": 2**200,
        "nested": {"a.b": [1, (2, {"c": torch.tensor([1.5])})], 3: "int key", (1, 2): "tuple key"},
        "a": {"b": torch.ones(2)},
        "dollar": {"$tensor": "not one"},
        "ordered": collections.OrderedDict(z=1, a=2),
        "counter": collections.Counter({5: 2}),
        "unique": {1, 2},
        "array": np.arange(3, dtype=np.int16),
        "dtype": torch.bfloat16,
        "half": torch.tensor([1.0, float("nan")], dtype=torch.bfloat16).nan_to_num(3.0),
    }
    loaded = load_state(save_state(**values))
    assert loaded is not None
    assert same(loaded, values)
    assert math.copysign(1, loaded["loss"]) == -1


def test_generators_and_a_scaler_inside_a_prepared_optimizer_are_kept(worker: Worker) -> None:
    generator = torch.Generator().manual_seed(4)
    torch.rand(3, generator=generator)
    model = nn.Linear(1, 1)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    optimizer.scaler.scale(torch.ones(1))
    checkpoint = save_state(model=model, optimizer=optimizer, order=generator)
    expected = torch.rand(5, generator=generator)
    optimizer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.scaler.scale(torch.ones(1))
    load_state(checkpoint, model=model, optimizer=optimizer, order=generator)
    assert torch.equal(torch.rand(5, generator=generator), expected)
    assert optimizer.scaler.get_scale() == 64.0


# -- several ranks


@pytest.mark.filterwarnings("ignore:The state was saved by 3 ranks")
def test_replicated_state_is_written_once_and_read_by_any_number_of_ranks(worker: Worker) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    checkpoint = worker.save_on(3, lambda rank: {"model": model, "optimizer": optimizer, "rank": rank})
    names = [
        name for path in Path(checkpoint.path, "state").glob("*.safetensors") for name in load_file(path)
    ]
    of_model = [name for name in names if name.startswith(("model.", "optimizer."))]
    assert len(of_model) == len(set(of_model)) == len(model.state_dict()) + 3 * len(list(model.parameters()))
    for world_size in (1, 2, 3, 5):
        for rank in range(world_size):
            worker.become(rank, world_size)
            other = Net()
            fresh = torch.optim.Adam(other.parameters())
            extras = load_state(checkpoint, model=other, optimizer=fresh)
            assert extras == {"rank": rank if world_size == 3 else 0}
            assert same(dict(other.state_dict()), dict(model.state_dict()))
            assert same(fresh.state_dict(), optimizer.state_dict())


def test_each_rank_gets_back_its_own_generators_and_tensors(worker: Worker) -> None:
    drawn: dict[int, float] = {}

    def objects(rank: int) -> dict[str, Any]:
        torch.manual_seed(rank)
        drawn[rank] = 0.0
        return {"mine": torch.full((2,), float(rank))}

    checkpoint = worker.save_on(2, objects)
    for rank in range(2):
        torch.manual_seed(rank)
        drawn[rank] = torch.rand(1).item()
    for rank in range(2):
        worker.become(rank, 2)
        extras = load_state(checkpoint)
        assert extras is not None
        assert extras["mine"].tolist() == [rank, rank]
        assert torch.rand(1).item() == drawn[rank]


def test_another_world_size_leaves_the_generators_alone_and_says_so(worker: Worker) -> None:
    checkpoint = worker.save_on(2, lambda rank: {"epoch": 1})
    worker.become(0, 1)
    torch.manual_seed(5)
    load_state(checkpoint)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
    assert ["saved by 2 ranks and is loaded by 1" in note for note in worker.notes] == [True]


def test_buffers_are_rank_zeros(worker: Worker) -> None:
    def objects(rank: int) -> dict[str, Any]:
        model = nn.BatchNorm1d(50_000)
        model.running_mean.fill_(rank)  # type: ignore[union-attr]
        return {"model": model}

    checkpoint = worker.save_on(4, objects)
    model = nn.BatchNorm1d(50_000)
    load_state(checkpoint, model=model)
    assert not model.running_mean.any()  # type: ignore[union-attr]


# -- registered state


def test_registered_objects_are_saved_and_loaded_without_naming_them(worker: Worker) -> None:
    model, seen = Net(), {"rows": 0}
    register_state(model=model, seen=seen)
    seen["rows"] = 12
    before = {key: value.clone() for key, value in model.state_dict().items()}
    checkpoint = save_state()
    with torch.no_grad():
        model.head.weight.zero_()
    assert load_state(checkpoint) == {"seen": {"rows": 12}}
    assert same(dict(model.state_dict()), before)


def test_a_run_saves_by_itself_with_every_nth_report(worker: Worker) -> None:
    session = worker.become(frequency=3)
    assert automatic_checkpoint(session, 3) is None, "nothing is registered"
    register_state(model=Net())
    due = [row for row in range(1, 10) if automatic_checkpoint(session, row) is not None]
    assert due == [3, 6, 9]
    session = worker.become(frequency=0)
    register_state(model=Net())
    assert automatic_checkpoint(session, 3) is None


def test_a_registered_number_is_refused(worker: Worker) -> None:
    with pytest.raises(CheckpointError, match=r"register_state\(epoch=...\) was given a int"):
        register_state(epoch=3)


# -- where it lies


def test_later_saves_use_the_same_memory_when_the_earlier_is_uploaded(worker: Worker) -> None:
    model = Net()

    def link(checkpoint: Checkpoint) -> str:
        return os.readlink(Path(checkpoint.path, "state", "rank-00000.safetensors"))

    first, second = save_state(model=model), save_state(model=model)
    assert link(first) != link(second)
    was = link(first)
    shutil.rmtree(first.path)
    assert link(save_state(model=model)) == was


def test_a_checkpoint_that_is_never_reported_frees_its_memory(worker: Worker) -> None:
    for _ in range(5):
        save_state(model=Net())
        assert len(os.listdir(worker.segments)) == 1
    assert not list((worker.root / "rank-0").iterdir())


def test_a_reported_directory_is_not_removed_with_the_checkpoint(worker: Worker) -> None:
    checkpoint = save_state(epoch=1)
    moved = Path(worker.root, "row-1")
    os.rename(checkpoint.path, moved)
    del checkpoint
    assert load_state(Checkpoint(moved)) == {"epoch": 1}


def test_without_shared_memory_the_state_goes_to_a_plain_file_and_is_reported_once(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_module, "room", lambda directory: 64 * 2**20 if directory == "/" else 0)
    model = Net()
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    for _ in range(2):
        checkpoint = save_state(model=model)
        assert not Path(checkpoint.path, "state", "rank-00000.safetensors").is_symlink()
        load_state(checkpoint, model=model)
        assert same(dict(model.state_dict()), expected)
    assert len(worker.notes) == 1
    assert "--shm-size" in worker.notes[0]


def test_a_structure_that_changes_between_saves_is_saved_as_it_is(worker: Worker) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    save_state(model=model, optimizer=optimizer)  # before the first step Adam keeps nothing
    train(model, optimizer, 1)
    checkpoint = save_state(model=model, optimizer=optimizer)
    other = Net()
    fresh = torch.optim.Adam(other.parameters())
    load_state(checkpoint, model=other, optimizer=fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_save_that_fails_leaves_nothing(worker: Worker) -> None:
    with pytest.raises(CheckpointError, match=r"'thing.inner' is a builtins.object, which cannot be saved"):
        save_state(thing={"inner": object()})
    assert not list((worker.root / "rank-0").iterdir())


# -- what does not fit


def test_without_a_checkpoint_load_state_returns_none(worker: Worker) -> None:
    assert load_state(model=Net()) is None


def test_the_checkpoint_to_go_on_from_is_the_default(worker: Worker) -> None:
    checkpoint = save_state(epoch=4)
    worker.become(checkpoint=checkpoint)
    assert load_state() == {"epoch": 4}


def refusal(load: Callable[[], Any]) -> str:
    with pytest.raises(CheckpointError) as caught:
        load()
    return str(caught.value)


def test_what_does_not_fit_is_one_clear_error_and_changes_nothing(worker: Worker) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 1)
    checkpoint = save_state(model=model, optimizer=optimizer, epoch=2)
    other = Net()
    before = {key: value.clone() for key, value in other.state_dict().items()}
    fresh = torch.optim.Adam(other.parameters())
    wider, deeper, smaller = Net(), Net(), Net()
    wider.head = nn.Linear(4, 2)
    deeper.more = nn.Linear(1, 1)
    del smaller.head
    groups: list[dict[str, Any]] = [
        {"params": other.body.parameters()},
        {"params": other.head.parameters(), "lr": 1.0},
    ]
    halves = torch.optim.Adam(groups)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"model": other, "ema": other}, "has no 'ema'; it has 'model', 'optimizer'"),
        ({"epoch": other}, "'epoch' is a plain value in"),
        ({"epoch": 3}, "load_state returns the plain values"),
        ({"optimizer": other}, "in that name is a optimizer"),
        ({"model": wider}, "'model.head.bias' has shape (2,), and (1,) was saved"),
        ({"model": deeper}, "it lacks 'model.more.bias', 'model.more.weight'"),
        ({"model": smaller}, "which lacks 'model.head.bias', 'model.head.weight'"),
        ({"model": other, "optimizer": halves}, "no parameter group of it has exactly"),
        ({"optimizer": fresh}, "the same modules as save_state"),
    ]
    for objects, words in cases:
        message = refusal(lambda: load_state(checkpoint, **objects))  # noqa: B023
        assert words in message.replace(f"in {checkpoint.path} ", "in "), (message, words)
    assert same(dict(other.state_dict()), before)


def test_a_directory_that_save_state_did_not_write_is_refused(worker: Worker, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"")
    assert "save_state did not write it" in refusal(lambda: load_state(Checkpoint(tmp_path)))
    saved = save_state(epoch=1)
    damaged = tmp_path / "damaged"
    shutil.copytree(saved.path, damaged)
    (damaged / "state" / "rank-00000.json").write_text("{")
    assert "rank-00000.json cannot be read" in refusal(lambda: load_state(Checkpoint(damaged)))
    (damaged / "state" / "rank-00000.json").unlink()
    assert "rank-00000.json is missing" in refusal(lambda: load_state(Checkpoint(damaged)))


@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_values_that_are_not_a_file_are_refused_at_once(worker: Worker, kind: str) -> None:
    checkpoint = save_state(epoch=1)
    path = Path(checkpoint.path, "state", "rank-00000.json")
    path.rename(path.with_name("other"))
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("other")
    else:
        path.mkdir()

    def release() -> None:  # the reader that waits for a writer of the pipe
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    timer = threading.Timer(5, release)
    timer.start()
    why = {"pipe": "not a regular file", "link": "symbolic link", "directory": "Is a directory"}[kind]
    assert re.search(rf"rank-00000.json cannot be read \(.*{why}", refusal(lambda: load_state(checkpoint)))
    timer.cancel()


def test_a_model_in_fsdp1_is_refused_with_what_to_use(worker: Worker) -> None:
    class FullyShardedDataParallel(nn.Linear):
        """Only its name counts: the real one needs a process group."""

    assert "fully_shard" in refusal(lambda: save_state(model=FullyShardedDataParallel(1, 1)))


def test_without_objects_there_must_be_registered_ones(worker: Worker) -> None:
    assert "register_state(model=model" in refusal(save_state)


def test_a_name_that_is_no_name_is_refused(worker: Worker) -> None:
    assert "'a.b' cannot name a part" in refusal(lambda: save_state(**{"a.b": 1}))


def test_a_given_checkpoint_loads_outside_a_worker_too_and_leaves_the_generators_alone(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = Net(), Net()
    checkpoint = save_state(model=model, epoch=4)
    monkeypatch.setattr(worker_session, "_session", None)
    torch.manual_seed(3)
    assert load_state(checkpoint, model=other) == {"epoch": 4}
    assert same(dict(other.state_dict()), dict(model.state_dict()))
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), drawn)


def test_outside_a_worker_each_says_so() -> None:
    for call in (save_state, load_state, register_state):
        with pytest.raises(OutsideWorkerError, match=call.__name__):
            call()


# -- in whole runs


def resumable(config: dict[str, Any]) -> dict[str, Any]:
    """Two ranks train with dropout, Adam and a scheduler; the first attempt may lose a rank after its third epoch."""
    import hashlib
    import signal

    import powertrain
    from powertrain.torch import prepare_model

    rank, attempt = powertrain.get_context().get_world_rank(), powertrain.get_context().get_attempt()
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    model = prepare_model(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    register_state(model=model, optimizer=optimizer, scheduler=scheduler)
    loaded = load_state()
    start = loaded["epoch"] + 1 if loaded else 0
    for epoch in range(start, 6):
        train(model, optimizer, 3)
        scheduler.step()
        saved = save_state(model=model, optimizer=optimizer, scheduler=scheduler, epoch=epoch)
        powertrain.report({"epoch": epoch}, checkpoint=saved)
        if config["dies"] and attempt == 0 and epoch == 2:
            powertrain.collective.barrier()  # the other rank has made its report too
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    return {"weights": hashlib.sha256(weights).hexdigest(), "start": start, "lr": scheduler.get_last_lr()}


def test_a_run_that_lost_a_rank_ends_bit_identical_to_one_that_did_not() -> None:
    from powertrain import FailureConfig, RunConfig, ScalingConfig
    from powertrain.torch import TorchTrainer

    def run(dies: bool) -> Any:
        return TorchTrainer(
            resumable,
            train_loop_config={"dies": dies},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=f"dies-{dies}", verbose=0, failure_config=FailureConfig(max_failures=1)
            ),
        ).fit()

    whole, broken = run(dies=False).return_value, run(dies=True).return_value
    assert (whole.pop("start"), broken.pop("start")) == (0, 3)
    assert broken == whole


def test_a_run_with_a_checkpoint_frequency_saves_what_is_registered() -> None:
    from powertrain import CheckpointConfig, RunConfig, ScalingConfig
    from powertrain.torch import TorchTrainer

    def loop() -> None:
        import powertrain

        model = nn.Linear(2, 1)
        register_state(model=model)
        for value in range(1, 6):
            with torch.no_grad():
                model.weight.fill_(value)
            powertrain.report({"value": value})

    result = TorchTrainer(
        loop,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            verbose=0, checkpoint_config=CheckpointConfig(checkpoint_frequency=2, num_to_keep=None)
        ),
    ).fit()
    values = {metrics["value"]: checkpoint for checkpoint, metrics in result.best_checkpoints}
    assert sorted(values) == [2, 4]
    for value, checkpoint in values.items():
        with checkpoint.as_directory() as directory:
            tensors = load_file(Path(directory, "state", "rank-00000.safetensors"))
        assert tensors["model.weight"].tolist() == [[value, value]]


# --------------------------------------------------------------------------- what it costs is seen


def test_saving_counts_as_time_in_reports_and_loading_does_not(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from powertrain.checkpoint.state.saver import StateLoader, StateSaver
    from powertrain.trace.recording import current, phases
    from powertrain.trace.recording.recorder import Recorder

    slow, recorder = 0.03, Recorder()
    for owner, name in ((StateSaver, "save"), (StateLoader, "load")):
        plain = getattr(owner, name)

        def slowly(*args: Any, plain: Callable[..., Any] = plain, **kwargs: Any) -> Any:
            time.sleep(slow)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, slowly)
    current.use(recorder)
    try:
        net = nn.Linear(2, 2)
        saved = save_state(model=net)
        recorder.reported()
        load_state(saved, model=net)
        recorder.reported()
        recorder.process_marks()
    finally:
        current.use(None)
    data = recorder.drain(0)[1]
    saving, loading = (phases.unpack_from(data, at).phases for at in (0, phases.RECORD_SIZE))
    assert saving[phases.REPORT] > 0.9 * slow
    assert loading[phases.REPORT] == 0
    assert loading[phases.INSIDE] + loading[phases.OUTSIDE] > 0.9 * slow
