"""The position of each tracker, kept in the run's directory: ``trackers/{name}.json``."""

from __future__ import annotations

import secrets
from typing import Annotated

import msgspec

from powertrain.errors import StorageError
from powertrain.storage import Storage
from powertrain.storage.addresses import without_secrets
from powertrain.storage.base import RECORD_BYTES_LIMIT
from powertrain.trackers.reading import ReadPosition

_KEY_BYTES = 8
_Text = Annotated[str, msgspec.Meta(max_length=4096)]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The tracker's run, and the last point that is known to be in it."""

    #: Random; given to the tracker's run when it is made, so that it is found again should its id be lost.
    key: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    #: The tracker's id of its run; "" before it was made.
    id: _Text = ""
    attempt: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 31)] = -1
    row: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)] = 0
    #: The state with which the tracker's run was finished; "" where it was not, or was continued since.
    finished: _Text = ""

    @property
    def position(self) -> ReadPosition:
        """The position at which reading continues."""
        return ReadPosition(self.attempt, self.row)

    def moved_to(self, position: ReadPosition) -> Cursor:
        """The cursor at another position."""
        return msgspec.structs.replace(self, attempt=position.attempt, row=position.row)


def new() -> Cursor:
    """A cursor of a tracker that has nothing yet."""
    return Cursor(key=secrets.token_hex(_KEY_BYTES))


def read(storage: Storage, name: str) -> Cursor | None:
    """Read the cursor of a tracker; None where it has none yet.

    Raises:
        StorageError: It is damaged.
        OSError: Storage does not give it.
    """
    key = _key(name)
    try:
        data = storage.get(key, limit=RECORD_BYTES_LIMIT)
    except FileNotFoundError:
        return None
    try:
        return msgspec.json.decode(data, type=Cursor)
    except msgspec.MsgspecError as error:
        raise StorageError(
            f"{key} of the run at {without_secrets(storage.uri)!r} is damaged: {error}. Restore it from a copy, or "
            f"remove it: then the tracker {name!r} begins a new run with all points."
        ) from error


def write(storage: Storage, name: str, cursor: Cursor) -> None:
    """Keep a cursor. Durable on return."""
    storage.put(_key(name), msgspec.json.format(msgspec.json.encode(cursor)))


def _key(name: str) -> str:
    return f"trackers/{name}.json"
