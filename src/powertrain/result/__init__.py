"""``Result``: what ``fit()`` returns, and how it is shown and drawn."""
