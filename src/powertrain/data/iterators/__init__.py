"""Iterators over datasets: the shards of ranks, and those of a process without ranks."""
