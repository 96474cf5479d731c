"""A package that is run with -m."""
