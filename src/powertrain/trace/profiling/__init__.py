"""Profiles of a few steps of a live rank, by torch's profiler."""
