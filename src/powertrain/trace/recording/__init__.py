"""Where a rank's time goes, recorded as it passes: switches between phases, steps, and the ring they are kept in.

One thread records, the one that runs the user's function; whatever calls come from others are ignored. A step is
closed by ``trace_step``, or found: it ends with its last optimizer step, and which one was the last is known when the
next batch is asked for or an optimizer of it steps again. So what was summed up at an optimizer's end is set aside, and
either becomes the record of a step or is added to what came after it. A loop without optimizers has a step for each
report.

Loads neither torch nor numpy.
"""
