"""Shared by the verbs of the command line: arguments, ranks, printing."""
