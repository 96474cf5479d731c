"""Stall of the training thread by a checkpoint, compared with torch.save, torch's DCP and plain memcpy.

All contenders are measured in the training function of a real run with one worker, on one state: a model and AdamW's
moments. A round saves it once with every contender, in rotating order; background work of a contender is awaited before
the next begins. Powertrain's time ends when ``report`` has returned; the uploader copies the files to storage
afterwards.

The limit is plain memcpy: every tensor of the state copied to warm memory by the C library.

``--cuda`` measures the same with 4 GiB of state on a GPU; there the limit is copying to pinned memory.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Bound, Options, Outcome, Row, conclude, median, median_ratio, parse_options, worst

MIB = 2**20
SIZES, QUICK_SIZES = (128 * MIB, 512 * MIB, 2048 * MIB), (32 * MIB, 128 * MIB)
REPETITIONS, QUICK_REPETITIONS = 7, 2
#: The size at which a reported temporary directory is compared with ``cp``.
COPIED_SIZE, QUICK_COPIED_SIZE = 512 * MIB, 64 * MIB

#: The claims of the issue.
SAVE_AT_MOST_MEMCPY, SAVE_AT_MOST_PLUS_SECONDS = 1.5, 0.020
OWN_DIRECTORY_AT_MOST_MILLISECONDS = 5.0
COPY_AT_MOST_CP = 1.3
CUDA_AT_MOST_SECONDS = 0.15
CUDA_BYTES, CUDA_TENSORS = 4 * 1024 * MIB, 1024

OURS, LIMIT = "save_state + report", "memcpy"
PEERS = ("torch.save", "dcp.save", "dcp.async_save")
OWN_DIRECTORY, TEMPORARY, CP = "report of checkpoint_dir()", "report of a directory", "cp -r"


@dataclass
class Stalls:
    """Seconds of each round by way, measured in one run on one size of state."""

    size: int
    seconds: dict[str, list[float]] = field(default_factory=dict)


# --------------------------------------------------------------------------- inside the worker


def rounds_of(ways: dict[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every contender, once a round; a first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, repetitions):
        for name in list(ways) if number % 2 else list(ways)[::-1]:
            taken = ways[name]()
            if number >= 0:
                seconds[name].append(taken)
    return seconds


def timed(call: Callable[[], Any]) -> float:
    import time

    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def report_and_settle(make_checkpoint: Callable[[], Any]) -> float:
    """Return the seconds until a checkpoint was made and reported; returns when it is committed."""
    import time

    import powertrain
    from powertrain.worker.session import current

    seconds = timed(lambda: powertrain.report({"saved": 1}, checkpoint=make_checkpoint()))
    session = current("the benchmark")
    manifest = Path(
        session.place.run.path, "checkpoints", f"checkpoint_{session.row:06d}", ".powertrain-manifest.json"
    )
    deadline = time.monotonic() + 120
    while not manifest.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{manifest} did not appear: the checkpoint was not committed within 120 s.")
        time.sleep(0.01)
    time.sleep(0.05)  # the uploader releases its memory
    return seconds


def model_and_optimizer(size: int) -> tuple[Any, Any]:
    """Return a model of square layers whose parameters and AdamW moments have ``size`` bytes together."""
    import torch

    width = 1024
    layers = max(1, round(size / (3 * 4 * (width + 1) * width)))
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def memcpy_of(tensors: list[Any]) -> Callable[[], float]:
    """Copy every tensor to preallocated, warm memory."""
    import ctypes

    import torch

    targets = [torch.ones_like(tensor) for tensor in tensors]
    moves = [
        (target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        for target, tensor in zip(targets, tensors, strict=True)
    ]

    def copy(_kept: Any = targets) -> None:
        for move in moves:
            ctypes.memmove(*move)

    return lambda: timed(copy)


def peers(model: Any, optimizer: Any, scratch: Path) -> dict[str, Callable[[], float]]:
    """Return the peers, each writing to ``scratch`` and removing its files."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def with_torch_save() -> float:
        path = scratch / "state.pt"
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        seconds = timed(lambda: torch.save(state, path))
        path.unlink()
        return seconds

    def sharded_state() -> dict[str, Any]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer}

    def with_dcp_save() -> float:
        seconds = timed(lambda: dcp.save(sharded_state(), checkpoint_id=scratch / "dcp"))
        shutil.rmtree(scratch / "dcp")
        return seconds

    def with_dcp_async_save() -> float:
        started: list[Any] = []
        seconds = timed(
            lambda: started.append(dcp.async_save(sharded_state(), checkpoint_id=str(scratch / "dcp-async")))
        )
        started[0].result()
        shutil.rmtree(scratch / "dcp-async")
        return seconds

    return dict(zip(PEERS, (with_torch_save, with_dcp_save, with_dcp_async_save), strict=True))


