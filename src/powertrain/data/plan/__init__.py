"""The order of rows: blocks, cuts, positions."""
