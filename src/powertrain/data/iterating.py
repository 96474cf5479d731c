"""Batches and rows of an epoch reader, from the arguments of ``iter_torch_batches`` and its kin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from powertrain.data.batch_arguments import one_seed
from powertrain.data.batching import formatted, watched_copies
from powertrain.data.epochs import Batches, EpochReader

if TYPE_CHECKING:
    import torch


def iter_torch_batches(
    reader: EpochReader,
    *,
    prefetch_batches: int,
    batch_size: int | None,
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None,
    device: str | torch.device,
    collate_fn: Callable[[Any], Any] | None,
    drop_last: bool,
    local_shuffle_buffer_size: int | None,
    local_shuffle_seed: int | None,
    pin_memory: bool,
    tail: str | None,
    seed: int | None,
    global_batch_size: int | None = None,
    auto_device: str = "cpu",
) -> Batches[Any]:
    """Return batches of tensors: see :meth:`powertrain.data.DataShard.iter_torch_batches`.

    Args:
        reader: The epochs to read.
        auto_device: The device that ``device="auto"`` stands for.
        (others): Those of the method.
    """
    from powertrain.data.rows.torch_batches import TorchConversion

    chosen = auto_device if isinstance(device, str) and device == "auto" else device
    conversion = TorchConversion(dtypes, chosen, collate_fn, pin_memory, prefetch_batches)
    cut = reader.make_cut(
        batch_size,
        global_batch_size,
        tail,
        drop_last,
        prefetch_batches,
        local_shuffle_buffer_size,
        conversion.make,
    )
    cut = replace(cut, python_text=collate_fn is None)
    hand_out = watched_copies(reader.watch, conversion.hand_out, chosen)
    return Batches(reader, cut, one_seed(seed, local_shuffle_seed), hand_out)


def iter_batches(
    reader: EpochReader,
    *,
    prefetch_batches: int,
    batch_size: int | None,
    batch_format: str | None,
    drop_last: bool,
    local_shuffle_buffer_size: int | None,
    local_shuffle_seed: int | None,
    tail: str | None,
    seed: int | None,
    global_batch_size: int | None = None,
) -> Batches[Any]:
    """Return batches in a format: see :meth:`powertrain.data.DataShard.iter_batches`."""
    cut = reader.make_cut(
        batch_size,
        global_batch_size,
        tail,
        drop_last,
        prefetch_batches,
        local_shuffle_buffer_size,
        formatted(batch_format),
    )
    cut = replace(cut, python_text=batch_format in ("default", "numpy"))
    return Batches(reader, cut, one_seed(seed, local_shuffle_seed))


def iter_rows(reader: EpochReader, prefetch_batches: int) -> Iterator[dict[str, Any]]:
    """Yield one dict per row, for one epoch."""
    from powertrain.data.rows.formats import row_dicts

    # One row of each rank is a step, so that the position is that of the row handed out.
    cut = reader.make_cut(None, reader.ranks, None, False, prefetch_batches, None, row_dicts)
    for rows in Batches(reader, cut, None, by_row=True):
        if reader.weight:
            yield from rows
