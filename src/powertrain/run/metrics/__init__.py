"""Storage of metrics: every point of every rank, in columns on disk.

A point is one ``report``. Points pass three stages:

1. ``add`` encodes them and passes them to the one writer thread.
2. The writer appends them to a spool file, ``metrics/{lease}.open``, as soon as it can: immediately when it is idle,
   every :data:`SPOOL_INTERVAL_S` seconds under load. From then on they survive the death of the process.
3. When there are enough of them, or they are old enough, the writer makes them a segment,
   ``metrics/{lease}-{segment}.arrow``, durable and in columns, and empties the spool. Small segments are
   merged as they pile up, into ``metrics/{lease}-{first}-{last}.arrow``, as far as a merge fits into a fixed memory.

After a crash, points may be both in the spool and in a segment, or in a segment and in the one it was merged into. So
each piece of the spool names its target segment, and each segment the numbers it covers; readers skip duplicates. The
next controller turns the spool of a dead one into segments.
"""
