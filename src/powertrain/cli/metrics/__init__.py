"""``powertrain metrics``: the metrics of a run as a table, curves, CSV or JSON."""
