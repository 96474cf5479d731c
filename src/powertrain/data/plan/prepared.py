"""A dataset made ready for a run: looked at once in the driver, then handed to every rank."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from powertrain.config import DataConfig
from powertrain.data.plan.order import LANES, Shuffle
from powertrain.data.plan.plan import Inspected, Plan
from powertrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from powertrain.data.dataset import Dataset

Given = Union["Dataset", Callable[[], "Dataset"]]
#: Seeds go through JSON and msgpack, where 64 bits are not safe everywhere.
_SEED_BITS = 53


@dataclass(frozen=True)
class Prepared:
    """What every rank is told about a dataset; the same for all of them."""

    name: str
    inspected: Inspected
    seed: int
    #: Whether each rank gets its own part of every step, or all of it.
    split: bool
    #: Of :attr:`inspected`; found once, because that of many blocks takes a moment.
    fingerprint: str
    lanes: int = LANES
    #: The fingerprint in positions saved by older versions; "" where it is the same.
    earlier_fingerprint: str = ""

    def is_of(self, fingerprint: str) -> bool:
        """True when a position with this fingerprint, also one of an older version, is one in this data."""
        return fingerprint == self.fingerprint or (
            bool(self.earlier_fingerprint) and fingerprint == self.earlier_fingerprint
        )

    @property
    def rows(self) -> int:
        return self.inspected.rows

    @property
    def shuffle(self) -> Shuffle:
        return self.inspected.shuffle


def prepare(
    datasets: Mapping[str, Given], config: DataConfig, seed: int, directory: str
) -> dict[str, Prepared]:
    """Look at the datasets of a run: raises :class:`DataError` for what cannot be read, before any process starts.

    Rows that are in this process's memory are put into files below ``directory``, where every rank of this machine
    maps them. ``seed`` orders those datasets that were not given a seed of their own.
    """
    return {
        name: _prepared(name, _plan_of(name, given), config.is_split(name), seed, directory)
        for name, given in datasets.items()
    }


def prepare_alone(plan: Plan) -> Prepared:
    """A plan to be read by this process alone."""
    seed = plan.seed if plan.seed is not None else new_seed()
    inspected = plan.inspected()
    return Prepared("", inspected, seed, True, inspected.fingerprint)


def new_seed() -> int:
    """Draw a seed for one reading."""
    return secrets.randbits(_SEED_BITS)


def seed_of_data(inspected: Inspected) -> int:
    """Return the seed for rows that are picked or kept without a seed of the user's.

    It follows from the data alone. A script that is started again picks the same rows, so that a run can resume in
    them and rows held out for testing stay held out.
    """
    digest = hashlib.blake2b(
        inspected.fingerprint.encode(), digest_size=8, person=b"powertrain.seed"
    ).digest()
    return int.from_bytes(digest, "little") >> (64 - _SEED_BITS)


def _prepared(name: str, plan: Plan, split: bool, seed: int, directory: str) -> Prepared:
    try:
        inspected = plan.inspected()
    except DataError as error:
        raise type(error)(f"The dataset {name!r} cannot be read. {error}") from error
    if inspected.rows == 0:
        raise DataError(
            f"The dataset {name!r} has no rows, so there is nothing to train on. Check its paths and filters."
        )
    own = plan.seed if plan.seed is not None else seed
    place = os.path.join(directory, name.replace("/", "_"))
    parts = tuple(
        dataclasses.replace(part, source=part.source.publish(os.path.join(place, str(number))))
        for number, part in enumerate(plan.parts)
    )
    published = dataclasses.replace(inspected, plan=dataclasses.replace(plan, parts=parts))
    fingerprint, earlier = inspected.fingerprint, ""
    if inspected.earlier_fingerprints != inspected.fingerprints:
        earlier = inspected.earlier_fingerprint
    return Prepared(name, published, own, split, fingerprint, earlier_fingerprint=earlier)


def _plan_of(name: str, given: Any) -> Plan:
    from powertrain.data.dataset import Dataset

    dataset = given
    if not isinstance(given, Dataset) and callable(given):
        dataset = given()
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"datasets[{name!r}] is a {type(dataset).__name__}. Give a powertrain.data.Dataset, such as "
            "powertrain.data.read_parquet(path) or from_pandas(frame), or a function that returns one."
        )
    return dataset.plan
