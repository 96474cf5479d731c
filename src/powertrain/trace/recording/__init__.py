"""Recording of a rank's phases and steps in a ring buffer.

One thread records, the one that runs the user's function; calls from other threads are ignored. ``trace_step`` closes a
step; without it the recorder detects steps. A detected step ends with its last optimizer step, which is known only when
the next batch is requested or one of its optimizers steps again. The sums at the end of an optimizer step are therefore
set aside, and either become the record of a step or are added to the following sums. A loop without optimizers has one
step for each report.

Loads neither torch nor numpy.
"""
