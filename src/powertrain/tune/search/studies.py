"""Samplers and storages of Optuna: checked and copied for a reproducible search."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from powertrain.errors import ConfigError
from powertrain.text.errors import describe_error
from powertrain.tune.search.translation import import_optuna
from powertrain.values.arguments import shorten

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler
    from optuna.study import Study
    from optuna.trial import FrozenTrial

#: The attribute of a stored study that lists the trials a sweep began with, by the id of its first trial.
_BEGAN_WITH = "powertrain_began_with_"


def check_storage(storage: Any) -> Any:
    """Return a storage of Optuna or its address; raise :class:`ConfigError` for anything else."""
    if storage is None or isinstance(storage, (str, import_optuna().storages.BaseStorage)):
        return storage
    raise ConfigError(
        f"OptunaSearch(storage={shorten(storage)}) is not a storage of Optuna. Give an address such as "
        "'sqlite:///study.db', or an instance such as optuna.storages.RDBStorage('sqlite:///study.db')."
    )


def copy_sampler(sampler: Any) -> BaseSampler:
    """Return a copy of a sampler for the search, with random numbers that are the same after every pickling."""
    if not isinstance(sampler, import_optuna().samplers.BaseSampler):
        raise ConfigError(
            f"OptunaSearch(sampler={shorten(sampler)}) is not a sampler of Optuna. Give an instance, such as "
            "optuna.samplers.TPESampler(seed=0)."
        )
    try:
        copied: BaseSampler = copy.deepcopy(sampler)
    except Exception as error:
        raise ConfigError(
            f"OptunaSearch(sampler={shorten(sampler)}) cannot be copied: {describe_error(error)}. Give a sampler "
            "without open files or connections."
        ) from error
    _choose_seeds(copied)
    return copied


def _choose_seeds(sampler: BaseSampler) -> None:
    """Create the generators of a sampler, which samplers without a seed create on their first draw."""
    for value in vars(sampler).values():
        if type(value).__name__ == "LazyRandomState":
            _ = value.rng
        elif isinstance(value, import_optuna().samplers.BaseSampler):
            _choose_seeds(value)


def find_earlier(stored: Study, first_trial: str) -> list[FrozenTrial]:
    """Return the trials that had ended when a sweep began, also after a restart when there are more."""
    key = f"{_BEGAN_WITH}{first_trial}"
    trials = stored.get_trials()
    if key not in stored.user_attrs:
        stored.set_user_attr(key, [trial.number for trial in trials if trial.state.is_finished()])
    numbers = set(stored.user_attrs[key])
    return [trial for trial in trials if trial.number in numbers]


@contextmanager
def quiet_optuna() -> Iterator[None]:
    """Silence Optuna's logs below warnings, such as that a study was created."""
    levels = import_optuna().logging
    before = levels.get_verbosity()
    levels.set_verbosity(max(before, levels.WARNING))
    try:
        yield
    finally:
        levels.set_verbosity(before)
