"""``powertrain migrate``: programs written for Ray Train, Tune, Data and TraceML, with the names of Powertrain."""
