"""Rows that leave a dataset: in memory, as tables, as files."""
