"""The choice of patched torch functions."""

from __future__ import annotations

from dataclasses import dataclass

from powertrain.errors import ConfigError

MODES = ("auto", "manual", "selective")


@dataclass(frozen=True)
class Choice:
    """The patched functions."""

    dataloader: bool
    forward: bool
    backward: bool
    h2d: bool
    #: Optimizers, gradient scalers, explicit collectives and saving.
    rest: bool


def choose(
    mode: str = "auto",
    patch_dataloader: bool | None = None,
    patch_forward: bool | None = None,
    patch_backward: bool | None = None,
    patch_h2d: bool | None = None,
) -> Choice:
    """Return the choice of a mode. Raises :class:`~powertrain.errors.ConfigError` for contradictory arguments."""
    given = {
        "patch_dataloader": patch_dataloader,
        "patch_forward": patch_forward,
        "patch_backward": patch_backward,
        "patch_h2d": patch_h2d,
    }
    named = [f"{name}={value}" for name, value in given.items() if value is not None]
    mode = "selective" if mode == "custom" else mode
    if mode not in MODES:
        raise ConfigError(
            f"mode={mode!r} is not a tracing mode. Use 'auto' to patch everything, 'manual' to patch nothing, or "
            "'selective' to patch what patch_… names."
        )
    if mode != "selective" and named:
        raise ConfigError(
            f"{', '.join(named)} cannot be used with mode={mode!r}, which decides for all. Use mode='selective'."
        )
    if mode == "selective" and not any(given.values()):
        raise ConfigError(
            "mode='selective' was given no patch_… that is True, so nothing would be patched. Name at least one, or "
            "use mode='manual'."
        )
    is_auto = mode == "auto"
    return Choice(
        dataloader=is_auto or bool(patch_dataloader),
        forward=is_auto or bool(patch_forward),
        backward=is_auto or bool(patch_backward),
        h2d=is_auto or bool(patch_h2d),
        rest=is_auto,
    )
