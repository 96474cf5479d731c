"""A rank's part in checkpoints: capture, save, mark."""
