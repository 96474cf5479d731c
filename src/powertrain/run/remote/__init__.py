"""Requests of the command line to a live run."""
