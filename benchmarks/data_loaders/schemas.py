"""The four kinds of rows of the loader benchmarks, and their Parquet files.

Every row has an ``id``, by which lost and duplicated rows are counted, and (except images) a value derived from its id,
so that a loader that mixes up rows is detected.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

FLOATS, TOKENS, IMAGES, TEXT = "ten floats", "512 tokens", "JPEG images", "ragged text"
FLOAT_COLUMNS = tuple(f"x{number}" for number in range(10))
TOKENS_A_ROW = 512
VOCABULARY = 50_000
IMAGE_SIDE = 160
SHORTEST_TEXT, LONGEST_TEXT = 20, 400
FILES, ROW_GROUPS_A_FILE = 8, 4
#: Number of different tokens, as in a typical text.
_DIFFERENT_WORDS = 5000

Ids = npt.NDArray[np.int64]
Columns = dict[str, "pa.Array[Any]"]


def _float_columns(ids: Ids, random: np.random.Generator) -> Columns:
    columns = {name: pa.array(random.standard_normal(len(ids), np.float32)) for name in FLOAT_COLUMNS}
    # Integers below 2**24 are exact in float32.
    return {**columns, "x0": pa.array(ids.astype(np.float32))}


def _token_columns(ids: Ids, random: np.random.Generator) -> Columns:
    tokens = random.integers(0, VOCABULARY, (len(ids), TOKENS_A_ROW), np.int32)
    tokens[:, 0] = ids % VOCABULARY
    offsets: Any = pa.array(np.arange(len(ids) + 1, dtype=np.int32) * TOKENS_A_ROW)
    return {"tokens": pa.ListArray.from_arrays(offsets, pa.array(tokens.ravel()))}


def _image_columns(ids: Ids, random: np.random.Generator) -> Columns:
    from PIL import Image

    ramp = np.linspace(0, 200, IMAGE_SIDE)
    gradient = (ramp[:, None, None] + ramp[None, :, None]) / 2
    encoded = []
    for _ in ids:
        noise = random.integers(0, 56, (IMAGE_SIDE, IMAGE_SIDE, 3))
        file = io.BytesIO()
        Image.fromarray((gradient + noise).astype(np.uint8)).save(file, "JPEG", quality=85)
        encoded.append(file.getvalue())
    return {"image": pa.array(encoded, pa.binary())}


def _text_columns(ids: Ids, random: np.random.Generator) -> Columns:
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(
        ["".join(random.choice(letters, size)) for size in random.integers(2, 11, _DIFFERENT_WORDS)]
    )
    lengths = random.integers(SHORTEST_TEXT, LONGEST_TEXT + 1, len(ids))
    texts = [
        " ".join([str(number), *words[random.integers(0, _DIFFERENT_WORDS, length - 1)]])
        for number, length in zip(ids.tolist(), lengths.tolist(), strict=True)
    ]
    return {"text": pa.array(texts, pa.string())}


@dataclass(frozen=True)
class Schema:
    """One kind of rows: their number, and their columns besides the id."""

    name: str
    rows: int
    quick_rows: int
    columns: Callable[[Ids, np.random.Generator], Columns]


SCHEMAS = {
    schema.name: schema
    for schema in (
        Schema(FLOATS, 1_000_000, 100_000, _float_columns),
        Schema(TOKENS, 100_000, 20_000, _token_columns),
        Schema(IMAGES, 8_192, 3_072, _image_columns),
        Schema(TEXT, 100_000, 20_000, _text_columns),
    )
}


def write_parquet(schema: Schema, rows: int, directory: Path) -> int:
    """Write rows 0 to ``rows - 1`` into a new ``directory``; return the bytes that their columns have in memory."""
    directory.mkdir(parents=True)
    random = np.random.default_rng(rows)
    in_memory = 0
    for number in range(FILES):
        ids = np.arange(number * rows // FILES, (number + 1) * rows // FILES, dtype=np.int64)
        table = pa.table({"id": pa.array(ids), **schema.columns(ids, random)})
        in_memory += table.nbytes
        group = -(-len(ids) // ROW_GROUPS_A_FILE)
        pq.write_table(
            table, directory / f"part-{number:03}.parquet", row_group_size=group, compression="snappy"
        )
    return in_memory


def verify(schema: str, batch: Mapping[str, Any]) -> None:
    """Raise ValueError unless ``batch`` has the values of its ids, as tensors (text: a list of str)."""
    ids = batch["id"].numpy()
    wrong = {
        FLOATS: _wrong_floats,
        TOKENS: _wrong_tokens,
        IMAGES: _wrong_images,
        TEXT: _wrong_text,
    }[schema](batch, ids)
    if wrong:
        raise ValueError(
            f"A batch of {schema} is not what was written: {wrong}. The loader program is wrong or the loader is."
        )


def _wrong_floats(batch: Mapping[str, Any], ids: Ids) -> str:
    import torch

    types = {batch[name].dtype for name in FLOAT_COLUMNS}
    if types != {torch.float32}:
        return f"its columns are {types}"
    return "" if np.array_equal(batch["x0"].numpy(), ids.astype(np.float32)) else "x0 belongs to other rows"


def _wrong_tokens(batch: Mapping[str, Any], ids: Ids) -> str:
    tokens = batch["tokens"].numpy()
    if tokens.shape != (len(ids), TOKENS_A_ROW):
        return f"its tokens have the shape {tokens.shape}"
    return "" if np.array_equal(tokens[:, 0], ids % VOCABULARY) else "the tokens belong to other rows"


def _wrong_images(batch: Mapping[str, Any], ids: Ids) -> str:
    import torch

    images = batch["image"]
    # Hugging Face puts the colours first.
    shapes = ((IMAGE_SIDE, IMAGE_SIDE, 3), (3, IMAGE_SIDE, IMAGE_SIDE))
    if images.dtype is not torch.uint8 or tuple(images.shape[1:]) not in shapes or len(images) != len(ids):
        return f"its images are {images.dtype} of the shape {tuple(images.shape)}"
    return ""


def _wrong_text(batch: Mapping[str, Any], ids: Ids) -> str:
    texts = batch["text"]
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return f"its text is {type(texts).__name__}, not a list of str"
    begins = [text.split(" ", 1)[0] for text in texts]
    return "" if begins == [str(number) for number in ids.tolist()] else "the texts belong to other rows"
