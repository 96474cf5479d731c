"""How a sweep runs: its journal, its decisions, and the threads that run its trials."""
