"""Execution of a sweep: its journal, its decisions, and the threads that run its trials."""
