"""What a sweep keeps: its journal, and the state that follows from it."""