def reported_directories(size: int, copied: int, scratch: Path) -> dict[str, Callable[[], float]]:
    """Report directories with one file: one of Powertrain's of ``size`` bytes, and one of ``copied`` bytes beside
    ``cp``."""
    import os
    import subprocess

    import powertrain
    from powertrain import Checkpoint

    block = os.urandom(MIB)

    def write(path: Path, length: int) -> None:
        with open(path, "wb") as file:
            for _ in range(length // MIB):
                file.write(block)

    def with_own_directory() -> float:
        directory = powertrain.checkpoint_dir()
        write(Path(directory, "model.bin"), size)
        return report_and_settle(lambda: Checkpoint.from_directory(directory))

    ways = {OWN_DIRECTORY: with_own_directory}
    if copied:
        source = scratch / "reported"
        source.mkdir()
        write(source / "model.bin", copied)

        def with_cp() -> float:
            seconds = timed(lambda: subprocess.run(["cp", "-r", source, scratch / "copy"], check=True))
            shutil.rmtree(scratch / "copy")
            return seconds

        ways[CP] = with_cp
        ways[TEMPORARY] = lambda: report_and_settle(lambda: Checkpoint.from_directory(source))
    return ways


def stall_loop(config: dict[str, Any]) -> dict[str, list[float]]:
    """Training function: every contender saves one state, in turns."""
    import powertrain

    scratch = Path(tempfile.mkdtemp(dir=config["scratch"]))
    model, optimizer = model_and_optimizer(config["size"])
    tensors = [*model.state_dict().values()]
    tensors += [one for entry in optimizer.state.values() for one in entry.values() if one.ndim]
    ways = {
        LIMIT: memcpy_of(tensors),
        OURS: lambda: report_and_settle(lambda: powertrain.save_state(model=model, optimizer=optimizer)),
        **peers(model, optimizer, scratch),
        **reported_directories(config["size"], config["copied"], scratch),
    }
    return rounds_of(ways, config["repetitions"])


def cuda_loop(config: dict[str, Any]) -> dict[str, list[float]]:
    """Training function on a GPU: the tensors of a module, saved and, as the limit, copied."""
    import torch

    import powertrain

    each = config["size"] // CUDA_TENSORS // 4
    model = torch.nn.Module()
    for number in range(CUDA_TENSORS):
        model.register_parameter(f"weight_{number}", torch.nn.Parameter(torch.randn(each, device="cuda")))
    pinned = [torch.empty(each, pin_memory=True) for _ in range(CUDA_TENSORS)]

    def copy() -> None:
        for target, source in zip(pinned, model.parameters(), strict=True):
            target.copy_(source.detach(), non_blocking=True)
        torch.cuda.synchronize()

    ways = {
        LIMIT: lambda: timed(copy),
        OURS: lambda: report_and_settle(lambda: powertrain.save_state(model=model)),
    }
    return rounds_of(ways, config["repetitions"])


# --------------------------------------------------------------------------- outside


def measure(
    loop: Callable[..., Any], size: int, repetitions: int, *, copied: int = 0, cuda: bool = False
) -> Stalls:
    """Make one run with one worker; its storage and scratch files are removed."""
    from powertrain import CheckpointConfig, RunConfig, ScalingConfig
    from powertrain.torch import TorchTrainer

    directory = tempfile.mkdtemp(prefix="checkpoint-stall-")
    try:
        result = TorchTrainer(
            loop,
            train_loop_config={
                "size": size,
                "copied": copied,
                "repetitions": repetitions,
                "scratch": directory,
            },
            scaling_config=ScalingConfig(num_workers=1, use_gpu=cuda),
            run_config=RunConfig(
                name="stall",
                storage_path=f"{directory}/runs",
                verbose=0,
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
        return Stalls(size, result.return_value)
    finally:
        shutil.rmtree(directory)


def rows_of(stalls: Stalls) -> list[Row]:
    """Return a table row for each contender, in milliseconds."""
    what = f"{stalls.size // MIB:,} MiB"
    ours = stalls.seconds[OURS]
    rows = []
    for name, seconds in stalls.seconds.items():
        against = stalls.seconds[TEMPORARY] if name == CP else ours
        compared = name in (LIMIT, CP, *PEERS)
        rows.append(
            Row(
                what=what,
                who=name,
                unit="ms",
                numbers=[one * 1000 for one in seconds],
                ratio=median_ratio(against, seconds) if compared else None,
                limit=_limit_of(name),
            )
        )
    return rows


def _limit_of(name: str) -> str:
    limits = {
        OURS: f"{SAVE_AT_MOST_MEMCPY} memcpy + {SAVE_AT_MOST_PLUS_SECONDS * 1000:.0f} ms",
        OWN_DIRECTORY: f"{OWN_DIRECTORY_AT_MOST_MILLISECONDS:.0f} ms",
        TEMPORARY: f"{COPY_AT_MOST_CP} cp",
    }
    return limits.get(name, "")


def bounds_of(stalls: Stalls) -> list[Bound]:
    """Return the claims about one size."""
    size = f"{stalls.size // MIB:,} MiB"
    beyond = [max(0.0, one - SAVE_AT_MOST_PLUS_SECONDS) for one in stalls.seconds[OURS]]
    own = median(stalls.seconds[OWN_DIRECTORY])
    bounds = [
        Bound(
            f"{size}: save_state and report beyond {SAVE_AT_MOST_PLUS_SECONDS * 1000:.0f} ms, in memcpy",
            median_ratio(beyond, stalls.seconds[LIMIT]),
            at_most=SAVE_AT_MOST_MEMCPY,
        ),
        Bound(
            f"{size}: report of a checkpoint_dir(), ms",
            None if own is None else own * 1000,
            at_most=OWN_DIRECTORY_AT_MOST_MILLISECONDS,
        ),
    ]
    if TEMPORARY in stalls.seconds:
        ratio = median_ratio(stalls.seconds[TEMPORARY], stalls.seconds[CP])
        bounds.append(Bound("report of a temporary directory, in cp", ratio, at_most=COPY_AT_MOST_CP))
    return bounds


def on_this_machine(options: Options) -> Outcome:
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    sizes = QUICK_SIZES if options.quick else SIZES
    copied = QUICK_COPIED_SIZE if options.quick else COPIED_SIZE
    measured = [
        measure(stall_loop, size, repetitions, copied=copied if number == 1 else 0)
        for number, size in enumerate(sizes)
    ]
    return Outcome(
        title="Time that a checkpoint keeps the training thread",
        repetitions=repetitions,
        rows=[row for stalls in measured for row in rows_of(stalls)],
        bounds=[bound for stalls in measured for bound in bounds_of(stalls)],
        notes=[f"report of a directory and cp: one file of {copied // MIB} MiB."],
        samples={str(stalls.size): stalls.seconds for stalls in measured},
    )


def on_a_gpu(options: Options) -> Outcome:
    repetitions = QUICK_REPETITIONS if options.quick else REPETITIONS
    stalls = measure(cuda_loop, CUDA_BYTES, repetitions, cuda=True)
    bound = Bound(
        f"{CUDA_BYTES // MIB:,} MiB in {CUDA_TENSORS:,} tensors on a GPU: save_state and report, seconds",
        worst(stalls.seconds[OURS]) if options.quick else median(stalls.seconds[OURS]),
        at_most=CUDA_AT_MOST_SECONDS,
    )
    return Outcome(
        title="Time that a checkpoint of state on a GPU keeps the training thread",
        repetitions=repetitions,
        rows=rows_of(stalls),
        bounds=[bound],
        samples={str(stalls.size): stalls.seconds},
    )


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--cuda"]
    options = parse_options(f"{__doc__}", arguments)
    return conclude((on_a_gpu if "--cuda" in sys.argv else on_this_machine)(options), options)


if __name__ == "__main__":
    raise SystemExit(main())
