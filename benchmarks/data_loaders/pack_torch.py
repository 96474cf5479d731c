"""torch's DataLoader over an iterable dataset that packs: python pack_torch.py REQUEST

The row groups of all files come in another order in each epoch and are divided among the workers; each worker joins its
documents and cuts windows of them, as many training scripts do. The tokens behind a worker's last window are lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from packing import BATCH_SIZE, WINDOW, Request, measure
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class PackedDocuments(IterableDataset[torch.Tensor]):
    """Windows of the documents, in an order of row groups by epoch."""

    def __init__(self, directory: str) -> None:
        self.epoch = 0
        self._groups = [
            (str(path), group)
            for path in sorted(Path(directory).glob("*.parquet"))
            for group in range(pq.ParquetFile(path).num_row_groups)
        ]

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = np.random.default_rng(self.epoch).permutation(len(self._groups))
        worker = get_worker_info()
        mine = order if worker is None else order[worker.id :: worker.num_workers]
        held = np.empty(0, np.int32)
        for place in mine:
            path, group = self._groups[place]
            column = pq.ParquetFile(path).read_row_group(group, columns=["tokens"]).column(0).combine_chunks()
            held = np.concatenate([held, column.flatten().to_numpy()])
            whole = len(held) // WINDOW
            yield from torch.from_numpy(held[: whole * WINDOW].reshape(whole, WINDOW).copy())
            held = held[whole * WINDOW :]


def main() -> None:
    request = Request.from_command_line()

    def open_loader():
        documents = PackedDocuments(request.directory)
        loader = DataLoader(documents, batch_size=BATCH_SIZE, num_workers=request.num_workers)

        def epoch(number: int) -> DataLoader[torch.Tensor]:
            documents.epoch = number
            return loader

        return epoch

    measure(request, open_loader)


if __name__ == "__main__":
    main()
