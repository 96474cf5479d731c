"""Ray Data's iter_torch_batches: python with_ray_data.py REQUEST

Settings: "shuffle" is "random_shuffle" (every row may come to every position) or "local_shuffle_buffer_size" (files in
random order and a buffer of ten batches, the cheaper way of Ray's guide to shuffling); "materialize" keeps the blocks
in the object store, as its guide to training recommends for data that fits there; "decoded" says that images are kept
there as pixels, not as they are in the files.
"""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import ray
import torch
from measuring import Batch, Epoch, Request, measure
from PIL import Image
from ray.data.collate_fn import ArrowBatchCollateFn
from schemas import IMAGES, TEXT

BUFFERED_BATCHES = 10


class TextCollate(ArrowBatchCollateFn):
    """Strings have no tensor: a list of str, and the ids as a tensor."""

    def __call__(self, batch: pa.Table) -> Any:
        return {"id": torch.as_tensor(batch["id"].to_numpy()), "text": batch["text"].to_pylist()}


def decode(batch: Any) -> dict[str, Any]:
    images = [np.asarray(Image.open(io.BytesIO(encoded))) for encoded in batch["image"]]
    return {"id": batch["id"], "image": np.stack(images)}


def open_loader(request: Request) -> Epoch:
    """Return a dataset that is executed again in each epoch, so that each has another order."""
    in_buffer = request.settings["shuffle"] == "local_shuffle_buffer_size"
    read = ray.data.read_parquet(request.directory, shuffle="files" if in_buffer else None)
    decoded = request.schema == IMAGES and request.settings.get("decoded", False)
    if decoded:
        read = read.map_batches(decode, batch_size=64)
    if request.settings["materialize"]:
        read = read.materialize()

    def epoch(number: int) -> Iterable[Batch]:
        if in_buffer:
            dataset = read.randomize_block_order() if request.settings["materialize"] else read
        else:
            dataset = read.random_shuffle(seed=number)
        if request.schema == IMAGES and not decoded:
            dataset = dataset.map_batches(decode, batch_size=64)
        return dataset.iter_torch_batches(
            batch_size=request.batch_size,
            collate_fn=TextCollate() if request.schema == TEXT else None,
            prefetch_batches=2,
            local_shuffle_buffer_size=BUFFERED_BATCHES * request.batch_size if in_buffer else None,
            local_shuffle_seed=number if in_buffer else None,
        )

    return epoch


def main() -> None:
    request = Request.from_command_line()
    # Starting Ray is not counted: a training job has it running.
    ray.init(
        num_cpus=2, include_dashboard=False, logging_level=logging.WARNING, _temp_dir=tempfile.gettempdir()
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    measure(request, lambda: open_loader(request))
    ray.shutdown()


if __name__ == "__main__":
    main()
