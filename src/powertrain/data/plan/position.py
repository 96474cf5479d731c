"""The position in a dataset, as a value of constant size that is the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import ODD, shown
from powertrain.data.plan.order import Shuffle
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.plan.prepared import Prepared

#: Version of the format of a saved position.
VERSION = 1


@dataclass(frozen=True)
class Position:
    """The position of the next iteration: ``position`` slots of ``epoch`` are consumed.

    A negative position means rows of the previous epoch that were carried into this one.
    """

    epoch: int
    position: int
    seed: int
    lanes: int
    shuffle: Shuffle
    fingerprint: str
    rows: int
    v: int = VERSION

    @classmethod
    def beginning(cls, prepared: Prepared, epoch: int = 0) -> Position:
        """Return the start of an epoch."""
        return cls(
            epoch=epoch,
            position=0,
            seed=prepared.seed,
            lanes=prepared.lanes,
            shuffle=prepared.shuffle,
            fingerprint=prepared.fingerprint,
            rows=prepared.rows,
        )

    @classmethod
    def at(cls, other: Position, epoch: int, position: int) -> Position:
        """Return another position in the same data."""
        return replace(other, epoch=epoch, position=position)

    def with_seed(self, seed: int) -> Position:
        """Return the same position in another order. Refused in mid-epoch, where rows would be lost."""
        if self.position != 0:
            raise DataError(
                f"The current epoch was started with seed {self.seed} and cannot continue with seed {seed}: rows would "
                "be lost. Give the same seed again."
            )
        return replace(self, seed=seed)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: at most 400 bytes as JSON."""
        return {"v": self.v, **{name: value for name, value in asdict(self).items() if name != "v"}}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], name: str) -> Position:
        """Return a position made by :meth:`as_dict`. Raises :class:`DataError` for anything else."""
        try:
            state = dict(state) if isinstance(state, Mapping) else {}
        except ODD:
            state = {}
        if set(state) != set(cls.__dataclass_fields__):
            raise DataError(
                f"The position for the dataset {name!r} is not one that state_dict() has given: {shown(state)}. "
                "Hand over what state_dict() returned, unchanged."
            )
        if not isinstance(state["v"], int) or state["v"] != VERSION:
            raise DataError(
                f"The position for the dataset {name!r} has form {shown(state['v'])}, and this version of Powertrain "
                f"knows form {VERSION} only. Use the version that wrote it, or start the epoch again."
            )
        numbers = [state[name] for name in ("epoch", "position", "seed", "lanes", "rows")]
        plain = all(
            isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**64
            for number in numbers
        )
        if not plain or state["epoch"] < 0 or state["lanes"] < 1 or not _is_shuffle(state["shuffle"]):
            raise DataError(
                f"The position for the dataset {name!r} has values that state_dict() does not give: "
                f"{shown(state)}. Hand over what state_dict() returned, unchanged."
            )
        return cls(**dict(state))


def _is_shuffle(value: Any) -> bool:
    """Return True for a valid shuffle, also that of loaders whose samplers have an order of their own."""
    if isinstance(value, str):
        return value in ("none", "rows", "blocks", "mix", "own")
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
