"""Documents of different lengths as windows of one length."""
