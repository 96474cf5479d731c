"""The user's script in a worker's process."""
