"""Hangs, notices and gradient weights on a real GPU. Skipped, visibly, where there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import powertrain as train
from powertrain import FailureConfig, PreemptedError, RunConfig, ScalingConfig, TrainingFailedError
from powertrain.run import events as ev
from powertrain.run.health import watchdog
from powertrain.run.record import journal
from powertrain.storage import open_storage
from powertrain.torch import TorchConfig, TorchTrainer

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="this machine has no NVIDIA GPU")


def trainer(
    function: Any, storage: Path, *, workers: int = 1, share: float = 1.0, **options: Any
) -> TorchTrainer:
    return TorchTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=True, resources_per_worker={"GPU": share}),
        torch_config=TorchConfig(backend="gloo") if workers > 1 else None,
        run_config=RunConfig(name="run", storage_path=str(storage), verbose=0, **options),
    )


def test_collectives_of_nccl_are_counted(tmp_path: Path) -> None:
    def count(config: dict[str, Any]) -> list[int]:
        import torch
        import torch.distributed as dist

        from powertrain.worker.progress import progress

        assert dist.get_backend() == "nccl"
        before = progress.collectives()
        for _ in range(3):
            dist.all_reduce(torch.ones(1, device="cuda"))
        return [before, progress.collectives()]

    before, after = trainer(count, tmp_path).fit().return_value
    assert after == before + 3


def test_a_rank_that_waits_for_its_gpu_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watchdog, "NOTICE_DELAY_S", 1.0)

    def waits(config: dict[str, Any]) -> None:
        import torch
        import torch.distributed as dist

        for step in range(8):
            if step == 5 and train.get_context().get_world_rank() == 1:
                torch.cuda._sleep(200_000_000_000)
                torch.cuda.synchronize()  # for minutes
            dist.all_reduce(torch.ones(1, device="cuda"))
            train.report({"step": step})

    limits = FailureConfig(hang_timeout_s=5.0, on_hang="fail")
    with pytest.raises(TrainingFailedError):
        trainer(waits, tmp_path, workers=2, share=0.5, failure_config=limits).fit()
    facts = journal.read(open_storage(tmp_path / "run"))
    (noticed,) = [fact for fact in facts if isinstance(fact, ev.HangNoticed)]
    assert noticed.ranks == (1,), noticed.message
    assert noticed.source == "torch.cuda.synchronize()  # for minutes"


def test_a_signal_leaves_a_checkpoint_of_what_is_on_the_gpu(tmp_path: Path) -> None:
    def leaves(config: dict[str, Any]) -> None:
        import torch

        from powertrain.torch import prepare_model

        model = prepare_model(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        clock = {"step": 0}
        train.register_state(model=model, optimizer=optimizer, clock=clock)
        if found := train.load_state():
            train.report({"resumed": found["clock"]["step"]})
            return
        for _ in range(10_000):
            model(torch.ones(2, 4, device="cuda")).sum().backward()
            optimizer.step()
            clock["step"] += 1
            if clock["step"] == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            train.report({"step": clock["step"]})

    with pytest.raises(PreemptedError) as caught:
        trainer(leaves, tmp_path).fit()
    last = caught.value.result.metrics["step"]
    assert last >= 20
    assert trainer(leaves, tmp_path).fit().metrics == {"resumed": last}


def test_gradients_of_uneven_ranks_are_weighed_on_the_gpu(tmp_path: Path) -> None:
    def gradients(config: dict[str, Any]) -> list[float]:
        import torch

        from powertrain.torch import prepare_model

        linear = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
        torch.nn.init.ones_(linear.weight)
        model: Any = prepare_model(linear)
        rows = torch.arange(15, dtype=torch.float64, device="cuda").reshape(5, 3)
        for micro in train.get_context().batch_plan(5):
            part = rows[micro.start : micro.start + micro.size]
            (model(part).square().mean() * micro.loss_scale).backward()
        return [float(x) for x in model.module.weight.grad.flatten()]

    import torch

    weight = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.arange(15, dtype=torch.float64).reshape(5, 3)
    (rows @ weight.T).square().mean().backward()
    assert weight.grad is not None
    found = trainer(gradients, tmp_path, workers=2, share=0.5).fit().return_value
    assert found == pytest.approx(weight.grad.flatten().tolist(), rel=1e-12)
