"""The control plane of a run: facts, states, and what they add up to. Imports neither torch nor ray."""
