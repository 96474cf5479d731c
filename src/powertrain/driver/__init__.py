"""``fit()`` in the process that calls it: checks, engine, directories, spec, run, conclusion."""
