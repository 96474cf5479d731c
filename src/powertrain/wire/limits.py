"""Sizes of frames and messages."""

from __future__ import annotations

#: Bytes of a message in one frame. It bounds the memory that a stranger can make this process use, so it is small.
FRAME_LIMIT = 2**20
#: Bytes of one message in all its frames: it bounds the memory that a worker can make the controller use.
MESSAGE_LIMIT = 2**31
#: The additional bytes of a command, which may contain a whole message.
COMMAND_ROOM = 2**20
#: Bytes that CURVE adds to a frame.
ENCRYPTION = 33
