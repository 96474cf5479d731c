"""Stacks of a process, and where its loop is."""
