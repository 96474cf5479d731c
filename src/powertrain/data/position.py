"""Where a dataset stands, as a value of constant size that is the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from powertrain.data.order import Shuffle
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.prepared import Prepared

#: The form of a saved position.
VERSION = 1


@dataclass(frozen=True)
class Position:
    """What the next iteration would give: ``position`` slots of ``epoch`` are behind.

    Below 0 are rows of the epoch before that were carried into this one.
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
        """The start of an epoch."""
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
        """Another place of the same data."""
        return replace(other, epoch=epoch, position=position)

    def with_seed(self, seed: int) -> Position:
        """The same place of another order. In mid-epoch rows would be lost, so there it is refused."""
        if self.position != 0:
            raise DataError(
                f"The epoch under way was begun with seed {self.seed} and cannot go on with seed {seed}: rows would be "
                "lost. Give the same seed again."
            )
        return replace(self, seed=seed)

    def as_dict(self) -> dict[str, Any]:
        """Plain values: at most 400 bytes as JSON."""
        return {"v": self.v, **{name: value for name, value in asdict(self).items() if name != "v"}}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], name: str) -> Position:
        """A position that :meth:`as_dict` has given. Raises :class:`DataError` for anything else."""
        if not isinstance(state, Mapping) or set(state) != set(cls.__dataclass_fields__):
            raise DataError(
                f"The position for the dataset {name!r} is not one that state_dict() has given: {str(state)[:200]}. "
                "Hand over what state_dict() returned, unchanged."
            )
        if state["v"] != VERSION:
            raise DataError(
                f"The position for the dataset {name!r} has form {state['v']}, and this version of Powertrain knows "
                f"form {VERSION} only. Use the version that wrote it, or start the epoch again."
            )
        numbers = [state[name] for name in ("epoch", "position", "seed", "lanes", "rows")]
        plain = all(isinstance(number, int) and not isinstance(number, bool) for number in numbers)
        shuffle = state["shuffle"]
        if not plain or state["epoch"] < 0 or not isinstance(shuffle, (int, str)) or state["lanes"] < 1:
            raise DataError(
                f"The position for the dataset {name!r} has values that state_dict() does not give: "
                f"{str(state)[:200]}. Hand over what state_dict() returned, unchanged."
            )
        return cls(**dict(state))
