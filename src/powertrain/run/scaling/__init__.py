"""The number of workers: slots, resizes, preemption."""
