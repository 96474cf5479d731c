"""The ranks of an attempt: placed, started, followed."""
