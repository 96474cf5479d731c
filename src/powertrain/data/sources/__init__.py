"""Sources of rows: one module per kind."""
