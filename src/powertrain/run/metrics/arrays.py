"""Arrow arrays of plain values and back, without ``pyarrow.array`` and ``Array.to_numpy``.

Those import pandas where it is installed, to recognize its types: in the middle of training, and for a third of a
second in which a rank on the same cores has to wait. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    from numpy.typing import NDArray


def array_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array[Any]:
    """Return an array of one plain type; None is null.

    Args:
        values: Integers, floats, booleans or text, as ``kind`` says.
        kind: int32, int64, float64, bool or string.

    Raises:
        OverflowError: An integer is too large for its type, or the text is longer than 2 GiB.
    """
    import pyarrow as pa

    nulls = values.count(None)
    validity = pa.py_buffer(_bits([value is not None for value in values])) if nulls else None
    if pa.types.is_string(kind):
        texts = [b"" if value is None else value.encode() for value in values]
        ends = array("i", [0])
        end = 0
        for text in texts:
            end += len(text)
            ends.append(end)
        buffers = [validity, pa.py_buffer(ends), pa.py_buffer(b"".join(texts))]
    elif pa.types.is_boolean(kind):
        buffers = [validity, pa.py_buffer(_bits(values))]
    else:
        code = {pa.int32(): "i", pa.int64(): "q", pa.float64(): "d"}[kind]
        plain = [0 if value is None else value for value in values] if nulls else values
        buffers = [validity, pa.py_buffer(array(code, plain))]
    return pa.Array.from_buffers(kind, len(values), buffers, nulls)


def array_of_numpy(values: NDArray[Any]) -> pa.Array[Any]:
    """Return an array of the integers or floats of a one-dimensional numpy array."""
    import numpy as np
    import pyarrow as pa

    kind = pa.from_numpy_dtype(values.dtype)
    data: Any = np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def numpy_of(column: pa.Array[Any]) -> NDArray[Any]:
    """Return the integers, floats or booleans of a column. Where one is null, there is any value."""
    import numpy as np
    import pyarrow as pa

    begin, end = column.offset, column.offset + len(column)
    data: Any = column.buffers()[1]
    is_bool = pa.types.is_boolean(column.type)
    if data is None:
        return np.zeros(len(column), bool if is_bool else column.type.to_pandas_dtype())
    if is_bool:
        return _unpacked(data, begin, end)
    found: NDArray[Any] = np.frombuffer(data, column.type.to_pandas_dtype(), count=end)
    return found[begin:]


def floats_of(column: pa.Array[Any]) -> NDArray[Any]:
    """Return the numbers of a column, which are floats with NaN where one is null."""
    import numpy as np

    found = numpy_of(column)
    return np.where(validity_of(column), found, np.nan) if column.null_count else found


def validity_of(column: pa.Array[Any]) -> NDArray[np.bool_]:
    """Return where a column is not null."""
    import numpy as np

    bits: Any = column.buffers()[0]
    if bits is None:
        return np.full(len(column), column.null_count == 0)
    return _unpacked(bits, column.offset, column.offset + len(column))


def _unpacked(bits: Any, begin: int, end: int) -> NDArray[np.bool_]:
    import numpy as np

    digits: NDArray[np.uint8] = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
    return digits[begin:end].astype(np.bool_)


def _bits(values: Sequence[Any]) -> bytes:
    """Return one bit for each value, the first one in the lowest bit of the first byte."""
    digits = "".join(["1" if value else "0" for value in reversed(values)])
    return int(digits or "0", 2).to_bytes((len(values) + 7) // 8, "little")
