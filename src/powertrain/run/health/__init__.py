"""Failures and hangs: noticed, explained, survived."""
