"""``powertrain gc``: checkpoints beyond retention, and what killed runs left behind."""
