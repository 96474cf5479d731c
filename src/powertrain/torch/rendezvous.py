"""Torch's rendezvous store: where the ranks of a process group meet, and how it is protected.

- "existing": the script has set up a group itself; it is kept, and never destroyed here.
- "alone": one worker. The store lives in this process's memory.
- "env": torchrun has given an address and hosts the store there.
- "file": all workers are on one node. The store is a file in the run's runtime directory, which only the run's user can
  enter; torch's TCP store has no authentication, so every local user could read and change it.
- "tcp": several nodes, or ``TorchConfig(init_method="tcp")``. Rank 0 opens a listening socket (loopback when all
  workers share a host, otherwise its node's own address) and hands the open socket to torch's store, so no other
  process can take the port in between.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from powertrain.frameworks.ports import ReservedPort, bind, joined

__all__ = [
    "Rendezvous",
    "ReservedPort",
    "bind",
    "open_file_store",
    "open_tcp_store",
    "publish_reserved",
    "read_reserved",
]

#: Seconds for a worker to reach rank 0's listening socket.
_CONNECT_TIMEOUT_S = 120.0
#: Key of the address that rank 0 has reserved, in a store of kind "file".
_RESERVED_KEY = "powertrain/reserved"
#: Prefix of the names of such stores.
_FILE_PREFIX = "rendezvous-"


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of the workers; ``kind`` is one of those in the module's docstring."""

    kind: str
    #: The address of the store, for "env" and "tcp".
    host: str = ""
    port: int = 0
    #: The name of the store's file, for "file": each start has its own.
    file: str = ""

    @classmethod
    def in_new_file(cls) -> Rendezvous:
        """Return a rendezvous with a new file name."""
        return cls("file", file=_FILE_PREFIX + secrets.token_hex(8))

    @classmethod
    def of_torchrun(cls) -> Rendezvous | None:
        """Return the store of the torchrun that has started this process; None where none has."""
        if "TORCHELASTIC_RUN_ID" not in os.environ or "MASTER_ADDR" not in os.environ:
            return None
        return cls("env", os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def __str__(self) -> str:
        if self.file:
            return self.file
        return joined(self.host, self.port)


def open_file_store(dist: Any, meeting: Rendezvous, directory: str) -> Any:
    """Open the store of a meeting of kind "file" in ``directory``, the run's runtime directory.

    The file is removed with that directory. It cannot be removed earlier: torch waits for a missing file to be made.
    """
    path = os.path.join(directory, meeting.file)
    # Torch would make it readable to all, which matters if the directory is ever opened to others.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return dist.FileStore(path)


def publish_reserved(store: Any, port: ReservedPort) -> None:
    """Reserve the port of MASTER_PORT in a rendezvous of kind "file", on rank 0, before the group is set up."""
    host, number = port.open("", listens=False)
    store.set(_RESERVED_KEY, f"{number} {host}")


def read_reserved(store: Any) -> tuple[str, str]:
    """Return MASTER_ADDR and MASTER_PORT in a rendezvous of kind "file", after the group is set up: no rank waits."""
    number, _, host = store.get(_RESERVED_KEY).decode().partition(" ")
    return host, number


def open_tcp_store(
    dist: Any, meeting: Rendezvous, world_size: int, port: ReservedPort | None, timeout: timedelta
) -> Any:
    """Open the store of a meeting of kind "tcp"; ``port`` is rank 0's, which serves it."""
    server = {"is_master": True, "master_listen_fd": port.take_descriptor()} if port is not None else {}
    connect = min(timeout, timedelta(seconds=_CONNECT_TIMEOUT_S))
    return dist.TCPStore(
        meeting.host, meeting.port, world_size, timeout=connect, wait_for_workers=False, **server
    )
