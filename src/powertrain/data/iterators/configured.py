"""Datasets as a ``DataConfig`` of the user's divides them, in its own ``configure()``.

Ray Train lets a subclass return the iterators of each rank. What these divide, and among whom, is read from them: the
run then divides the same rows in its own way, so that they come once per epoch at any number of ranks, also after a
restart with another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.config.data import DataConfig
from powertrain.data.arguments import shown
from powertrain.data.dataset import Dataset
from powertrain.data.iterators.alone import DatasetIterator
from powertrain.errors import ConfigError

_ADVICE = (
    "Return a list with a dict for each rank, whose values are those of dataset.streaming_split(world_size), one for "
    "each rank in order, or dataset.iterator() for all rows on each rank"
)


def configured(
    config: DataConfig, datasets: Mapping[str, Any], world_size: int
) -> tuple[dict[str, Dataset], DataConfig]:
    """Return the datasets that ``configure()`` divides, and a config that says which are split.

    It is called for one dataset after the other, as Ray Train does. Raises :class:`ConfigError` where the iterators
    do not belong to one division among ``world_size`` ranks.
    """
    found: dict[str, Dataset] = {}
    split = []
    for name, given in datasets.items():
        one = given() if not isinstance(given, Dataset) and callable(given) else given
        if not isinstance(one, Dataset):
            raise ConfigError(
                f"{type(config).__name__}.configure() cannot divide datasets[{name!r}], a {type(one).__name__}: only "
                "datasets of powertrain.data. Use DataConfig(datasets_to_split=[...]) for others."
            )
        found[name], is_split = _divided(config, name, one, world_size)
        split += [name] if is_split else []
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(DataConfig)}
    return found, DataConfig(**{**fields, "datasets_to_split": split})


def _divided(config: DataConfig, name: str, dataset: Dataset, world_size: int) -> tuple[Dataset, bool]:
    what = f"{type(config).__name__}.configure(), for the dataset {name!r},"
    ranks: Any = config.configure(
        datasets={name: dataset},
        world_size=world_size,
        worker_handles=None,
        worker_node_ids=["node"] * world_size,
    )
    try:
        is_list = isinstance(ranks, (list, tuple)) and all(isinstance(rank, Mapping) for rank in ranks)
        if not is_list or len(ranks) != world_size or any(name not in rank for rank in ranks):
            raise ConfigError(f"{what} returned {shown(ranks)} for {world_size} ranks. {_ADVICE}.")
        return _one_dataset(what, [rank[name] for rank in ranks])
    finally:
        for iterator in _iterators(ranks):
            iterator.close()


def _iterators(ranks: Any) -> list[DatasetIterator]:
    if not isinstance(ranks, (list, tuple)):
        return []
    values = [one for rank in ranks if isinstance(rank, Mapping) for one in rank.values()]
    return list({id(one): one for one in values if isinstance(one, DatasetIterator)}.values())


def _one_dataset(what: str, iterators: Sequence[Any]) -> tuple[Dataset, bool]:
    """Return the dataset of the iterators of all ranks, and whether each has its own part."""
    for iterator in iterators:
        if not isinstance(iterator, DatasetIterator):
            raise ConfigError(f"{what} returned a {type(iterator).__name__}. {_ADVICE}.")
    places = [iterator.place for iterator in iterators]
    fingerprints = {iterator.fingerprint for iterator in iterators}
    is_split = places == [(number, len(iterators)) for number in range(len(iterators))]
    is_whole = all(place == (0, 1) for place in places)
    if len(fingerprints) > 1 or not (is_split or is_whole):
        raise ConfigError(
            f"{what} gives ranks rows that are not one division of one dataset: (number, of how many) is {places}, of "
            f"{len(fingerprints)} datasets. {_ADVICE}; make datasets of their own for other divisions."
        )
    return Dataset(iterators[0].plan), is_split
