"""Rows as samples of tar files: a member for each column, encoded by its ending."""

from __future__ import annotations

import io
import json
import secrets
import tarfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from powertrain.data.arguments import shown
from powertrain.data.output.writing import WriteTable
from powertrain.data.rows.formats import from_arrow, row_dicts
from powertrain.data.sources.formats.tar_samples import IMAGES
from powertrain.errors import DataError

Sample = dict[str, Any]


def webdataset_writer(encoders: Sequence[Callable[[Sample], Sample] | None]) -> WriteTable:
    """Return a writer of tar files; None among the encoders stands for the encoding by ending.

    Rows without "__key__" get one that no other row of this call has.
    """
    call = secrets.token_hex(4)
    numbers = iter(range(2**62))

    def write(table: pa.Table, path: str) -> None:
        seen: set[str] = set()
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
            for row in row_dicts(from_arrow(table, np.arange(table.num_rows))):
                sample = row
                for encode in encoders:
                    sample = encoded(sample) if encode is None else encode(sample)
                key = sample.get("__key__")
                key = f"{call}-{next(numbers):09d}" if key is None else _checked_key(key, seen)
                _add(archive, key, sample)

    return write


def _checked_key(key: Any, seen: set[str]) -> str:
    if not isinstance(key, str) or not key or "." in key.rpartition("/")[2] or key.endswith("/"):
        raise DataError(
            f"The value {shown(key)} of '__key__' cannot be the name of a sample. Give text without a dot, such as "
            "'train/000017', or leave '__key__' out."
        )
    if key in seen:
        raise DataError(
            f"Two rows have the '__key__' {key!r}, and would be read as one sample. Give each row its own."
        )
    seen.add(key)
    return key


def _add(archive: tarfile.TarFile, key: str, sample: Sample) -> None:
    there = {name: value for name, value in sample.items() if value is not None and not name.startswith("__")}
    if not there:
        raise DataError(
            f"A row has no value in any of its columns {', '.join(map(repr, sample))}, so that its sample {key!r} "
            "would have no member and be lost. Leave such rows out with filter()."
        )
    for name, value in there.items():
        if "/" in name or not name:
            raise DataError(
                f"The column {name!r} cannot be the ending of a member: it is empty, or has a slash. Rename it with "
                "rename_columns()."
            )
        content = value.encode() if isinstance(value, str) else value
        if not isinstance(content, (bytes, bytearray)):
            raise DataError(
                f"The column {name!r} holds a {type(value).__name__}, and its ending does not say how to write that. "
                "Name it after its form ('x.npy', 'x.json', 'x.cls', 'x.png'), or return bytes from encoder=..."
            )
        info = tarfile.TarInfo(f"{key}.{name}")
        info.size, info.mode = len(content), 0o644
        archive.addfile(info, io.BytesIO(content))


def encoded(sample: Sample) -> Sample:
    """Return a sample whose values are bytes, by the endings of their names; others stay."""
    return {
        name: value if value is None or name.startswith("__") else _encoded(name, value)
        for name, value in sample.items()
    }


def _encoded(name: str, value: Any) -> Any:
    kind = name.rpartition(".")[2].lower()
    try:
        if kind in ("cls", "cls2"):
            return str(int(value)).encode()
        if kind == "json":
            return json.dumps(value, default=_plain).encode()
        if kind == "npy":
            return _npy(value)
        if kind in IMAGES and not isinstance(value, bytes):
            return encoded_image(value, kind)
        if kind == "mp":
            import msgpack

            return msgpack.packb(value, default=_plain)
        if kind in ("pt", "pth"):
            return _saved_by_torch(value)
        if kind in ("pickle", "pkl"):
            import pickle

            return pickle.dumps(value)
    except (ValueError, TypeError, ImportError, OSError) as error:
        raise DataError(
            f"The column {name!r} has a value that cannot be written as {kind!r} ({type(error).__name__}: {error}). "
            "Give it another ending, or encoder=... of your own."
        ) from error
    return value


def _npy(value: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, np.asarray(value), allow_pickle=False)
    return out.getvalue()


def _saved_by_torch(value: Any) -> bytes:
    import torch

    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # a numpy array or scalar
        return value.tolist()
    raise TypeError(f"there is no form for a {type(value).__name__}")


def encoded_image(value: Any, form: str) -> bytes:
    """Return an array of pixels as the bytes of an image file. Raises what Pillow raises."""
    from PIL import Image

    image = value if isinstance(value, Image.Image) else Image.fromarray(np.asarray(value))
    out = io.BytesIO()
    image.save(out, format="jpeg" if form.lower() == "jpg" else form)
    return out.getvalue()
