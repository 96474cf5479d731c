"""Training functions on one GPU that save their state, and write down when they did what."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import powertrain

sys.path.append(str(Path(__file__).resolve().parent.parent / "gpu_verdict_scripts"))

from troubles import Gpt, tokens_of


def train_and_save(config: dict[str, Any]) -> dict[str, list[float]]:
    """Save the state every ``every`` steps, ``saves`` times; return the seconds of saves and of steps, and of copies of
    the same tensors to pinned memory, which are the limit."""
    model, optimizer = _made(config)
    seconds: dict[str, list[float]] = {"saves": [], "steps": [], "copies": []}
    for number in range(config["every"] * config["saves"]):
        seconds["steps"].append(_timed(lambda: _step(model, optimizer, config)))
        if (number + 1) % config["every"] == 0:
            seconds["saves"].append(
                _timed(lambda: powertrain.report({}, powertrain.save_state(model=model, optimizer=optimizer)))
            )
    tensors = [_local(one) for one in _tensors(model, optimizer)]
    pinned = [torch.empty_like(one, device="cpu", pin_memory=True) for one in tensors]

    def copy() -> None:
        for target, source in zip(pinned, tensors, strict=True):
            target.copy_(source, non_blocking=True)

    seconds["copies"] = [_timed(copy) for _ in range(config["saves"])]
    seconds["bytes"] = [float(sum(one.nbytes for one in tensors))]
    return seconds


def train_and_die(config: dict[str, Any]) -> dict[str, Any] | None:
    """Kill itself at a step of the first attempt; return when that was, and what the second attempt did when."""
    diary = Path(config["diary"])
    times = {"entered": time.time()}
    model, optimizer = _made(config)
    torch.cuda.synchronize()
    times["made"] = time.time()
    extras = powertrain.load_state(model=model, optimizer=optimizer)
    torch.cuda.synchronize()
    times["loaded"] = time.time()
    first = int(extras["step"]) if extras is not None else 0
    for number in range(first, config["steps"]):
        _step(model, optimizer, config)
        torch.cuda.synchronize()
        times.setdefault("stepped", time.time())
        if number + 1 == config["saved_at"]:
            powertrain.report({}, powertrain.save_state(model=model, optimizer=optimizer, step=number + 1))
        if number + 1 == config["dies_at"] and powertrain.get_context().get_attempt() == 0:
            diary.write_text(json.dumps(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
    return {"killed": json.loads(diary.read_text()), "resumed_at": first, **times}


def _made(config: dict[str, Any]) -> tuple[Any, Any]:
    model = Gpt(config["width"], config["layers"])
    prepared = powertrain.torch.prepare_model(model, parallel_strategy=config["strategy"])
    return prepared, torch.optim.AdamW(prepared.parameters(), lr=1e-4, fused=True)


def _step(model: Any, optimizer: Any, config: dict[str, Any]) -> None:
    part = tokens_of(config["batch"], 512)
    with torch.autocast("cuda", torch.bfloat16):
        logits = model(part[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _timed(call: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _tensors(model: Any, optimizer: Any) -> list[Any]:
    states = [value for entry in optimizer.state.values() for value in entry.values() if value.is_cuda]
    return [*(one.detach() for one in model.parameters()), *states]


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
