"""Breakpoints in ranks, relayed to the driver's terminal."""
