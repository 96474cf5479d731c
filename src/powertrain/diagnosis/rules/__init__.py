"""Rules: recorded steps and samples to findings. Pure."""
