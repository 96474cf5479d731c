"""The trackers of a run: from names and objects, and from the run's directory."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import cloudpickle

from powertrain import plugins
from powertrain.config.checks import Refusal, did_you_mean
from powertrain.config.run import TRACKER_NAMES
from powertrain.errors import ConfigError, StorageError
from powertrain.storage import Storage, signed
from powertrain.storage.addresses import without_secrets
from powertrain.text.errors import describe_error
from powertrain.text.redaction import redact_values
from powertrain.trackers.base import TrackedRun, Tracker
from powertrain.trackers.csv import CSV
from powertrain.trackers.mlflow import MLflow
from powertrain.trackers.settings import tracker_name
from powertrain.trackers.tensorboard import TensorBoard
from powertrain.trackers.wandb import WandB
from powertrain.values.arguments import plain_scalar, shorten

_BUILT_IN: Mapping[str, type[Tracker]] = {
    "csv": CSV,
    "mlflow": MLflow,
    "tensorboard": TensorBoard,
    "wandb": WandB,
}
_KEY = "trackers/trackers.pickle"
#: Most bytes of the stored trackers that are read.
_BYTES_LIMIT = 64 << 20


def chosen(given: Iterable[Any], directory: str) -> list[Tracker]:
    """Return trackers for names and objects, ready for use in another process.

    Args:
        given: ``RunConfig(trackers=...)``, or names.
        directory: The run's directory on this machine; "" where it is kept in an object store.

    Raises:
        ConfigError: A name is not known or used twice, a package is missing, or a setting.
    """
    trackers = [_complete(one, directory) for one in given]
    twice = [name for name, count in Counter(tracker.name for tracker in trackers).items() if count > 1]
    if twice:
        raise ConfigError(
            f"RunConfig(trackers=...) has two trackers named {twice[0]!r}. Give one of them another name: name='...'."
        )
    return trackers


def _complete(given: Any, directory: str) -> Tracker:
    tracker = _by_name(given)() if isinstance(given, str) else given
    complete = tracker.settled(directory)
    try:
        tracker_name(complete.name)
    except Refusal as refusal:
        raise ConfigError(
            f"The tracker {type(complete).__name__} has the name {shorten(complete.name)}, which cannot be used: "
            f"{refusal.why}. {refusal.fix}"
        ) from None
    return complete


def _by_name(name: str) -> type[Tracker]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    added = plugins.names(plugins.TRACKERS)
    if name not in added:
        known = (*TRACKER_NAMES, *added)
        raise ConfigError(
            f"There is no tracker {name!r}. {did_you_mean(name, known)}Known are {', '.join(known)}; others are "
            f"objects, or entry points of the group {plugins.TRACKERS!r}, see docs/trackers.md."
        )
    found = plugins.load(plugins.TRACKERS, name)
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise ConfigError(
            f"The entry point {name!r} of the group {plugins.TRACKERS!r} must name a subclass of "
            f"powertrain.trackers.Tracker, and it names {shorten(found)}. Correct the package that registers it."
        )
    return found


def keep(storage: Storage, trackers: Sequence[Tracker], run: TrackedRun) -> str:
    """Keep a run's trackers, and the facts of the run that they get, in its directory, signed.

    Returns "" or why they could not be kept.
    """
    try:
        value = signed.sign(storage, _KEY, cloudpickle.dumps((list(trackers), run)))
        signed.put(storage, value)
    except Exception as error:  # whatever the user's objects do when they are pickled
        return describe_error(error)
    return ""


def kept(storage: Storage) -> tuple[list[Tracker], TrackedRun]:
    """Return the trackers that a run was started with, and the facts of the run that they get.

    Raises:
        StorageError: It has none, or they were not written by this user on this machine.
    """
    where = without_secrets(storage.uri)
    instead = "Name them with --tracker, and give addresses in the environment, such as MLFLOW_TRACKING_URI."
    try:
        data = signed.get(storage, _KEY, limit=_BYTES_LIMIT)
    except FileNotFoundError:
        raise StorageError(f"The run at {where!r} was started without trackers. {instead}") from None
    except signed.NotOurs:
        raise StorageError(
            f"The trackers of the run at {where!r} were not written by you on this machine, and using them could run "
            f"any code and send your credentials anywhere. {instead}"
        ) from None
    try:
        loaded: tuple[list[Tracker], TrackedRun] = pickle.loads(data)
    except (ImportError, AttributeError) as error:
        raise StorageError(
            f"A tracker of the run at {where!r} is of a class that cannot be imported here: {error}. Set PYTHONPATH to "
            "the directory of its module."
        ) from error
    return loaded


def params_of(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """``train_loop_config`` as parameters: nested values as "a/b", each plain, secrets replaced."""
    flat = _flat(config or {})
    redacted = redact_values(flat)
    assert isinstance(redacted, dict)
    return redacted


def _flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        plain = plain_scalar(value)
        if isinstance(plain, Mapping) and plain:
            flat.update(_flat(plain, f"{prefix}{key}/"))
        else:
            is_plain = plain is None or isinstance(plain, (str, bool, int, float))
            flat[f"{prefix}{key}"] = plain if is_plain else shorten(plain)
    return flat
