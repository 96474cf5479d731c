"""Sizes of frames and messages."""

from __future__ import annotations

#: Bytes of a message in one frame. It bounds what a stranger can make this process hold, so it is small.
FRAME_LIMIT = 2**20
#: Bytes of one message in all its frames: it bounds what a worker can make the controller hold.
MESSAGE_LIMIT = 2**31
#: What a command may have beyond that, which may hold all that a message has brought.
COMMAND_ROOM = 2**20
#: What CURVE adds to a frame.
ENCRYPTION = 33
