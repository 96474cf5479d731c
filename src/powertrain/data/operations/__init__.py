"""What is done to rows on their way to the user: as values that travel, and the one who does it.

An :class:`Operation` is a value: a function with its arguments, names of columns. A :class:`Runner` does a sequence of
them to rows, on the thread that asks or in processes of its own, and the outcome is the same at any number of threads,
processes and ranks.
"""
