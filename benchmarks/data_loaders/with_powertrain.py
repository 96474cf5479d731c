"""powertrain.data's iter_torch_batches: python with_powertrain.py REQUEST"""

from __future__ import annotations

import torch  # noqa: F401  (imports do not count as opening)
from measuring import Epoch, Request, measure
from schemas import IMAGES

import powertrain.data
import powertrain.data.operations
import powertrain.data.shard
import powertrain.data.sources.files.parquet


def open_loader(request: Request) -> Epoch:
    rows = powertrain.data.read_parquet(request.directory).random_shuffle(seed=0)
    if request.schema == IMAGES:
        rows = rows.decode_images("image")
    loader = rows.iter_torch_batches(batch_size=request.batch_size)
    return lambda number: loader


def main() -> None:
    request = Request.from_command_line()
    measure(request, lambda: open_loader(request))


if __name__ == "__main__":
    main()
