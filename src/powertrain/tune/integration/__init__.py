"""Callbacks that report from the loops of other libraries. Each module imports its library."""
