"""Every point of every rank, in columns on disk.

A point is one ``report``. Points go three ways in turn:

1. ``add`` encodes them and hands them to the one writer thread.
2. The writer appends them to a spool file, ``metrics/{lease}.open``, as soon as it can: at once when it is
   idle, every :data:`SPOOL_EVERY` seconds under load. From then on they survive the death of the process.
3. When there are enough of them, or they are old enough, the writer makes them a segment,
   ``metrics/{lease}-{segment}.arrow``, durable and in columns, and empties the spool. Small segments are
   merged as they pile up, into ``metrics/{lease}-{first}-{last}.arrow``, as far as a merge fits into a fixed memory.

A crash can leave points both in the spool and in a segment, or in a segment and in the one it was merged
into. So each piece of the spool says for which segment it is meant, and each segment which numbers it covers;
readers pass over what they have already. The next controller turns a dead one's spool into segments.
"""
