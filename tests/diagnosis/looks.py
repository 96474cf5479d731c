"""Looks at a rank's machine as a sampler would have recorded them."""

from __future__ import annotations

from typing import Any

import numpy as np

from powertrain.diagnosis.tables.samples import SAMPLE, Samples

BEGAN = 1.7e9


def looks(
    rank: int = 0, count: int = 200, host: str = "host-a", every: float = 1.0, **fields: Any
) -> Samples:
    """``count`` looks, one a step unless ``step`` says otherwise; other fields are numbers, or one for each look."""
    table = np.zeros(count, SAMPLE)
    table["time"] = BEGAN + every * np.arange(count)
    table["step"] = np.arange(1, count + 1)
    for name, values in fields.items():
        table[name] = values
    return Samples(rank, host, table)


def by_rank(*tables: Samples) -> dict[int, Samples]:
    return {table.rank: table for table in tables}
