"""Options of ``prepare_data_loader``, checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from powertrain.config.checks import Refusal, whole
from powertrain.errors import ConfigError
from powertrain.values.arguments import shorten

Tail = Literal["partial", "drop", "carry"]
#: Seeds are stored as JSON and msgpack, where 64 bits are not safe everywhere.
LARGEST_SEED = 2**53 - 1
#: The ``shuffle`` in the state of a loader whose sampler decides the order.
OWN = "own"


@dataclass(frozen=True)
class Wishes:
    """The options beyond the loader's own; ``None`` where not given."""

    global_batch_size: int | None = None
    tail: Tail | None = None
    seed: int | None = None


def checked_wishes(global_batch_size: Any, tail: Any, seed: Any) -> Wishes:
    if tail is not None and (not isinstance(tail, str) or tail not in ("partial", "drop", "carry")):
        raise ConfigError(
            f"prepare_data_loader(tail={shorten(tail)}) is not valid: it decides about the rows "
            'that do not fill a step. Use "partial", "drop" or "carry".'
        )
    return Wishes(
        _whole("global_batch_size", global_batch_size, whole(1)),
        cast("Tail | None", tail),
        _whole("seed", seed, whole(0, LARGEST_SEED)),
    )


def _whole(option: str, value: Any, check: Callable[[Any], Any]) -> int | None:
    try:
        return None if value is None else int(check(value))
    except Refusal as refusal:
        raise ConfigError(
            f"prepare_data_loader({option}={shorten(value)}) cannot be used: {refusal.why}. {refusal.fix}"
        ) from None
