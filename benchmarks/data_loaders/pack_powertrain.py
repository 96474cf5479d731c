"""powertrain.data's pack(): python pack_powertrain.py REQUEST"""

from __future__ import annotations

import torch  # noqa: F401  (imports do not count as opening)
from packing import BATCH_SIZE, WINDOW, Request, measure

import powertrain.data
import powertrain.data.shard
import powertrain.data.sources.files.parquet
import powertrain.data.sources.packing.packed


def main() -> None:
    request = Request.from_command_line()

    def open_loader():
        windows = powertrain.data.read_parquet(request.directory).pack(WINDOW, padding=-1)
        loader = windows.random_shuffle(seed=0).iter_torch_batches(batch_size=BATCH_SIZE)
        return lambda number: (batch["tokens"] for batch in loader)

    measure(request, open_loader)


if __name__ == "__main__":
    main()
