"""The operation that decodes images."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from powertrain.data.operations.calls import FunctionFailed, Setting
from powertrain.data.operations.columns import check_columns, without
from powertrain.data.operations.operation import Applied, Apply, Operation, RowPiece
from powertrain.data.operations.returned import quoted
from powertrain.data.sources.base import IMAGES

if TYPE_CHECKING:
    import pyarrow as pa

    from powertrain.data.loading.pixels import KeptColumn, KeptImages


@dataclass(frozen=True)
class DecodeImages(Operation):
    """Decodes columns of images to arrays of pixels: (height, width, channels), or (height, width)."""

    columns: tuple[str, ...]
    #: (height, width) to scale every image to.
    size: tuple[int, int] | None = None
    #: A mode of Pillow: "RGB", "L", …
    mode: str | None = None
    #: Cached pixels of this node by column. Set in reading processes only, never pickled.
    kept: Mapping[str, KeptImages] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        from powertrain.data.operations.images import checked_mode, checked_size

        checked_mode(self.mode)
        checked_size(self.size)

    @property
    def name(self) -> str:
        return f"decoding images of {quoted(self.columns)}"

    def stored(self, columns: Mapping[str, str]) -> Mapping[str, str]:
        return without(columns, self.columns)

    def begin(self) -> Apply:
        from powertrain.data.operations.images import require_pillow

        require_pillow()
        return self._applied

    def _applied(self, piece: RowPiece, setting: Setting) -> Applied:
        from powertrain.data.operations.images import BadImage, decode_column

        columns, numbers = dict(piece.rows.columns), piece.rows.numbers
        check_columns(self.name, self.columns, columns)
        for name in self.columns:
            kept = self.kept[name].of_rows(numbers) if name in self.kept else None
            try:
                columns[name] = decode_column(columns[name], self.size, self.mode, setting.over, kept)
            except BadImage as error:
                raise FunctionFailed(
                    f"the image in column {name!r} cannot be decoded: {error.problem}",
                    int(numbers[error.index]),
                    1,
                    error=error.__cause__,
                ) from error
        return Applied(piece.rows.with_columns(columns))


def decoding_of(schema: pa.Schema) -> list[DecodeImages]:
    """Return the operations that decode the columns marked as images: see ``sources.base.IMAGES``."""
    wishes: dict[tuple[tuple[int, int] | None, str | None], list[str]] = {}
    for field_ in schema:
        mark = (field_.metadata or {}).get(IMAGES)
        if mark is not None:
            wish = json.loads(mark)
            size = tuple(wish["size"]) if wish.get("size") else None
            wishes.setdefault((size, wish.get("mode")), []).append(field_.name)
    return [DecodeImages(tuple(columns), size, mode) for (size, mode), columns in wishes.items()]


def keeping_pixels(
    operations: Iterable[Operation], columns: Iterable[str], keep: Callable[[KeptColumn], KeptImages]
) -> list[Operation]:
    """Return the same operations, with a cache from ``keep`` for images that are decoded as they are stored.
    ``columns`` are those of the source."""
    from powertrain.data.loading.pixels import KeptColumn

    stored: Mapping[str, str] = {name: name for name in columns}
    done: list[Operation] = []
    for operation in operations:
        if isinstance(operation, DecodeImages):
            kept = {
                name: keep(KeptColumn(stored[name], operation.size, operation.mode))
                for name in operation.columns
                if name in stored
            }
            done.append(replace(operation, kept=kept))
        else:
            done.append(operation)
        stored = operation.stored(stored)
    return done
