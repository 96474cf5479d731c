"""Published for tests of engines, policies and whole runs. Nothing in Powertrain imports it.

- :mod:`powertrain.testing.engine_contract`: what every engine must keep, as test classes to subclass.
- :mod:`powertrain.testing.scripted_engine`: an engine without processes, driven by a script.
- :mod:`powertrain.testing.clock`: a clock that stands still until it is moved.
- :mod:`powertrain.testing.programs`: the small programs that the contract starts on slots.
- :mod:`powertrain.testing.faults`: kill, raise, hang, stop or slow down at a chosen step of a rank or of storage.
- :mod:`powertrain.testing.power_cut`: what a disk would hold if the power failed now.
- :mod:`powertrain.testing.chronicle`: what the processes of a run did to storage, in order.
"""
