"""Output of a dataset: in memory, as tables, as files."""
