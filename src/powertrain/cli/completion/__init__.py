"""``powertrain completion``: words that a shell completes."""
