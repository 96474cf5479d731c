"""Datasets of Ray Data: snapshots, tasks and streams."""
