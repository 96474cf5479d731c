"""Uploads of staged shares: on each node one uploader, started when it is first needed.

An uploader that dies is replaced, and its unfinished orders are sent again. Where the engine starts no processes beside
its slots, this process uploads for its own machine; elsewhere each rank uploads for itself, and its unfinished shares
die with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from powertrain.checkpoint import uploader
from powertrain.engine import base
from powertrain.run.workers.attempt import Member
from powertrain.wire.envelope import FromWorker
from powertrain.wire.from_controller import Drop, UploadShare
from powertrain.wire.hub import Hub

#: Deaths of a node's uploader, with nothing uploaded in between, after which its shares are given up.
_TRIES = 5


@dataclass
class _NodeUploader:
    """A node's uploader: a process on ``slot``, or threads ``here``; neither where ranks upload for themselves."""

    beside: base.Slot
    slot: base.Slot | None = None
    key: bytes = b""
    deaths: int = 0
    here: uploader.ShareUploader | None = None


@dataclass(frozen=True)
class _Order:
    node: str
    #: The rank that uploads for itself; None where the node's uploader does.
    member: Member | None
    share: UploadShare


class Uploaders:
    """All of a run's uploaders. The controller's thread only."""

    def __init__(
        self,
        engine: base.Engine,
        hub: Hub,
        storage: bytes,
        timeout: float,
        log_path: str,
        post: Callable[[FromWorker], None],
        lease: tuple[int, str] = (0, ""),
    ) -> None:
        """``storage`` is the run's, pickled; ``timeout`` the seconds for which a refused file is tried again.
        ``post`` is called, on any thread, with the results of uploads of this process; ``lease`` is the number
        and the token of the lease under which they upload."""
        self._lease = lease
        self._engine, self._hub, self._post = engine, hub, post
        self._storage, self._timeout, self._log_path = storage, timeout, log_path
        self._nodes: dict[str, _NodeUploader] = {}
        self._orders: dict[uploader.ShareKey, _Order] = {}

    def is_uploader(self, key: bytes) -> bool:
        return any(node.key == key for node in self._nodes.values() if node.key)

    @property
    def has_rank_uploads(self) -> bool:
        """Return True when shares are being uploaded by ranks, and would die with them."""
        return any(order.member is not None for order in self._orders.values())

    def outlives(self, member: Member) -> bool:
        """Return True when the uploader of the rank's node outlives the rank."""
        node = self._node_of(member)
        return node.slot is not None or node.here is not None

    def upload(self, member: Member, order: UploadShare) -> None:
        """Have a share of ``member`` uploaded from its node."""
        node = self._node_of(member)
        alone = node.slot is None and node.here is None
        mine = _Order(member.placement.slot.node_id, member if alone else None, order)
        self._orders[(order.attempt, order.row, order.rank)] = mine
        if node.here is not None:
            node.here.upload(order)
        else:
            self._hub.send(member.key if alone else node.key, order)

    def drop(self, key: uploader.ShareKey, staged: str) -> None:
        """Have a share forgotten and removed."""
        attempt, row, rank = key
        order = self._orders.pop(key, None)
        if order is None:
            return
        drop, node = Drop(attempt=attempt, row=row, rank=rank, staged=staged), self._nodes[order.node]
        self._send_drop(node, order.member, drop)

    def clear(self, member: Member, drop: Drop) -> None:
        """Have a share of ``member`` removed or given back on its node, whether or not its upload was ordered."""
        self._orders.pop((drop.attempt, drop.row, drop.rank), None)
        node = self._node_of(member)
        self._send_drop(node, member if node.slot is None and node.here is None else None, drop)

    def _send_drop(self, node: _NodeUploader, member: Member | None, drop: Drop) -> None:
        """Send a drop order; ``member`` is the rank that uploads for itself, if it does."""
        if node.here is not None:
            node.here.drop(drop)
        else:
            self._hub.send(member.key if member is not None else node.key, drop)

    def done(self, key: uploader.ShareKey) -> None:
        """Forget a share that was uploaded or given up."""
        order = self._orders.pop(key, None)
        if order is not None and order.node in self._nodes:
            self._nodes[order.node].deaths = 0

    def owns_slot(self, slot: str) -> bool:
        """Return True when an uploader runs on the slot with this id."""
        return self._node_on(slot) is not None

    def _node_on(self, slot: str) -> str | None:
        """Return the id of the node whose uploader runs on the slot."""
        nodes = self._nodes.items()
        return next((id for id, node in nodes if node.slot is not None and node.slot.id == slot), None)

    def on_uploader_gone(self, slot: base.Slot, give_up: Callable[[UploadShare], None]) -> None:
        """Replace the uploader; after too many deaths ``give_up`` is called with each share it had."""
        id = self._node_on(slot.id)
        assert id is not None
        node = self._nodes.pop(id)
        orders = [order.share for order in self._orders.values() if order.node == id]
        if node.deaths + 1 >= _TRIES:
            self._orders = {key: order for key, order in self._orders.items() if order.node != id}
            for share in orders:
                give_up(share)
        elif orders:
            self._start(id, node.beside, node.deaths + 1)
            for share in orders:
                self._hub.send(self._nodes[id].key, share)

    def rank_ended(self, member: Member) -> list[UploadShare]:
        """Return the unfinished orders of a rank that uploaded for itself and has ended."""
        return [order.share for order in self._orders.values() if order.member is member]

    def close(self) -> None:
        """Stop uploads of this process. Processes beside the slots end with the engine."""
        for node in self._nodes.values():
            if node.here is not None:
                node.here.close()

    def remove_empty_log(self) -> None:
        """Remove the log of an uploader that wrote nothing."""
        with contextlib.suppress(OSError):
            if os.path.getsize(self._log_path) == 0:
                os.unlink(self._log_path)

    def _node_of(self, member: Member) -> _NodeUploader:
        slot = member.placement.slot
        if slot.node_id not in self._nodes:
            self._start(slot.node_id, slot, 0)
        return self._nodes[slot.node_id]

    def _start(self, id: str, beside: base.Slot, deaths: int) -> None:
        connection = self._hub.admit()
        number, token = self._lease
        spec = uploader.UploaderSpec(
            connection=connection, storage=self._storage, timeout=self._timeout, lease=number, token=token
        )
        slot = self._engine.attend(
            beside,
            base.ProcessSpec(
                entry=uploader.ENTRY,
                payload=msgspec.msgpack.encode(spec),
                env={},
                log_path=self._log_path,
                title="uploader",
                shielded=True,
            ),
        )
        node = self._nodes[id] = _NodeUploader(beside, slot, deaths=deaths)
        if slot is not None:
            node.key = connection.keys.public
        elif beside.host == socket.gethostname():
            node.here = uploader.ShareUploader(
                lambda: pickle.loads(self._storage), self._post, self._timeout, lease=self._lease
            )
