"""The blocks of seeds/000 about tracing, written anew: the traced loop, its config, and the example scripts."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ray_nodes import RayNodes

import powertrain
import powertrain as train
import powertrain.data
from powertrain import ScalingConfig, TrainingFailedError
from powertrain.trace import store
from powertrain.trace.integrations.ray import TraceMLRayConfig, TraceMLTorchTrainer
from powertrain.trace.recording import phases

EXAMPLES = Path(__file__).parents[2] / "examples" / "ray"


def train_loop_per_worker(config: dict[str, Any]) -> None:
    import torch.nn as nn
    import torch.optim as optim

    import powertrain.trace as traceml

    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    train_ds = train.get_dataset_shard("train")
    train_loader = traceml.wrap_dataloader_fetch(
        train_ds.iter_torch_batches(batch_size=64, prefetch_batches=1)
    )
    for step, batch in enumerate(train_loader):
        if step >= config["steps"]:
            break
        if step == config.get("fault_at"):
            raise RuntimeError("a fault")
        with traceml.trace_step(model):
            x, y = batch["x"], batch["y"].long()
            optimizer.zero_grad(set_to_none=True)
            loss = criterion(model(x), y)
            loss.backward()
            optimizer.step()


def fit(traceml_config: TraceMLRayConfig, loop: Any = train_loop_per_worker, **config: Any) -> Any:
    rows = powertrain.data.from_items([{"x": [0.0] * 32, "y": 0} for _ in range(2048)])
    trainer = TraceMLTorchTrainer(
        loop,
        train_loop_config={"steps": 10, **config},
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        datasets={"train": rows},
        traceml_config=traceml_config,
    )
    return trainer.fit()


def recorded(result: Any) -> dict[int, Any]:
    """By rank, the steps of the first attempt."""
    from powertrain.storage import open_storage

    return store.read(open_storage(result.path)).steps[0]


def seen(steps: Any) -> set[str]:
    return {name for phase, name in enumerate(phases.NAMES) if (steps["phases"][:, phase] > 0).any()}


# --------------------------------------------------------------------------- the loop


def test_the_traced_loop_is_recorded_step_by_step_on_every_rank(tmp_path: Path) -> None:
    result = fit(TraceMLRayConfig(mode="summary", logs_dir=str(tmp_path), session_id="first"))
    steps = recorded(result)
    assert sorted(steps) == [0, 1]
    for of_rank in steps.values():
        assert of_rank["step"].tolist() == list(range(10))
        assert (of_rank["flags"] & phases.MARKED).all()
        assert of_rank["samples"].tolist() == [64] * 10
        assert seen(of_rank) >= {"input", "forward", "backward", "optimizer", "inside"}
    summary = json.loads(Path(result.path, "final_summary.json").read_bytes())
    assert (summary["steps"], [rank["rank"] for rank in summary["ranks"]]) == (10, [0, 1])
    assert json.loads((tmp_path / "first" / "final_summary.json").read_bytes()) == summary


def test_a_loop_that_raises_leaves_what_it_recorded_and_nothing_else() -> None:
    with pytest.raises(TrainingFailedError, match="a fault") as raised:
        fit(TraceMLRayConfig(), fault_at=5)
    steps = recorded(raised.value.result)
    assert {len(steps[rank]) for rank in raised.value.worker_failures} == {5}


def train_with_wrappers(config: dict[str, Any]) -> None:
    import torch

    import powertrain.trace as traceml

    model = traceml.wrap_forward(torch.nn.Linear(32, 4))
    optimizer = traceml.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=64)
    for step, batch in enumerate(traceml.wrap_dataloader_fetch(batches)):
        if step >= config["steps"]:
            break
        with traceml.trace_step(model):
            x = traceml.wrap_h2d(batch["x"]).to("cpu")
            optimizer.zero_grad()
            traceml.wrap_backward(model(x).square().mean()).backward()
            optimizer.step()


def test_in_manual_mode_what_the_loop_wraps_is_seen() -> None:
    for steps in recorded(fit(TraceMLRayConfig(init_mode="manual"), train_with_wrappers)).values():
        assert len(steps) == 10
        assert seen(steps) >= {"input", "forward", "backward", "optimizer", "inside"}


def test_in_selective_mode_only_what_is_named_is_seen_by_itself() -> None:
    config = TraceMLRayConfig(init_mode="selective", patch_backward=True)
    for steps in recorded(fit(config)).values():
        assert "backward" in seen(steps)
        assert not seen(steps) & {"forward", "optimizer"}


# --------------------------------------------------------------------------- its config


def test_every_option_of_the_config_is_taken() -> None:
    config = TraceMLRayConfig(
        mode="summary",
        profile="run",
        init_mode="auto",
        patch_dataloader=None,
        patch_forward=None,
        patch_backward=None,
        patch_h2d=None,
        logs_dir="./logs",
        session_id="",
        sampler_interval_sec=1.0,
        bind_host="0.0.0.0",
        port=0,
    )
    assert config.bind_host == "0.0.0.0"
    assert TraceMLRayConfig(port=29765).port == 29765
    assert TraceMLRayConfig(mode="cli").mode == "cli"
    lightnings = TraceMLRayConfig(
        mode="summary", init_mode="selective", patch_dataloader=True, patch_h2d=True
    )
    assert lightnings.patch_h2d


# --------------------------------------------------------------------------- the example scripts


@pytest.fixture
def _shut_down() -> Iterator[None]:
    yield
    powertrain.shutdown()


def said_by(example: str, *arguments: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [example, *arguments])
        runpy.run_path(str(EXAMPLES / example), run_name="__main__")


def test_the_minimal_example_says_that_a_delayed_input_is_the_cause(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # The delay outweighs what other processes of a busy machine add to each step.
    said_by("torchtrainer_minimal.py", "--num-workers=2", "--steps=40", "--input-delay-ms=100")
    said = capfd.readouterr().out
    assert "(40 steps, 2 ranks" in said
    assert "\n!! input_bound: Every rank waits for its next batch" in said


def test_the_minimal_example_has_no_input_to_complain_of_without_a_delay(
    capfd: pytest.CaptureFixture[str],
) -> None:
    said_by("torchtrainer_minimal.py", "--num-workers=1", "--steps=60")
    said = capfd.readouterr().out
    assert "(60 steps, 1 rank" in said
    assert "input_bound" not in said


def test_the_minimal_example_trains_here_where_ray_is_not_installed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name, package=None: None)
        said_by("torchtrainer_minimal.py", "--ray-address=auto", "--num-workers=1", "--steps=2")
    said = capfd.readouterr().out
    assert "Ray is not installed" in said
    assert "(local engine, 1 worker)" in said


@pytest.mark.usefixtures("_shut_down")
def test_the_minimal_example_says_the_same_on_a_ray_cluster(
    ray_nodes: RayNodes, capfd: pytest.CaptureFixture[str]
) -> None:
    # The delay outweighs what the raylets and other tests add to each step on two cores.
    options = ("--num-workers=2", "--steps=40", "--input-delay-ms=150")
    said_by("torchtrainer_minimal.py", f"--ray-address={ray_nodes.address}", *options)
    said = capfd.readouterr().out
    assert "(ray engine, 2 workers)" in said
    assert "\n!! input_bound: Every rank waits for its next batch" in said


def _lightning_is_here() -> bool:
    import importlib.util

    return importlib.util.find_spec("lightning") is not None


@pytest.mark.skipif(not _lightning_is_here(), reason="Lightning is not installed")
@pytest.mark.parametrize(
    ("options", "found"),
    [
        # The delays outweigh what other tests add to each step on two cores.
        (("--input-delay-rank=0", "--input-delay-ms=600"), "input_straggler: Rank 0"),
        (("--delay-rank=1", "--delay-ms=600"), "forward_straggler: Rank 1"),
    ],
)
def test_the_lightning_example_names_the_late_rank(
    capfd: pytest.CaptureFixture[str], options: tuple[str, ...], found: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it when it is imported
        said_by("lightning_text_classifier.py", "--num-workers=2", "--max-steps=40", *options)
    assert f"\n!! {found}" in capfd.readouterr().out
