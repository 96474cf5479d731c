"""The time from ``fit()`` to the first step."""
