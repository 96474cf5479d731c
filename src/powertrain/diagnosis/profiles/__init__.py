"""Profiles of single steps: read from a trace of torch's profiler, summed up, and shown."""
