"""``Result``: the return value of ``fit()``, its display and its plots."""
