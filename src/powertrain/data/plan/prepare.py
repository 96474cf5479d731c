"""Prepare datasets for a run: inspect the source, fix the order, plan the blocks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Union

from powertrain.config.data import DataConfig
from powertrain.data.plan.plan import Plan
from powertrain.data.plan.prepared import Prepared
from powertrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from powertrain.data.dataset import Dataset


Given = Union["Dataset", Callable[[], "Dataset"]]


def prepare(
    datasets: Mapping[str, Given], config: DataConfig, seed: int, directory: str
) -> dict[str, Prepared]:
    """Inspect the datasets of a run: raises :class:`DataError` for unreadable data before any process starts.

    Rows in this process's memory are written to files below ``directory``, where every rank of this machine maps them.
    ``seed`` orders the datasets without a seed of their own.
    """
    return {
        name: _prepared(name, _plan_of(name, given), config.is_split(name), seed, directory)
        for name, given in datasets.items()
    }


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
