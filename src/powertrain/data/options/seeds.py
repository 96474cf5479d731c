"""Ray Data's configs of seeds, and seeds made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from powertrain.data.arguments import seed_number


@dataclass(frozen=True)
class RandomSeedConfig:
    """A seed as Ray Data's ``random_shuffle`` and others take it.

    Every epoch has its own order here in any case, so ``reseed_after_execution`` has no effect.
    """

    seed: int | None = None
    """The seed; None for none."""
    reseed_after_execution: bool = True
    """Without effect."""
    use_timestamp_as_default: bool = False
    """Without effect."""

    def __post_init__(self) -> None:
        seed_number("RandomSeedConfig(seed)", self.seed)


@dataclass(frozen=True)
class FileShuffleConfig:
    """The shuffle of files as Ray Data's readers take it in ``shuffle=``: rows come shuffled, by this seed."""

    seed: int | None = None
    """The seed; None lets the run draw one."""
    reseed_after_execution: bool = True
    """Without effect: every epoch has its own order."""

    def __post_init__(self) -> None:
        seed_number("FileShuffleConfig(seed)", self.seed)


def seed_of(name: str, given: Any) -> int | None:
    """Return a seed from a number or a config of Ray's; None without one."""
    return seed_number(
        name, given.seed if isinstance(given, (RandomSeedConfig, FileShuffleConfig)) else given
    )
