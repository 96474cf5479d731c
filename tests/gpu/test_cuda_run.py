"""A real GPU: assignment, NCCL, and reports that never wait for it. Skipped, visibly, where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import powertrain as train
from powertrain import RunConfig, ScalingConfig, TrainingFailedError
from powertrain.torch import TorchConfig, TorchTrainer

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="this machine has no NVIDIA GPU")


def _fit(function: Any, *, workers: int = 1, config: TorchConfig | None = None, **resources: float) -> Any:
    return TorchTrainer(
        function,
        scaling_config=ScalingConfig(
            num_workers=workers, use_gpu=True, resources_per_worker=resources or None
        ),
        torch_config=config,
        run_config=RunConfig(verbose=0),
    ).fit()


def test_a_worker_has_its_own_gpu_as_current_device_and_nccl_between_ranks() -> None:
    def look(config: dict[str, Any]) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from powertrain.torch import get_device, prepare_model

        device = get_device()
        model = prepare_model(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4, device=device)).sum().backward()
        optimizer.step()
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        return {
            "device": str(device),
            "current": torch.cuda.current_device(),
            "visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "backend": dist.get_backend(),
            "parameters": str(next(model.parameters()).device),
            "total": total.item(),
        }

    seen = _fit(look).return_value
    assert seen == {
        "device": "cuda:0",
        "current": 0,
        "visible": "0",
        "backend": "nccl",
        "parameters": "cuda:0",
        "total": 1.0,
    }


def test_report_does_not_wait_for_the_gpu() -> None:
    def queue_work_and_report(config: dict[str, Any]) -> dict[str, float]:
        import time

        import torch

        square = torch.randn(8192, 8192, device="cuda")
        (square @ square).sum().item()
        loss = torch.zeros((), device="cuda")
        train.report({"loss": loss})  # the first one allocates the pinned memory
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(40):
            loss = loss + (square @ square).sum() * 0 + 1
        queued = time.perf_counter()
        train.report({"loss": loss})
        reported = time.perf_counter()
        torch.cuda.synchronize()
        return {"report": reported - queued, "work": time.perf_counter() - began}

    result = _fit(queue_work_and_report)
    seconds = result.return_value
    assert result.metrics == {"loss": 40.0}
    assert seconds["report"] < seconds["work"] / 10, seconds


def test_nccl_on_a_shared_gpu_is_one_clear_error() -> None:
    with pytest.raises(TrainingFailedError, match=r"NCCL refuses two ranks on one GPU.*gloo"):
        _fit(lambda: None, workers=2, GPU=0.5)


def test_a_shared_gpu_works_with_gloo() -> None:
    def look(config: dict[str, Any]) -> str:
        from powertrain.torch import get_device

        return str(get_device())

    assert _fit(look, workers=2, config=TorchConfig(backend="gloo"), GPU=0.5).return_value == "cuda:0"


def test_more_gpus_than_there_are_is_refused_before_a_process_starts() -> None:
    with pytest.raises(train.PowertrainError, match="1000 GPU"):
        _fit(lambda: None, workers=1000)


def test_batches_arrive_on_the_gpu() -> None:
    def load(config: dict[str, Any]) -> list[str]:
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        from powertrain.torch import prepare_data_loader

        data = TensorDataset(torch.arange(64.0).reshape(32, 2), torch.arange(32))
        loader = prepare_data_loader(DataLoader(data, batch_size=8, pin_memory=True))
        rows = [(x.device.type, y.sum().item()) for x, y in loader]
        assert sum(total for _, total in rows) == sum(range(32))
        return [device for device, _ in rows]

    assert _fit(load).return_value == ["cuda"] * 4


def test_a_driver_that_has_used_the_gpu_still_trains(tmp_path: Path) -> None:
    """Its workers come from a clean server: forking a process with a CUDA context breaks CUDA in the child."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        torch.ones(1, device="cuda").item()
        import powertrain as train
        from powertrain import RunConfig, ScalingConfig
        from powertrain.engine.local.warm_server import warm_up
        from powertrain.torch import TorchTrainer

        def look(config):
            return float(torch.ones(3, device="cuda").sum())

        trainer = TorchTrainer(look, scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
                               run_config=RunConfig(verbose=0))
        assert warm_up().unsafe
        print("value", trainer.fit().return_value)
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert "value 3.0" in done.stdout, done.stdout + done.stderr
