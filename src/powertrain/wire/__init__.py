"""Framed, authenticated messages between a worker and its run.

One :class:`Hub` (the controller's side) listens; each worker has one :class:`Link`. Both are ZeroMQ sockets
with CURVE keys; the hub knows the public key of every worker it expects and drops all others before a byte
of theirs is decoded, and it knows a sender by its key, never by what the message claims.

Everything a worker says travels in :class:`Envelope` batches, in numbered frames. A link keeps what is not acknowledged
and sends it again after a lost connection, and the hub drops what it has already seen. So a message handed to a link
arrives once, or the worker is dead. Batches are acknowledged when they have been dealt with, not when they arrive: a
controller that falls behind slows what workers send, and its memory stays bounded. Commands are numbered too, and sent
again over a new connection until an envelope says that they were heard.

No frame is longer than :data:`FRAME_LIMIT`: ZeroMQ closes a connection over which a longer one begins to come, before
it is known who has sent it. What is longer goes in several frames, up to :data:`MESSAGE_LIMIT`; beyond that the sender
says so and leaves out what is too large. A frame of a known sender that cannot be read is not acknowledged, and nothing
of that sender is read any more: the hub reports it to the controller, which fails that rank with the reason. Other
senders are not affected.
"""
