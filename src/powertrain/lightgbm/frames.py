"""DataFrames in the types that LightGBM takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


def normalize_pandas_for_lightgbm(df: pd.DataFrame) -> pd.DataFrame:
    """Return the frame with Arrow's types of numbers and booleans replaced by pandas's own, which LightGBM takes.

    Columns of other types stay as they are. ``to_pandas()`` of a dataset has none of Arrow's types; frames that are
    made otherwise may have.

    Args:
        df: The frame.

    Returns:
        The frame, or a copy of it where a column was replaced.

    Example:
        >>> train_set = lightgbm.Dataset(normalize_pandas_for_lightgbm(frame))
    """
    import pandas as pd

    kinds = {"i": "Int", "u": "UInt", "f": "Float"}
    types = {}
    for column, dtype in df.dtypes.items():
        if not isinstance(dtype, pd.ArrowDtype):
            continue
        if dtype.kind == "b":
            types[column] = "boolean"
        elif dtype.kind in kinds:
            types[column] = f"{kinds[dtype.kind]}{dtype.pyarrow_dtype.bit_width}"
    return df.astype(types) if types else df
