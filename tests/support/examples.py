"""Number of examples of Hypothesis property tests."""

from __future__ import annotations

from hypothesis import settings

#: Number of examples of a test that sets none, in the profile "ci".
_USUAL = 100


def scaled(examples: int) -> int:
    """Return the number of examples in this profile for ``examples`` in the profile "ci"."""
    return max(5, examples * settings().max_examples // _USUAL)
