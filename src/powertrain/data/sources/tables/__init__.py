"""Tables with versions: Lance, Delta Lake and Iceberg, each read by its own library."""
