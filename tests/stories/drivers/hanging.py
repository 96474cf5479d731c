"""Training functions of which one rank hangs, each in another way. The line it hangs at carries the kind's name."""

from __future__ import annotations

import ctypes
import os
import pdb  # noqa: T100 (a debugger that waits is one of the stories)
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import powertrain
from powertrain.torch import prepare_data_loader

#: The step at which it happens, and how many there are.
STEP, STEPS = 5, 8
CULPRIT = 1
#: Nothing hangs for longer, whatever goes wrong.
FOR_EVER = 60


def _rank() -> int:
    return powertrain.get_context().get_world_rank()


def _is_now(step: int) -> bool:
    return step == STEP and _rank() == CULPRIT


def _together() -> None:
    time.sleep(0.07)
    dist.all_reduce(torch.ones(1))


def _steps(act: Callable[[], None]) -> None:
    for step in range(STEPS):
        if _is_now(step):
            act()
        _together()
        powertrain.report({"step": step})


# --------------------------------------------------------------------------- collectives


def missed_all_reduce() -> None:
    for step in range(STEPS):
        time.sleep(0.02)
        if not _is_now(step):
            dist.all_reduce(torch.ones(1))  # hangs: missed_all_reduce
        powertrain.report({"step": step})


def extra_all_reduce() -> None:
    for step in range(STEPS):
        time.sleep(0.02)
        if _is_now(step):
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(1))  # hangs: extra_all_reduce
        powertrain.report({"step": step})


def mismatched_reports() -> None:
    for step in range(STEPS):
        time.sleep(0.02)
        dist.all_reduce(torch.ones(1))  # hangs: mismatched_reports
        if not _is_now(step):
            powertrain.report({"step": step}, barrier=step > STEP)


def returns_before_an_all_reduce() -> None:
    for step in range(STEPS):
        if _is_now(step):
            return
        _together()
        powertrain.report({"step": step})


def returns_before_a_report_barrier() -> None:
    for step in range(STEPS):
        if _is_now(step):
            return
        powertrain.report({"step": step}, barrier=True)


def returns_before_a_barrier_of_the_run() -> None:
    for step in range(STEPS):
        if _is_now(step):
            return
        powertrain.collective.barrier()


# --------------------------------------------------------------------------- data


class Rows(Dataset[float]):
    def __init__(self, blocks: bool) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> float:
        if self.blocks and index == STEP and _rank() == CULPRIT:
            threading.Event().wait(FOR_EVER)  # hangs: loader
        return float(index)


def _collate(rows: list[float]) -> torch.Tensor:
    if rows[0] == STEP and _rank() == CULPRIT:
        time.sleep(FOR_EVER)  # hangs: collate_in_a_worker
    return torch.tensor(rows)


def _over(loader: DataLoader[Any]) -> None:
    for batch in prepare_data_loader(loader, add_dist_sampler=False):
        dist.all_reduce(batch)
        powertrain.report({"sum": float(batch.sum())})


def loader() -> None:
    _over(DataLoader(Rows(blocks=True), batch_size=1))


def collate_in_a_worker() -> None:
    _over(DataLoader(Rows(blocks=False), batch_size=1, num_workers=1, collate_fn=_collate))


# --------------------------------------------------------------------------- the rank's own code


def lock() -> None:
    taken = threading.Lock()
    taken.acquire()

    def act() -> None:
        taken.acquire(timeout=FOR_EVER)  # hangs: lock

    _steps(act)


def sleep() -> None:
    def act() -> None:
        time.sleep(FOR_EVER)  # hangs: sleep

    _steps(act)


def stopped() -> None:
    def act() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # hangs: stopped

    _steps(act)


def c_with_the_lock() -> None:
    def act() -> None:
        ctypes.PyDLL(None).sleep(FOR_EVER)  # hangs: c_with_the_lock

    _steps(act)


def c_without_the_lock() -> None:
    def act() -> None:
        ctypes.CDLL(None).sleep(FOR_EVER)  # hangs: c_without_the_lock

    _steps(act)


def slow_read() -> None:
    """A file whose next byte does not come: a pipe with a name, held open so that it does not end."""
    place = os.path.join(tempfile.mkdtemp(), "slow")
    os.mkfifo(place)
    file = open(os.open(place, os.O_RDWR), "rb", buffering=0)  # noqa: SIM115

    def act() -> None:
        file.read(1)  # hangs: slow_read

    try:
        _steps(act)
    finally:
        file.close()
        os.unlink(place)
        os.rmdir(os.path.dirname(place))


def endless_loop() -> None:
    def act() -> None:
        until = time.monotonic() + FOR_EVER
        while time.monotonic() < until: pass  # noqa: E701 hangs: endless_loop  # fmt: skip

    _steps(act)


# --------------------------------------------------------------------------- what only looks like it


def long_first_step(config: dict[str, float]) -> None:
    time.sleep(config["seconds"])
    _steps(lambda: None)


def long_first_step_of_one(config: dict[str, float]) -> None:
    if _rank() == CULPRIT:
        time.sleep(config["seconds"])  # long: long_first_step_of_one
    _steps(lambda: None)


def pause_alone(config: dict[str, float]) -> None:
    for step in range(STEPS):
        time.sleep(config["seconds"] if step == STEP else 0.02)
        powertrain.report({"step": step})


def evaluation_on_rank_0(config: dict[str, float]) -> None:
    """Takes less than the sixty usual steps after which a run acts. A step takes 0.17 s here, so sixty are longer than
    the evaluation even where that is held up for seconds."""
    for step in range(-40, STEPS):
        time.sleep(0.1)
        _together()
        powertrain.report({"step": step})
        if step == STEP and _rank() == 0:
            time.sleep(config["seconds"])  # long: evaluation_on_rank_0


def long_checkpoint(config: dict[str, float]) -> None:
    for step in range(STEPS):
        _together()
        if step == STEP and _rank() == 0:
            with powertrain.checkpoint_dir() as directory:
                with open(os.path.join(directory, "model"), "w") as file:
                    file.write("weights")
                time.sleep(config["seconds"])  # long: long_checkpoint
                powertrain.report({"step": step}, powertrain.Checkpoint.from_directory(directory))
        else:
            powertrain.report({"step": step})


class _Patient:
    """A terminal without input for a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def readline(self) -> str:
        time.sleep(self.seconds)
        return "continue\n"

    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None: ...


def paused_debugger(config: dict[str, float]) -> None:
    terminal: Any = _Patient(config["seconds"])

    def act() -> None:
        pdb.Pdb(stdin=terminal, stdout=terminal).set_trace()

    _steps(act)


def steady(config: dict[str, float]) -> None:
    until = time.monotonic() + config["seconds"]
    while True:
        go_on = torch.tensor([float(time.monotonic() < until)])
        dist.all_reduce(go_on)
        powertrain.report({"left": float(go_on)})
        time.sleep(0.02)
        if go_on < powertrain.get_context().get_world_size():
            return
