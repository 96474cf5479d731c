"""Recording of a rank's phases and steps in a ring buffer.

One thread records, the one that runs the user's function; calls from others are ignored. A step is
closed by ``trace_step``, or found: it ends with its last optimizer step, and which one was the last is known when the
next batch is asked for or an optimizer of it steps again. So the sums at an optimizer's end are set aside, and
either become the record of a step or are added to the later ones. A loop without optimizers has a step for each
report.

Loads neither torch nor numpy.
"""
