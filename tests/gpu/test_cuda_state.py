"""State on a real GPU: saved as it is at the call, at the speed of pinned memory, and restored. Skipped, visibly,
where there is no GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from powertrain import RunConfig, ScalingConfig
from powertrain.torch import TorchTrainer

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/nvidiactl"), reason="this machine has no NVIDIA GPU")


def _fit(function: Any, **config: Any) -> Any:
    return TorchTrainer(
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=1, use_gpu=True),
        run_config=RunConfig(verbose=0),
    ).fit()


def test_a_loop_on_a_gpu_goes_on_bit_identical() -> None:
    def loop(config: dict[str, Any]) -> bool:
        import torch

        from powertrain.torch import enable_reproducibility, prepare_model
        from powertrain.worker.checkpoints.state import load_state, save_state

        enable_reproducibility(1)

        def begin() -> dict[str, Any]:
            net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
            model = prepare_model(net)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            return {"model": model, "optimizer": optimizer, "scaler": torch.amp.GradScaler("cuda")}

        def go_on(parts: dict[str, Any]) -> list[Any]:
            for _ in range(5):
                loss = parts["model"](torch.randn(16, 32, device="cuda")).square().mean()
                parts["scaler"].scale(loss).backward()
                parts["scaler"].step(parts["optimizer"])
                parts["scaler"].update()
                parts["optimizer"].zero_grad()
            return [value.clone() for value in parts["model"].state_dict().values()]

        first = begin()
        go_on(first)
        checkpoint = save_state(**first)
        expected = go_on(first)
        torch.cuda.manual_seed(9)
        second = begin()
        load_state(checkpoint, **second)
        return all(torch.equal(a, b) for a, b in zip(go_on(second), expected, strict=True))

    assert _fit(loop).return_value


def test_what_is_queued_on_the_gpu_before_is_saved_and_what_comes_after_is_not() -> None:
    def loop(config: dict[str, Any]) -> list[float]:
        import torch
        from safetensors.torch import load_file

        from powertrain.worker.checkpoints.state import save_state

        model = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
        square = torch.randn(4096, 4096, device="cuda")
        with torch.no_grad():
            for _ in range(20):
                square = (square @ square) * 0 + 1
            model.weight.copy_(square * 7)  # not yet computed when save_state is called
            checkpoint = save_state(model=model)
            model.weight.fill_(-1)
        saved = load_file(Path(checkpoint.path, "state", "rank-00000.safetensors"))["model.weight"]
        return [saved.min().item(), saved.max().item()]

    assert _fit(loop).return_value == [7.0, 7.0]


def test_segments_are_pinned_once_and_copied_to_at_the_speed_of_pinned_memory() -> None:
    def loop(config: dict[str, Any]) -> dict[str, float]:
        import time

        import torch

        from powertrain.worker.checkpoints import state

        model = torch.nn.Module()
        for number in range(256):
            parameter = torch.nn.Parameter(torch.randn(2**20, device="cuda"))
            model.register_parameter(f"weight_{number}", parameter)
        pinned = [torch.empty(2**20, pin_memory=True) for _ in range(256)]

        def seconds(call: Any) -> float:
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            return time.perf_counter() - began

        def copy() -> None:
            for target, parameter in zip(pinned, model.parameters(), strict=True):
                target.copy_(parameter.detach(), non_blocking=True)
            torch.cuda.synchronize()

        # Each checkpoint goes with its last reference, which frees its segment for the next.
        saves = [seconds(lambda: state.save_state(model=model)) for _ in range(6)]
        copies = [seconds(copy) for _ in range(6)]
        segments = state._rank_state.saver._segments._all  # type: ignore[union-attr]
        return {
            "save": min(saves[1:]),
            "copy": min(copies[1:]),
            "pinned": float(all(one.views[0].is_pinned() for one in segments if one.views)),
        }

    seen = _fit(loop).return_value
    assert seen["pinned"] == 1.0
    assert seen["save"] < 2 * seen["copy"] + 0.05, seen


def test_a_sharded_model_on_a_gpu_is_saved_and_loaded() -> None:
    def loop(config: dict[str, Any]) -> bool:
        import torch

        from powertrain.torch import prepare_model
        from powertrain.worker.checkpoints.state import load_state, save_state

        def begin() -> tuple[Any, Any]:
            net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
            model = prepare_model(net, parallel_strategy="fsdp")
            return model, torch.optim.AdamW(model.parameters())

        model, optimizer = begin()
        model(torch.rand(4, 8, device="cuda")).sum().backward()
        optimizer.step()
        checkpoint = save_state(model=model, optimizer=optimizer)
        other, fresh = begin()
        load_state(checkpoint, model=other, optimizer=fresh)
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        states = zip(optimizer.state.values(), fresh.state.values(), strict=True)
        return all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs) and all(
            torch.equal(a["exp_avg"].full_tensor(), b["exp_avg"].full_tensor()) for a, b in states
        )

    assert _fit(loop).return_value


def test_the_memory_of_the_first_save_is_pinned_before_it_in_the_background() -> None:
    def loop(config: dict[str, Any]) -> dict[str, Any]:
        import torch
        from safetensors.torch import load_file

        import powertrain
        from powertrain.torch import prepare_model
        from powertrain.worker.checkpoints import state

        model = prepare_model(torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 2048, device="cuda")).sum().backward()
        optimizer.step()
        segments: Any = state._rank_state.saver._segments  # type: ignore[union-attr]
        segments.wait_for_ahead()
        ahead = segments._ahead._segment
        pinned = sum(stop - start for start, stop in ahead._pinned)
        checkpoint = powertrain.save_state(model=model, optimizer=optimizer)
        file = Path(checkpoint.path, "state", "rank-00000.safetensors")
        saved = load_file(file)
        return {
            "same": all(
                torch.equal(saved[f"model.{name}"], value.cpu()) for name, value in model.state_dict().items()
            ),
            "taken": os.readlink(file) == ahead.path,
            "missing": file.stat().st_size - pinned,
            "views": all(view.is_pinned() for view in ahead.views),
        }

    seen = _fit(loop).return_value
    assert seen["same"]
    assert seen["taken"]
    assert seen["missing"] <= 0
    assert seen["views"]


def test_files_are_read_into_a_gpus_memory_as_they_are(tmp_path: Path) -> None:
    def loop(config: dict[str, Any]) -> str:
        import torch

        from powertrain.checkpoint.state.gpu_reading import FileRange, read_ranges

        tensors = [torch.randn(size) for size in (1, 1000, 3 * 2**20 + 7, 5 * 2**20)]
        file = Path(config["file"])
        file.write_bytes(b"".join(tensor.numpy().tobytes() for tensor in tensors))
        starts = [sum(one.nbytes for one in tensors[:number]) for number in range(len(tensors))]
        with torch.inference_mode():
            targets = [torch.empty_like(tensor, device="cuda") for tensor in tensors]
            read_ranges([FileRange(file, *pair) for pair in zip(starts, targets, strict=True)])
        assert all(torch.equal(target.cpu(), one) for target, one in zip(targets, tensors, strict=True))
        try:
            read_ranges([FileRange(file, starts[-1] + 4, torch.empty_like(tensors[-1], device="cuda"))])
        except OSError as error:
            return str(error)
        return ""

    said = _fit(loop, file=str(tmp_path / "file")).return_value
    assert "before the tensor that it should have" in said


def test_a_function_may_still_choose_deterministic_products_after_the_gpu_was_warmed_up() -> None:
    def loop(config: dict[str, Any]) -> bool:
        import torch

        from powertrain.torch import enable_reproducibility, gpu_warming

        gpu_warming._wait()
        enable_reproducibility(3)
        drawn = torch.rand(1, device="cuda").item()
        product = torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
        return bool((product == 8).all().item()) and 0 <= drawn < 1

    assert _fit(loop).return_value


def test_memory_is_pinned_in_the_background_while_a_graph_is_captured() -> None:
    def loop(config: dict[str, Any]) -> list[bool]:
        import torch

        from powertrain.checkpoint.state.ahead import SegmentAhead
        from powertrain.checkpoint.state.shared_memory import SharedMemorySegment

        x = torch.ones(1000, device="cuda")
        segment = SharedMemorySegment.create(f"/dev/shm/powertrain-test-{os.getpid()}", 0, reserve=2**28)
        ahead, graph = SegmentAhead(segment, 0), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                ahead.expect(2**28)
                ahead.wait()
                y = x * 2
            graph.replay()
            pinned = sum(stop - start for start, stop in segment._pinned)
            return [bool((y == 2).all().item()), pinned == 2**28]
        finally:
            ahead.take().close(remove=True)

    assert _fit(loop).return_value == [True, True]


def test_a_graph_can_be_captured_while_the_gpu_is_warmed_up() -> None:
    def loop(config: dict[str, Any]) -> list[bool]:
        import torch

        from powertrain.torch import gpu_warming

        gpu_warming._wait()
        gpu_warming._thread = None
        x, graph = torch.ones(1000, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gpu_warming.begin(0)
            gpu_warming._wait()
            y = x * 2
        graph.replay()
        return [bool((y == 2).all().item())]

    assert _fit(loop).return_value == [True]
