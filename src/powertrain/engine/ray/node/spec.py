"""The start arguments of a node agent."""

from __future__ import annotations

import msgspec

from powertrain.wire.keys import ConnectionInfo


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The start arguments of an agent. Travels in the arguments of an actor only: it holds keys."""

    #: "door" on the wire, so that an agent of another version can still say which version it has.
    connection: ConnectionInfo = msgspec.field(name="door")
    version: str
    #: The driver's mark in its runtime directory; see :func:`write_token`.
    token: str
    #: The run's directory for sockets and scratch, and others to make: all under the same paths on every node. The
    #: first of the others is where checkpoints wait; the driver has made and locked all but that one.
    runtime_dir: str
    directories: list[str] = []
    #: The address under which other nodes reach this one.
    address: str = ""
    #: The run's storage, pickled, and its name for people; b"" where there is no check.
    storage: bytes = b""
    storage_name: str = ""
    #: The driver's probe in the storage, ``probe/{proof}``, and the name for the reply beside it.
    proof: str = ""
    answer: str = ""
    #: Modules that the process imports which workers are forked from.
    preload: list[str] = []
    #: Where the driver finds modules. Workers look there too, after all else, as far as the node has it.
    import_path: list[str] = []
