"""``DataConfig``: how datasets are split among the workers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from powertrain.config.checks import (
    MOST_BYTES,
    Config,
    Refusal,
    any_path,
    anything,
    flag,
    ignored,
    one_of,
    option,
    optional,
    whole,
)
from powertrain.errors import ConfigError
from powertrain.text.reprs import short_repr as _short

#: The default dataset of ``get_dataset_shard``.
TRAIN_DATASET_KEY = "train"


def _dataset_names(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str):
        if value == "all":
            return value
        raise Refusal("the only word is 'all'", f"Write [{_short(value)}] for one dataset, or 'all'.")
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) and name for name in value):
        raise Refusal("it is not a list of dataset names", "Use 'all', or a list such as ['train'].")
    if len(set(value)) != len(value):
        raise Refusal("a dataset is named twice", "Name each dataset once.")
    return tuple(value)


def _cache_directory(value: Any) -> str:
    path = any_path(value)
    if "://" in path:
        raise Refusal("decoded blocks are kept on the node's own disk", "Give a directory on it.")
    return os.path.abspath(os.path.expanduser(path))


_ConfigT = TypeVar("_ConfigT", bound="_DataConfigBase")


class _DataConfigBase(Config):
    """Base that refuses subclasses which divide datasets themselves.

    A class of its own: beside the ``__init__`` of a dataclass, ``__new__`` would hide its arguments from editors.
    """

    def __new__(cls: type[_ConfigT], *args: Any, **kwargs: Any) -> _ConfigT:
        """Raise :class:`ConfigError` for a subclass with a ``configure()`` of its own, which would never be called."""
        # Here and not among the checks, because a subclass's __init__ need not call this one.
        if hasattr(cls, "configure"):
            raise ConfigError(
                f"{cls.__name__}.configure() would not be called: datasets are divided among the ranks without it, "
                "each row once per epoch for any number of workers, so change the datasets before they are given to "
                "the trainer (datasets={'train': dataset.map_batches(...)}), name those to divide in "
                "DataConfig(datasets_to_split=[...]), and remove configure()."
            )
        return super().__new__(cls, *args, **kwargs)


@dataclass(frozen=True, repr=False)
class DataConfig(_DataConfigBase):
    """Distribution of datasets to ranks.

    Raises :class:`~powertrain.errors.ConfigError` for a wrong value.

    Example::

        TorchTrainer(train_func, datasets={"train": dataset}, dataset_config=DataConfig(["train"]))
    """

    datasets_to_split: Literal["all"] | Sequence[str] = option("all", _dataset_names)
    """Names of the datasets of which each rank gets its own part, or ``"all"``. Each rank gets the whole of any other
    dataset."""

    execution_options: Any = ignored(
        None, anything, "they belong to Ray Data's executor; set them in its DataContext"
    )
    """Ray Data's. Without effect: its executor reads them from its own ``DataContext``."""

    enable_shard_locality: bool = ignored(True, flag, "every node reads its own rows")
    """Ray Data's. Without effect: every node reads its own rows."""

    cache_bytes: int | None = option(None, optional(whole(0, MOST_BYTES)))
    """Bytes of disk on each node for decoded blocks, which its ranks share; 0 for none, None for a quarter of the free
    disk there."""

    cache_dir: str | os.PathLike[str] | None = option(None, optional(_cache_directory))
    """Directory of decoded blocks on each node during the run. None: in ``$TMPDIR``, else ``/var/tmp``."""

    memory_bytes: int = option(512 * 2**20, whole(2**20, MOST_BYTES))
    """Bytes of memory that each rank uses to prefetch and decode, beside the batches already handed out."""

    seed: int | None = option(None, optional(whole(0, 2**53 - 1)))
    """Orders every shuffled dataset without a seed of its own. None: drawn once and kept with the run, so that its
    restarts resume in the same order."""

    on_change: Literal["refuse", "restart_epoch"] = option("refuse", one_of("refuse", "restart_epoch"))
    """The action when a run resumes with a changed dataset: an error before anything starts, or a restart of the
    current epoch with the new data."""

    resume: Literal["batch", "epoch"] = option("batch", one_of("batch", "epoch"))
    """Where the data resume after a restart, for a loop that loads its checkpoint: behind the last batch before the
    checkpoint, or at the first batch of that epoch, for a loop that skips batches by itself."""

    snapshot: bool = option(False, flag)
    """True writes a ``ray.data.Dataset`` once, as Parquet, into the run's storage and reads it from there: every row
    exactly once per epoch, and exact resumption, on any engine. False streams it from Ray while training (engine "ray"
    only). Datasets of this package are read in place in any case."""

    def is_split(self, dataset: str) -> bool:
        """Return whether each rank gets its own part of this dataset.

        Args:
            dataset: The name of the dataset.

        Returns:
            False where each rank gets the whole of it.
        """
        return self.datasets_to_split == "all" or dataset in self.datasets_to_split
