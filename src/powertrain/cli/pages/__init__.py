"""Verbs that show runs in a browser."""
