"""Another user of the machine can neither reach nor read where the ranks of a one-node run meet."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from powertrain import FailureConfig, RunConfig, ScalingConfig, TorchConfig, get_context
from powertrain.torch import TorchTrainer

#: Any uid but ours; nothing has to know it.
STRANGER = 54321
PATIENCE_S = 60.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.02)


def store_path() -> str:
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "path", ""))


def tell_and_wait(config: dict[str, str]) -> None:
    """Say where this rank is, and stay there until the test has looked."""
    rank = get_context().get_world_rank()
    facts = {
        "pid": os.getpid(),
        "address": os.environ["MASTER_ADDR"],
        "port": int(os.environ["MASTER_PORT"]),
        "store": store_path(),
    }
    written = Path(config["directory"], f".{rank}")
    written.write_text(json.dumps(facts))
    written.rename(Path(config["directory"], f"rank-{rank}"))
    wait_until(Path(config["directory"], "looked").exists)


def as_stranger(look: Callable[[], Any]) -> Any:
    """What ``look`` returns in a process of another user."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(STRANGER, STRANGER, STRANGER)
            os.setresuid(STRANGER, STRANGER, STRANGER)
            os.write(write, json.dumps(look()).encode())
        except BaseException:
            os.write(write, json.dumps(traceback.format_exc()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return json.loads(found)


def connect(address: str, port: int) -> None:
    with (
        socket.socket() as plain
    ):  # not create_connection: it loads a codec, from files that a stranger may not see
        plain.settimeout(5)
        plain.connect((address, port))


def can(action: Callable[[], Any]) -> bool:
    try:
        action()
    except (OSError, RuntimeError):
        return False
    return True


def listening_addresses(pid: int) -> list[str]:
    connections = psutil.Process(pid).net_connections(kind="inet")
    return [entry.laddr.ip for entry in connections if entry.status == psutil.CONN_LISTEN]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reaches_nothing_of_the_rendezvous(tmp_path: Path) -> None:
    trainer = TorchTrainer(
        tell_and_wait,
        train_loop_config={"directory": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(name="met", storage_path=str(tmp_path / "runs")),
        torch_config=TorchConfig(backend="gloo"),
    )
    run = threading.Thread(target=trainer.fit)
    run.start()
    try:
        ranks = [tmp_path / f"rank-{rank}" for rank in (0, 1)]
        wait_until(lambda: all(rank.exists() for rank in ranks))
        facts = [json.loads(rank.read_text()) for rank in ranks]
        announced = facts[1]["address"], facts[1]["port"]
        store = facts[0]["store"]
        assert os.path.isfile(store), "the ranks meet in a file"

        def look() -> dict[str, bool]:
            return {
                "connects to MASTER_PORT": can(lambda: connect(*announced)),
                "opens the file": can(lambda: open(store, "rb")),
                "lists the directory": can(lambda: os.listdir(os.path.dirname(store))),
            }

        assert as_stranger(look) == {
            "connects to MASTER_PORT": False,
            "opens the file": False,
            "lists the directory": False,
        }
        # What stays open: one socket of gloo's in each rank, on loopback. A TCP store would be one more, of rank 0.
        assert [listening_addresses(rank["pid"]) for rank in facts] == [["127.0.0.1"]] * 2
    finally:
        (tmp_path / "looked").touch()
        run.join(PATIENCE_S)
    assert not run.is_alive()
    assert not os.path.exists(store), "the file goes with the run"


def note_and_fail_once(config: dict[str, str]) -> None:
    context = get_context()
    if context.get_world_rank() == 0:
        with open(os.path.join(config["directory"], "stores"), "a") as notes:
            notes.write(store_path() + "\n")
    dist.barrier()
    if context.get_attempt() == 0:
        raise ValueError("once")


def test_each_attempt_meets_in_a_file_of_its_own(tmp_path: Path) -> None:
    TorchTrainer(
        note_and_fail_once,
        train_loop_config={"directory": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="again", storage_path=str(tmp_path / "runs"), failure_config=FailureConfig(max_failures=1)
        ),
        torch_config=TorchConfig(backend="gloo"),
    ).fit()
    first, second = (tmp_path / "stores").read_text().split()
    assert first != second
    assert not os.path.exists(first)
    assert not os.path.exists(second)
