"""Hugging Face datasets behind a torch loader: python with_hugging_face.py REQUEST

Settings: "loader" is "DataLoader" (torch) or "StatefulDataLoader" (torchdata); "num_workers"; "fetch" is "rows"
(``batch_size=``, the common form) or "batches" (a BatchSampler as the sampler: all rows of a batch are requested
together and nothing is collated). An iterable dataset with a shuffle buffer is not among them: on tokens and text, with
and without workers, it gave a fifth to a fourteenth of the rows a second of "rows".
"""

from __future__ import annotations

import os
import tempfile

# Before datasets is imported: it reads them once.
os.environ |= {
    "HF_HOME": os.path.join(tempfile.gettempdir(), "hf"),
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}

import datasets
import torch
from measuring import Epoch, Request, measure
from schemas import IMAGES
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

LOADERS = {"DataLoader": DataLoader, "StatefulDataLoader": StatefulDataLoader}


def open_loader(request: Request) -> Epoch:
    """Converts the files to datasets' Arrow cache, and loads from there."""
    datasets.disable_progress_bars()
    rows = datasets.load_dataset("parquet", data_files=request.files, split="train")
    if request.schema == IMAGES:
        rows = rows.cast_column("image", datasets.Image())
    rows = rows.with_format("torch")
    loader_class = LOADERS[request.settings["loader"]]
    workers = request.settings["num_workers"]
    shared = {"num_workers": workers, "persistent_workers": workers > 0}
    if request.settings["fetch"] == "batches":
        sampler = BatchSampler(RandomSampler(rows), request.batch_size, drop_last=False)
        loader = loader_class(rows, batch_size=None, sampler=sampler, **shared)
    else:
        loader = loader_class(rows, batch_size=request.batch_size, shuffle=True, **shared)
    return lambda number: loader


def main() -> None:
    torch.manual_seed(0)
    request = Request.from_command_line()
    measure(request, lambda: open_loader(request))


if __name__ == "__main__":
    main()
