"""Operations on rows between the source and the user, and the runner that applies them.

An :class:`Operation` is a value: a function with its arguments, names of columns. A :class:`Runner` applies a sequence
of them to rows, on the calling thread or in processes of its own, with the same result at any number of threads,
processes and ranks.
"""
