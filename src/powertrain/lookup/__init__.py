"""Find runs and sweeps and follow them: shared by the command line and the dashboard."""
