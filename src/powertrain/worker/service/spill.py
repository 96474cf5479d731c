"""Reports that wait on disk until the controller takes them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any

import msgspec

from powertrain.wire import frames
from powertrain.wire.envelope import FromWorker

#: Messages in one batch; bounds how long the interpreter is held while encoding.
BATCH = 256


class Spill:
    """A queue of messages on disk. True while it holds any."""

    _decode = msgspec.msgpack.Decoder(list[FromWorker]).decode

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._file: Any = None
        self._read_at = 0

    def __bool__(self) -> bool:
        return self._file is not None

    def put(self, messages: list[FromWorker]) -> None:
        """Append all of them, or none and raise ``OSError``."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 (closed by close)
            self._read_at = 0
        end = self._file.seek(0, os.SEEK_END)
        chunks = (
            frames.encode_messages(messages[start : start + BATCH])
            for start in range(0, len(messages), BATCH)
        )
        try:
            for chunk in chunks:
                self._write(len(chunk).to_bytes(8, "little") + chunk)
        except OSError:
            self._file.truncate(end)
            if end == self._read_at:
                self.close()
            raise

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self._file.write(data) :]

    def take(self) -> list[FromWorker]:
        """Return the oldest messages: one chunk as it was put."""
        self._file.seek(self._read_at)
        size = int.from_bytes(self._file.read(8), "little")
        messages: list[FromWorker] = self._decode(self._file.read(size)) if size else []
        self._read_at += 8 + size if size else 0
        self._file.seek(0, os.SEEK_END)
        if self._read_at >= self._file.tell():
            self.close()
        return messages

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None
