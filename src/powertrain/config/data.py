"""``DataConfig``: how datasets are split among the workers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
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
from powertrain.config.execution import ExecutionOptions
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
    """Base that lets subclasses have a constructor of their own, as those of Ray Train's users do.

    A class of its own: beside the ``__init__`` of a dataclass, ``__new__`` would hide its arguments from editors.
    """

    def __new__(cls: type[_ConfigT], *args: Any, **kwargs: Any) -> _ConfigT:
        """Check the arguments, unless a subclass has its own."""
        if cls.__init__ is not DataConfig.__init__:
            return object.__new__(cls)
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

    def configure(
        self,
        datasets: Mapping[str, Any],
        world_size: int,
        worker_handles: Any = None,
        worker_node_ids: Any = None,
        **kwargs: Any,
    ) -> list[dict[str, Any]]:
        """Return the iterators of each rank, for subclasses that divide datasets in another way.

        A run calls it once for each dataset, with the largest number of ranks, and reads from the result
        which rows are divided: each of them comes once per epoch at any number of ranks, also those that
        ``streaming_split`` would leave out.

        Args:
            datasets: The dataset to divide, by its name.
            world_size: The number of ranks.
            worker_handles: None here.
            worker_node_ids: A name for each rank's node, for ``locality_hints``; without effect.
            **kwargs: Further arguments of later versions.

        Returns:
            A dict of iterators by name for each rank: those of ``streaming_split(world_size)``, or ``iterator()`` for
            all rows on each.
        """
        found: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in datasets.items():
            if self.is_split(name):
                iterators = dataset.streaming_split(world_size, equal=True, locality_hints=worker_node_ids)
            else:
                iterators = [dataset.iterator() for _ in range(world_size)]
            for rank, iterator in zip(found, iterators, strict=True):
                rank[name] = iterator
        return found

    @property
    def has_own_configure(self) -> bool:
        """True for a subclass that divides datasets itself."""
        return type(self).configure is not DataConfig.configure

    @staticmethod
    def default_ingest_options() -> ExecutionOptions:
        """Return options of an execution with Ray Data's defaults, to change and to pass as ``execution_options``."""
        return ExecutionOptions()

    def is_split(self, dataset: str) -> bool:
        """Return whether each rank gets its own part of this dataset.

        Args:
            dataset: The name of the dataset.

        Returns:
            False where each rank gets the whole of it.
        """
        return self.datasets_to_split == "all" or dataset in self.datasets_to_split
