"""Torch's rendezvous store: where the ranks of a process group meet, and who else can reach it.

- "existing": the script has set up a group itself; it is kept, and never destroyed by us.
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

#: A worker that cannot reach rank 0's listening socket within this many seconds never will.
_CONNECT_TIMEOUT_S = 120.0
#: Where the ranks find the address that rank 0 has reserved, in a store of kind "file".
_RESERVED_KEY = "powertrain/reserved"
#: Begins the names of such stores.
_FILE_PREFIX = "rendezvous-"


@dataclass(frozen=True)
class Rendezvous:
    """Where the workers meet; ``kind`` is one of those in the module's docstring."""

    kind: str
    #: The address of the store, for "env" and "tcp".
    host: str = ""
    port: int = 0
    #: The name of the store's file, for "file": each start has its own.
    file: str = ""

    @classmethod
    def in_new_file(cls) -> Rendezvous:
        """Name a file that no store has used before."""
        return cls("file", file=_FILE_PREFIX + secrets.token_hex(8))

    @classmethod
    def of_torchrun(cls) -> Rendezvous | None:
        """The store of the torchrun that has started this process; None where none has."""
        if "TORCHELASTIC_RUN_ID" not in os.environ or "MASTER_ADDR" not in os.environ:
            return None
        return cls("env", os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    def __str__(self) -> str:
        if self.file:
            return self.file
        return joined(self.host, self.port)


def open_file_store(dist: Any, meeting: Rendezvous, directory: str) -> Any:
    """Open the store of a meeting of kind "file" in ``directory``, the run's runtime directory.

    The file goes with that directory. It cannot go earlier: torch waits for a file that is missing to be made.
    """
    path = os.path.join(directory, meeting.file)
    # Torch would make it readable to all, should the directory ever be opened to others.
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    return dist.FileStore(path)


def publish_reserved(store: Any, port: ReservedPort) -> None:
    """Rank 0: reserve the port that MASTER_PORT names in a meeting of kind "file". Before the group is set up."""
    host, number = port.open("", listens=False)
    store.set(_RESERVED_KEY, f"{number} {host}")


def read_reserved(store: Any) -> tuple[str, str]:
    """MASTER_ADDR and MASTER_PORT in a meeting of kind "file". After the group is set up, so that no rank waits."""
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
