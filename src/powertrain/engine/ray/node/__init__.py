"""A run's agent on a Ray node."""
