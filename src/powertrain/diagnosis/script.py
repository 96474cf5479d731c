"""Tracing a plain script: record from ``init`` on, and print the verdict when the script ends."""

from __future__ import annotations

import atexit
import os

from powertrain.diagnosis.so_far import say
from powertrain.trace.recording import current, patch_choice, patches, standalone


def init(
    mode: str = "auto",
    patch_dataloader: bool | None = None,
    patch_forward: bool | None = None,
    patch_backward: bool | None = None,
    patch_h2d: bool | None = None,
) -> None:
    """Choose the calls that are traced without changes to the loop. A worker of Powertrain has done this already.

    In manual and selective mode, steps come from :func:`trace_step`, :func:`wrap_optimizer` or ``report``. In a plain
    script the call starts to record the calling thread; the findings are printed to stderr when the script ends, unless
    :func:`~powertrain.diagnosis.so_far.final_summary` was called. The last call counts.

    Args:
        mode: ``"auto"`` for everything, ``"manual"`` for nothing, ``"selective"`` for those that the arguments name.
        patch_dataloader: Whether to time batches of torch's DataLoader.
        patch_forward: Whether to time forward passes of modules.
        patch_backward: Whether to time backward passes.
        patch_h2d: Whether to time copies to the device.

    Raises:
        ConfigError: The arguments contradict each other.

    Example:
        >>> powertrain.trace.init(mode="selective", patch_forward=True)
    """
    choice = patch_choice.choose(mode, patch_dataloader, patch_forward, patch_backward, patch_h2d)
    if not current.is_kept():
        _begin()
    patches.install(current.current(), choice)


def _begin() -> None:
    if standalone.newest() is None:
        atexit.register(_print_findings_at_exit, os.getpid())
    standalone.begin()


def _print_findings_at_exit(pid: int) -> None:
    """Print the findings unless a summary was requested before. Forked children inherit the call and print nothing."""
    recorded = standalone.newest()
    if recorded is None or recorded.is_over or os.getpid() != pid:
        return
    standalone.end()
    if standalone.own_rank() == 0:
        say(recorded.kept())
