"""Where rows come from: one module per kind of source."""
