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
#: Fields that are left out of a saved position where they say nothing.
_OPTIONAL = {"skip", "step"}


@dataclass(frozen=True)
class Position:
    """The position of the next iteration: ``position`` slots of ``epoch`` are consumed.

    A negative position means rows of the previous epoch that were carried into this one. Where batches are filled up
    with the rows that functions have made, ``skip`` of those made from ``position`` on are consumed as well.
    """

    epoch: int
    position: int
    seed: int
    lanes: int
    shuffle: Shuffle
    fingerprint: str
    rows: int
    v: int = VERSION
    #: Rows made from ``position`` on, read ``step`` slots at a time, that are consumed; 0 and 0 where there are none.
    skip: int = 0
    step: int = 0

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
    def at(cls, other: Position, epoch: int, position: int, skip: int = 0, step: int = 0) -> Position:
        """Return another position in the same data."""
        return replace(other, epoch=epoch, position=position, skip=skip, step=step)

    @property
    def is_beginning(self) -> bool:
        """True where nothing of the epoch is consumed and nothing is carried into it."""
        return self.position == 0 and self.skip == 0

    def with_seed(self, seed: int) -> Position:
        """Return the same position in another order. Refused in mid-epoch, where rows would be lost."""
        if not self.is_beginning:
            raise DataError(
                f"The current epoch was started with seed {self.seed} and cannot continue with seed {seed}: rows would "
                "be lost. Give the same seed again."
            )
        return replace(self, seed=seed)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: at most 400 bytes as JSON."""
        left_out = {"v"} if self.skip else {"v", *_OPTIONAL}
        return {"v": self.v, **{name: value for name, value in asdict(self).items() if name not in left_out}}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], name: str) -> Position:
        """Return a position made by :meth:`as_dict`. Raises :class:`DataError` for anything else."""
        try:
            state = dict(state) if isinstance(state, Mapping) else {}
        except ODD:
            state = {}
        fields = set(cls.__dataclass_fields__)
        if set(state) not in (fields, fields - _OPTIONAL):
            raise DataError(
                f"The position for the dataset {name!r} is not one that state_dict() has given: {shown(state)}. "
                "Hand over what state_dict() returned, unchanged."
            )
        if not isinstance(state["v"], int) or state["v"] != VERSION:
            raise DataError(
                f"The position for the dataset {name!r} has form {shown(state['v'])}, and this version of Powertrain "
                f"knows form {VERSION} only. Use the version that wrote it, or start the epoch again."
            )
        consumed = [state.get(name, 0) for name in sorted(_OPTIONAL)]
        numbers = [*(state[name] for name in ("epoch", "position", "seed", "lanes", "rows")), *consumed]
        plain = all(
            isinstance(number, int) and not isinstance(number, bool) and abs(number) < 2**64
            for number in numbers
        )
        is_within = plain and state["epoch"] >= 0 and state["lanes"] >= 1 and min(consumed) >= 0
        if not is_within or any(consumed) != all(consumed) or not _is_shuffle(state["shuffle"]):
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
