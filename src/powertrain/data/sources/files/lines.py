"""Files of text: a row is a line."""

from __future__ import annotations

import pyarrow as pa

from powertrain.data.sources.files.files import FilePaths
from powertrain.data.sources.files.records import last_line_end
from powertrain.data.sources.files.text import BLOCK_BYTES, BYTE_ORDER_MARK, TextSource, check_encoding


class LinesSource(TextSource):
    """Lines of text in the column "text", without their line ends."""

    _kind = "text"
    _text_fits_all = True

    def __init__(
        self,
        paths: FilePaths,
        *,
        encoding: str = "utf-8",
        drop_empty_lines: bool = True,
        include_paths: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(paths, include_paths=include_paths, block_bytes=block_bytes)
        check_encoding(encoding)
        self._encoding, self._drops_empty = encoding, drop_empty_lines
        self._options_key = f"{encoding}/{drop_empty_lines}"

    def _start_of_data(self, number: int, head: bytes) -> int:
        return len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0

    def _last_end(self, data: bytes) -> int:
        return last_line_end(data)

    def _declared(self) -> pa.Schema:
        return pa.schema([("text", pa.string())])

    def _has(self, name: str) -> bool:
        return name == "text"

    def _parsed(self, data: bytes, number: int, schema: pa.Schema | None) -> pa.Table:
        lines = data.decode(self._encoding).split("\n")
        if lines and not lines[-1]:
            lines.pop()  # what follows the last line end is not a line
        lines = [line.removesuffix("\r") for line in lines]
        if self._drops_empty:
            lines = [line for line in lines if line.strip()]
        return pa.table({"text": pa.array(lines, pa.string())})

    def _advice(self, data: bytes) -> str:
        return "Name its encoding: read_text(paths, encoding='latin-1')."
