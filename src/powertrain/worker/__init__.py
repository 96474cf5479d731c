"""What runs inside each rank's process."""
