"""``prepare_data_loader``."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import DataLoader, IterableDataset

from powertrain.errors import ConfigError
from powertrain.torch.data_loader.loader import PreparedDataLoader, RankSeeded
from powertrain.torch.data_loader.names import end_processes_at_exit, free, free_name
from powertrain.torch.data_loader.options import checked_wishes
from powertrain.torch.data_loader.sharing import share_out
from powertrain.torch.data_loader.whole_epoch import CheckedCollate
from powertrain.torch.device import device_of_loader
from powertrain.values.arguments import as_flag, shorten

if TYPE_CHECKING:
    from powertrain.torch.data_loader.options import Tail


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
    *,
    global_batch_size: int | None = None,
    tail: Tail | None = None,
    name: str | None = None,
    seed: int | None = None,
    resume: Literal["batch", "epoch"] | None = None,
) -> DataLoader[Any]:
    """Return the loader with this worker's part of every step, on its device. Prepare it once, before the epochs.

    All options of the loader are kept. Every row comes once per epoch. A worker without a row in a small step gets one
    without weight. Models from ``prepare_model`` weigh each worker's gradient by its rows, so the step is the mean over
    all rows. Each iteration is a new epoch with a new order, which follows from the seed and the epoch, never from the
    number of workers. ``loader.sampler.set_epoch(n)`` is honoured and counting continues from ``n``. ``loader.epoch``
    and ``loader.epochs(n)`` give the loop its position.

    After a restart the first iteration resumes behind the last batch that was handed out before the checkpoint, with
    any number of workers; a finished or abandoned epoch is followed by the next. A peek at the first batch
    (``next(iter(loader))``) does not count as an epoch, unless another one follows it.

    All this holds for map-style datasets with the usual samplers (``shuffle=True`` or not). Otherwise:

    - A custom sampler or batch sampler is drawn from alike on every worker, and each takes its share; some rows come
      twice where they do not divide evenly. After a restart the epoch begins again from its start. The same holds for
      a DistributedSampler of the user, and with ``add_dist_sampler=False``, which gives every worker all rows.
    - An IterableDataset cannot be shared out: every worker reads all of it, and begins its epoch again after a restart.
    - With ``in_order=False`` batches come in any order, so an epoch begins again too.

    Args:
        data_loader: The loader. A step takes its ``batch_size`` rows for each worker.
        add_dist_sampler: False gives every worker all rows.
        move_to_device: Move batches to this worker's device.
        auto_transfer: On a GPU, copy the next batch on a stream of its own during the computation on the current one.
        global_batch_size: Rows of a step for all workers together, at any number of workers.
        tail: Handling of rows that do not fill the last step: a smaller step (``"partial"``), left out (``"drop"``;
            both by the loader's ``drop_last``), or the beginning of the next epoch (``"carry"``).
        name: The key of the position in checkpoints ("loader", "loader-2", ... in the order of preparation).
        seed: The seed of the order; None for that of the loader's generator, of ``enable_reproducibility``, or of
            torch where there is one worker.
        resume: ``"epoch"`` begins the epoch again after a restart, for a loop that skips batches by itself; None is
            the value of ``DataConfig(resume=...)``.

    Returns:
        The prepared loader.

    Raises:
        ConfigError: An option has a wrong value, or needs an order that the loader's sampler does not allow.
        OutsideWorkerError: Called outside a training worker.

    Example::

        loader = prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
        for epoch in loader.epochs(10):
            for batch in loader:
                ...
    """
    from powertrain.worker.session import current

    session = current("prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(
            f"prepare_data_loader was given a {type(data_loader).__name__}; it takes a torch DataLoader. "
            "Wrap a dataset as torch.utils.data.DataLoader(dataset, batch_size=...)."
        )
    if isinstance(data_loader, PreparedDataLoader):
        return data_loader
    add_dist_sampler = as_flag(add_dist_sampler, "prepare_data_loader(add_dist_sampler=...)")
    move_to_device = as_flag(move_to_device, "prepare_data_loader(move_to_device=...)")
    auto_transfer = as_flag(auto_transfer, "prepare_data_loader(auto_transfer=...)")
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"prepare_data_loader(name={shorten(name)}) is not a name. Give a string.")
    if resume not in (None, "batch", "epoch"):
        raise ConfigError(f"prepare_data_loader(resume={shorten(resume)}) must be 'batch', 'epoch' or None.")
    wishes = checked_wishes(global_batch_size, tail, seed)
    # A copy has every option, also those of a subclass; only the options that differ per rank are replaced in it.
    loader = copy.copy(data_loader)
    loader.__dict__["_iterator"] = None
    sharing = share_out(loader, add_dist_sampler, wishes, session)
    kept_as = free_name(session, name, sharing.course.fingerprint)
    at_epoch = (resume or session.place.data.resume) == "epoch"
    sharing.course.keep_with(session.data, kept_as, at_epoch)
    if isinstance(loader.dataset, IterableDataset):
        loader.__dict__["collate_fn"] = CheckedCollate(loader.collate_fn)
    if loader.num_workers > 0:
        loader.worker_init_fn = RankSeeded(session.place.rank, loader.worker_init_fn)
        end_processes_at_exit()
    prepared = PreparedDataLoader(
        loader, sharing, device_of_loader() if move_to_device else None, auto_transfer
    )
    # A loop that prepares its loader anew in each epoch continues with the next epoch, under the same name.
    weakref.finalize(prepared, free, session, kept_as).atexit = False
    return prepared
