"""Ray: slots are bundles of placement groups, processes are started by an agent on each node."""
