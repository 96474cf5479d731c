"""Ray Data's options: strategies, contexts, arguments about scheduling, and refused names."""
