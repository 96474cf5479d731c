"""Fault injection points: every step that changes storage passes here first, and every training step.

They do nothing in an ordinary run. A test of a crash at some step installs a hook, in its own process with
:func:`install`, in every process of a run through the environment variable
``POWERTRAIN_BOUNDARY_HOOK="package.module:function"``. The hook is called with the kind of step and its target, and may
count, delay, raise ``OSError`` or end the process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module

#: Names the function that is called at every boundary, as "package.module:function".
VARIABLE = "POWERTRAIN_BOUNDARY_HOOK"
#: The steps: bytes into a file, file or directory to disk, names in a directory, objects in a store.
KINDS = ("write", "fsync", "link", "rename", "unlink", "mkdir", "put", "delete")
#: The kind of a training step, which changes nothing in storage.
TRAINING_STEP = "step"

Hook = Callable[[str, str], None]

#: Which process this is: "controller", "uploader" or "rank-3". For hooks that pick their victim.
role = "controller"
_hook: Hook | None = None
_asked = False


def crossing(kind: str, target: str) -> None:
    """Called right before a step of ``kind`` (see :data:`KINDS`) on a path or key."""
    if not _asked:
        _lookup_environment()
    if _hook is not None:
        _hook(kind, target)


def training_step(at: str, number: int) -> None:
    """Called in a rank at its ``number``-th "report", "optimizer" step or "batch" of the attempt, from 1."""
    if not _asked:
        _lookup_environment()
    if _hook is not None:
        _hook(TRAINING_STEP, f"{at}/{number}")


def install(hook: Hook | None) -> None:
    """Call ``hook`` at every boundary of this process from now on; None takes it away."""
    global _hook, _asked
    _hook, _asked = hook, True


def _lookup_environment() -> None:
    global _hook, _asked
    _asked = True
    if name := os.environ.get(VARIABLE):
        module, _, function = name.partition(":")
        _hook = getattr(import_module(module), function)


def _lookup_again() -> None:
    """Read the environment again in a forked process, which has its own environment and role."""
    global _hook, _asked
    _hook, _asked = None, False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lookup_again)
