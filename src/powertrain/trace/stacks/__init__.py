"""Stacks of a process, and the location of its training loop."""
