"""Values and calls in other processes of this machine: references to them, and actors."""
