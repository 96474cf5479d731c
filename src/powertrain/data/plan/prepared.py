"""A dataset prepared for a run: inspected once in the driver, then sent to every rank."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from powertrain.data.plan.order import LANES, Shuffle
from powertrain.data.plan.plan import Inspected, Plan

#: Seeds are stored as JSON and msgpack, where 64 bits are not safe everywhere.
_SEED_BITS = 53


@dataclass(frozen=True)
class Prepared:
    """The description of a dataset for the ranks; the same for all of them."""

    name: str
    inspected: Inspected
    seed: int
    #: True where each rank gets its own part of every step, else all of it.
    split: bool
    #: Of :attr:`inspected`; computed once, because that of many blocks takes a moment.
    fingerprint: str
    lanes: int = LANES
    #: The fingerprint in positions saved by older versions; "" where it is the same.
    earlier_fingerprint: str = ""

    def is_of(self, fingerprint: str) -> bool:
        """Return True when a position with this fingerprint, also one of an older version, is in this data."""
        return fingerprint == self.fingerprint or (
            bool(self.earlier_fingerprint) and fingerprint == self.earlier_fingerprint
        )

    @property
    def rows(self) -> int:
        return self.inspected.rows

    @property
    def shuffle(self) -> Shuffle:
        return self.inspected.shuffle


def prepare_alone(plan: Plan) -> Prepared:
    """Return a plan prepared to be read by this process alone."""
    seed = plan.seed if plan.seed is not None else new_seed()
    inspected = plan.inspected()
    return Prepared("", inspected, seed, True, inspected.fingerprint)


def new_seed() -> int:
    """Draw a seed for one reading."""
    return secrets.randbits(_SEED_BITS)


def seed_of_data(inspected: Inspected) -> int:
    """Return the seed for rows that are picked or kept without a user's seed.

    It follows from the data alone. A script that is started again picks the same rows, so that a run can resume in them
    and rows held out for testing stay held out.
    """
    digest = hashlib.blake2b(
        inspected.fingerprint.encode(), digest_size=8, person=b"powertrain.seed"
    ).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)
