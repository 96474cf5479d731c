"""A process that has torch loaded and has computed nothing: ranks of a test are forked from it.

It reads lines "RANK WORLD_SIZE ADDRESS" and forks one process for each. That process connects to ADDRESS
and calls the functions sent to it, in its main thread, until the connection ends. Every process goes when
the zygote's stdin closes or the test closes its connection.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from multiprocessing.connection import Client
from types import SimpleNamespace

import cloudpickle
import torch
import torch._dynamo

from powertrain.torch import backend, device, prepare


def context(rank: int, world_size: int) -> SimpleNamespace:
    """What ``powertrain.get_context()`` would be in a worker."""
    return SimpleNamespace(
        get_world_rank=lambda: rank,
        get_world_size=lambda: world_size,
        get_local_rank=lambda: rank,
        get_local_world_size=lambda: world_size,
        get_node_rank=lambda: 0,
    )


def serve(rank: int, world_size: int, address: str) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    for module in (device, prepare):
        module.context = lambda caller: context(rank, world_size)  # type: ignore[attr-defined]
    backend._runtime_directory = lambda: os.path.dirname(address)
    connection = Client(address, "AF_UNIX")
    connection.send((rank, os.getpid()))
    while True:
        try:
            function, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            answer = cloudpickle.dumps((True, function(*args, **kwargs)))
        except Exception as error:
            answer = cloudpickle.dumps((False, error))
        connection.send_bytes(answer)


if __name__ == "__main__":
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        rank, world_size, address = line.rstrip("\n").split(" ", 2)
        if os.fork() == 0:
            os.close(0)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            serve(int(rank), int(world_size), address)
    os._exit(0)  # nothing is held that needs the interpreter's slow way out
