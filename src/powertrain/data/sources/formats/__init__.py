"""Sources that read the file formats and databases of other tools."""
