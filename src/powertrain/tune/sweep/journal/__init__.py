"""The journal of a sweep, and the state derived from it."""
