"""Writers of the formats and databases of other tools."""
