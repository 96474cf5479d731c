"""Published for tests of other packages and of training functions. Nothing in Powertrain imports it.

- :mod:`powertrain.testing.engine_contract`: what every engine must keep, as test classes to subclass.
- :mod:`powertrain.testing.programs`: the small programs that the contract starts on slots.
- :mod:`powertrain.testing.faults`: kill, raise, hang, stop or slow down at a chosen step of a rank or of storage.
- :mod:`powertrain.testing.power_cut`: what a disk would hold if the power failed now.
- :mod:`powertrain.testing.chronicle`: what the processes of a run did to storage, in order.

Tools of this repository's own tests are in ``tests/support``.
"""
