"""``TraceConfig``: the recording of a run's steps."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from typing import Any

from powertrain.config.checks import (
    Config,
    Refusal,
    any_path,
    flag,
    one_of,
    option,
    optional,
    positive,
    text,
    whole,
)


def _address(value: Any) -> str:
    try:
        return str(ipaddress.ip_address(text(value)))
    except ValueError:
        raise Refusal(
            "it is no IP address", "Give one of this machine's, or 0.0.0.0 for all of them."
        ) from None


#: Shortest interval between two samples of the machine, in seconds.
_LEAST_INTERVAL = 0.1


def _not_too_often(value: Any) -> float:
    found = positive(value)
    if found < _LEAST_INTERVAL:
        raise Refusal(
            f"a look takes about a millisecond, and more than {1 / _LEAST_INTERVAL:g} of them a second would disturb "
            "the training",
            f"Give at least {_LEAST_INTERVAL:g}.",
        )
    return found


def _directory_here(value: Any) -> str:
    path = any_path(value)
    if "://" in path:
        raise Refusal(
            "it is an address, and the copy goes to a directory of this machine", "Give a plain path."
        )
    return path


def _one_name(value: Any) -> str:
    if isinstance(value, str) and value == "":
        return ""
    name = text(value)
    if "/" in name or name in (".", ".."):
        raise Refusal("it names a directory below logs_dir, which has no '/' in it", "Give a plain name.")
    return name


def _ranks(value: Any) -> tuple[int, ...]:
    given = value if isinstance(value, (list, tuple, range, set, frozenset)) else [value]
    if not given:
        raise Refusal("it names no rank", "Give ranks as a list, such as [0].")
    return tuple(sorted({whole(at_least=0)(rank) for rank in given}))


@dataclass(frozen=True, repr=False)
class ProfileConfig(Config):
    """A profile of given steps by torch's profiler. 'powertrain profile' makes one of a live run at any time.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        RunConfig(profile=ProfileConfig(start_step=100, steps=5))
    """

    start_step: int = option(20, whole(at_least=1))
    """The number of steps of the attempt before the first profiled one."""

    steps: int = option(3, whole(at_least=1, at_most=1000))
    """The number of profiled steps."""

    ranks: tuple[int, ...] = option((0,), _ranks)
    """The profiled ranks. Those that an attempt does not have are left out."""

    memory: bool = option(False, flag)
    """Also record allocations; on a GPU, the history of its allocator too."""


@dataclass(frozen=True, repr=False)
class TraceConfig(Config):
    """Recording of where the time goes, and its analysis.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        RunConfig(trace=TraceConfig(mode="cli", sampler_interval_sec=5.0))
    """

    mode: str = option("summary", one_of("summary", "cli"))
    """``"summary"`` prints the findings at the end of the run; ``"cli"`` also during it, in the terminal."""

    profile: str = option("run", one_of("run", "watch"))
    """``"run"`` records every step of every rank and samples of its machine; ``"watch"`` only the samples."""

    init_mode: str = option("auto", one_of("auto", "manual", "selective"))
    """Automatic tracing without calls in the loop: of everything, of nothing, or of the ``patch_...`` options."""

    patch_dataloader: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: torch's DataLoader."""

    patch_forward: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: calls of models."""

    patch_backward: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: backward passes."""

    patch_h2d: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: copies to a device."""

    sampler_interval_sec: float = option(1.0, _not_too_often)
    """Seconds between two samples of processor, memory, disk, network and GPU on each rank."""

    logs_dir: str | os.PathLike[str] | None = option(None, optional(_directory_here))
    """A directory that gets a copy of the summary, besides the run's own."""

    session_id: str = option("", _one_name)
    """The name of that copy; the run's own name by default."""

    bind_host: str | None = option(None, optional(_address))
    """The address on which the run listens for its workers on other machines; None for this node's own. Reports and
    telemetry share one connection, which requires the run's keys."""

    port: int = option(0, whole(at_least=0, at_most=65535))
    """The port of that connection, as ``RunConfig(port=...)``; 0 for any free one."""

    flops_per_sample: float | None = option(None, optional(positive))
    """Floating-point operations of one sample, forward and backward: with it the summary contains the utilisation of
    the device (MFU)."""

    peak_flops: float | None = option(None, optional(positive))
    """Peak floating-point operations per second of one worker's device; None for the vendor's value, where the kind of
    GPU is known."""
