"""torch's DataLoader over a table in memory, one row per __getitem__: python over_memory.py REQUEST

Settings: "num_workers"; "decoded" says that images are held as pixels, decoded on two threads before the first epoch.
"""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from measuring import Epoch, Request, measure
from PIL import Image
from schemas import IMAGES
from torch.utils.data import DataLoader, Dataset


class RowsInMemory(Dataset[dict[str, Any]]):
    """Rows in memory, each a dict of the columns' values.

    Columns have the types that default_collate handles fastest and preserves: numbers as numpy arrays, token lists as
    rows of one tensor, the rest as lists.
    """

    def __init__(self, request: Request) -> None:
        table = pq.read_table(request.directory)
        self._columns: dict[str, Any] = {}
        for name in table.column_names:
            column: Any = table[name].combine_chunks()
            if name in ("image", "text"):
                self._columns[name] = column.to_pylist()
            elif name == "tokens":
                tokens = column.flatten().to_numpy().reshape(len(table), -1)
                self._columns[name] = torch.from_numpy(tokens.copy())
            else:
                self._columns[name] = column.to_numpy()

    def __len__(self) -> int:
        return len(self._columns["id"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: column[index] for name, column in self._columns.items()}


class ImagesInMemory(RowsInMemory):
    """Images in memory, decoded on access."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = super().__getitem__(index)
        decoded = np.array(Image.open(io.BytesIO(row["image"])))
        return {**row, "image": torch.from_numpy(decoded)}


class PixelsInMemory(RowsInMemory):
    """Images in memory, already decoded."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        with ThreadPoolExecutor(2) as threads:
            decoded = list(
                threads.map(lambda data: np.array(Image.open(io.BytesIO(data))), self._columns["image"])
            )
        self._columns["image"] = torch.from_numpy(np.stack(decoded))


def open_loader(request: Request) -> Epoch:
    kind = RowsInMemory
    if request.schema == IMAGES:
        kind = PixelsInMemory if request.settings["decoded"] else ImagesInMemory
    rows = kind(request)
    workers = request.settings["num_workers"]
    loader = DataLoader(
        rows,
        batch_size=request.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    return lambda number: loader


def main() -> None:
    torch.manual_seed(0)
    request = Request.from_command_line()
    measure(request, lambda: open_loader(request))


if __name__ == "__main__":
    main()
