"""A module beside the script that imports it."""
