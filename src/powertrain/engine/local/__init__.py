"""This machine: slots are a number, processes are forks of one warm server.

Workers see the script as it is at ``fit()``. So the server of a run is forked from the calling process when ``fit()``
begins, with all that the script has imported, set and patched, and ends with the run (:func:`server_of_run`). Tasks and
actors see the script as it is at ``.remote()``, and each has such a server (:func:`server_of_call`). Where
forking is unsafe (:func:`why_fork_is_unsafe` states the rule) workers come from a fresh interpreter instead and import
modules from their files; it holds nothing of the script, so all runs of the process share it (:func:`warm_up`).
"""
