"""How many examples a property test of Hypothesis looks at."""

from __future__ import annotations

from hypothesis import settings

#: The examples of a test that names no number, in the profile "ci".
_USUAL = 100


def scaled(examples: int) -> int:
    """Return how many examples to look at in this profile, where the profile "ci" would look at ``examples``."""
    return max(5, examples * settings().max_examples // _USUAL)
