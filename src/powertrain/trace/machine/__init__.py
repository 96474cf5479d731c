"""Samples of the machine: processes, memory, devices."""
