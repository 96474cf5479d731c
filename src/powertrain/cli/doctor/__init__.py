"""``powertrain doctor``: the machine and the storage, checked before a run needs them."""
