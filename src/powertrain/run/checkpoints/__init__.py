"""Checkpoints of a live run: reported, uploaded, committed, validated."""
