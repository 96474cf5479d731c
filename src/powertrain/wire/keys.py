"""Keys of the two sides, and the address of a hub."""

from __future__ import annotations

import msgspec
import zmq.auth

from powertrain.wire.envelope import Envelope


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, Z85-encoded."""

    public: bytes
    secret: bytes

    @classmethod
    def new(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())


class ConnectionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """All a worker needs to reach its run. Travels down inherited pipes or actor arguments only."""

    endpoint: str
    hub_key: bytes
    keys: KeyPair


class Received(msgspec.Struct, frozen=True):
    """A batch, the public key it was sent with, and the number of its last frame."""

    sender: bytes
    number: int
    envelope: Envelope


def in_brackets(address: str) -> str:
    return f"[{address}]" if ":" in address else address
