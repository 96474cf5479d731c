"""Shared by the verbs of the command line: finding runs, asking live ones, printing."""
