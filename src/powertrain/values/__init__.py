"""Values that users report: plain forms for storage, and the objects themselves rebuilt from data."""
