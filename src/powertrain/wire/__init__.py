"""Framed, authenticated messages between a worker and its run.

One :class:`Hub` (the controller's side) listens; each worker has one :class:`Link`. Both are ZeroMQ sockets
with CURVE keys; the hub knows the public key of every worker it expects and drops all others before a byte
of theirs is decoded, and it knows a sender by its key, never by what the message claims.

A worker's messages travel in :class:`Envelope` batches, in numbered frames. A link keeps unacknowledged frames and
resends them after a lost connection, and the hub drops duplicates. So a message handed to a link arrives once, or the
worker is dead. Batches are acknowledged when they have been handled, not when they arrive: a controller that falls
behind slows its workers' sends, and its memory stays bounded. Commands are numbered too, and resent over a new
connection until an envelope acknowledges them.

No frame is longer than :data:`FRAME_LIMIT`: ZeroMQ closes a connection over which a longer one begins to come, before
its sender is known. Longer messages take several frames, up to :data:`MESSAGE_LIMIT`; beyond that the sender reports it
and leaves out the large part. A frame of a known sender that cannot be read is not acknowledged, and nothing of that
sender is read any more: the hub reports it to the controller, which fails that rank with the reason. Other senders are
not affected.
"""
