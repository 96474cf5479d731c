"""Methods of ``Dataset`` by subject: each class adds some to the one before it."""
