"""What processes are doing: their stacks, and where a rank is in the user's own code."""
