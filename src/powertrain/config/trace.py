"""``TraceConfig``: what is recorded about the steps of a run."""

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


#: Seconds between two looks at the machine, at least.
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


@dataclass(frozen=True, repr=False)
class TraceConfig(Config):
    """What is recorded of where the time goes, and what is made of it."""

    mode: str = option("summary", one_of("summary", "cli"))
    """``"summary"`` says at the end of the run what was found; ``"cli"`` also while it goes on, in the terminal."""

    profile: str = option("run", one_of("run", "watch"))
    """What is recorded: ``"run"``, every step of every rank and looks at its machine; ``"watch"``, only the looks."""

    init_mode: str = option("auto", one_of("auto", "manual", "selective"))
    """What is traced without a word in the loop: everything, nothing, or what the ``patch_...`` options name."""

    patch_dataloader: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: torch's DataLoader."""

    patch_forward: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: calls of models."""

    patch_backward: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: backward passes."""

    patch_h2d: bool | None = option(None, optional(flag))
    """With ``init_mode="selective"``: copies to a device."""

    sampler_interval_sec: float = option(1.0, _not_too_often)
    """How often each rank looks at processor, memory, disk, network and GPU."""

    logs_dir: str | os.PathLike[str] | None = option(None, optional(_directory_here))
    """A directory that gets a copy of the summary, besides the run's own."""

    session_id: str = option("", _one_name)
    """The name of that copy; the run's own name by default."""

    bind_host: str | None = option(None, optional(_address))
    """The address on which the run listens for its workers on other machines; None for this node's own. There is one
    wire, for reports and telemetry alike, and nobody without its keys is heard on it."""

    port: int = option(0, whole(at_least=0, at_most=65535))
    """The port of that wire, as ``RunConfig(port=...)``; 0 for any that is free."""

    flops_per_sample: float | None = option(None, optional(positive))
    """Floating-point operations that one sample takes, forward and backward: with it the summary says how much of what
    the device could do was used (MFU)."""

    peak_flops: float | None = option(None, optional(positive))
    """Floating-point operations a second that one worker's device can do at best; None for what its maker says, where
    the kind of GPU is known."""
