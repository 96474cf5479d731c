"""Recorded steps and samples as tables that rules read."""
