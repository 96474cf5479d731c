"""The output of worker processes: read from their pipes on one thread, into log files and to a listener."""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
from dataclasses import dataclass

from powertrain.engine.base import OutputSink, Slot
from powertrain.engine.forking import ServiceThread, working
from powertrain.storage.files.descriptors import open_log


class OutputReader:
    """Reads the output of every worker on one thread: into the log file, then to ``deliver``."""

    def __init__(self) -> None:
        self.deliver: OutputSink = lambda _slot, _data: None
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._sources: dict[str, _Source] = {}
        self._wake_read, self._wake_write = os.pipe()
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread: threading.Thread | None = None
        self._closing = False

    def add(self, slot: Slot, descriptor: int, log_path: str) -> None:
        os.set_blocking(descriptor, False)
        source = _Source(slot, descriptor, open_log(log_path))
        with self._lock:
            self._sources[slot.id] = source
            self._selector.register(descriptor, selectors.EVENT_READ, source)
            if self._thread is None:
                self._thread = ServiceThread(target=self._run, name="powertrain-output", daemon=True)
                self._thread.start()
        os.write(self._wake_write, b"x")

    def drain(self, slot: Slot) -> None:
        """Wait until all that a dead process wrote has been read (its pipe has ended by then)."""
        source = self._sources.get(slot.id)
        if source is not None:
            source.done.wait(timeout=5.0)

    def close(self) -> None:
        """Read all that is left and stop. Again is fine."""
        if self._closing:
            return
        thread = self._thread
        if thread is not None:
            for source in list(self._sources.values()):
                source.done.wait(timeout=5.0)
        self._closing = True
        if thread is not None:
            os.write(self._wake_write, b"x")
            thread.join()
        for source in list(self._sources.values()):
            self._finish(source)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _run(self) -> None:
        while not self._closing:
            ready = self._selector.select()
            with working():
                for key, _ in ready:
                    if key.data is None:
                        os.read(self._wake_read, 4096)
                    else:
                        self._read(key.data)

    def _read(self, source: _Source) -> None:
        try:
            data = os.read(source.descriptor, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._finish(source)
            return
        if source.log >= 0:
            append(source.log, data)
        self.deliver(source.slot, data)

    def _finish(self, source: _Source) -> None:
        with self._lock:
            if self._sources.pop(source.slot.id, None) is None:
                return
            self._selector.unregister(source.descriptor)
        os.close(source.descriptor)
        if source.log >= 0:
            os.close(source.log)
        source.done.set()


@dataclass(eq=False)
class _Source:
    slot: Slot
    descriptor: int
    log: int

    def __post_init__(self) -> None:
        self.done = threading.Event()


def append(descriptor: int, data: bytes) -> None:
    """Append to a log; a full disk costs the log, never the run."""
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(descriptor, data) :]
