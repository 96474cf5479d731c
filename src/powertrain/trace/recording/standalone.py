"""Tracing of a plain script: records are kept in its own memory until its end."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from powertrain.text.loggers import module_logger
from powertrain.trace import store
from powertrain.trace.device.watch import DeviceWatch
from powertrain.trace.machine import samples
from powertrain.trace.machine.devices import device_name
from powertrain.trace.machine.samplers import Sampler
from powertrain.trace.recording import current
from powertrain.trace.recording.phases import NAMES, RECORD_SIZE
from powertrain.trace.recording.recorder import Recorder
from powertrain.trace.stacks.whereabouts import PlaceCounts

#: Seconds between two samples of the machine, and between two samples of the loop's location.
_LOOK_EVERY = 1.0
_GLANCE_EVERY = 0.25
#: Maximum bytes of steps; beyond it older ones are thinned, as in a run.
_MOST = 16 << 20
#: Approximate number of parts.
_PARTS = 16
_logger = module_logger(__name__)


class RecordedProcess(NamedTuple):
    """The records of one process."""

    rank: int
    host: str
    #: Records of :mod:`powertrain.trace.recording.phases` and of :mod:`powertrain.trace.machine.samples`.
    steps: bytes
    samples: bytes
    #: The most frequent line of the loop, by phase.
    seen: dict[str, str]
    #: Facts about the process, as a rank sends them: its device, and those of ``DeviceWatch``.
    facts: dict[str, Any] = {}


class Alone:
    """Record the creating thread; another thread drains the ring."""

    def __init__(self, most: int = _MOST) -> None:
        self.recorder = Recorder()
        self._most = most
        self._lock = threading.Lock()
        self._taken = 0
        #: Steps in chronological order, and the number of times each part was thinned.
        self._parts: list[tuple[int, bytes]] = []
        self._samples: list[bytes] = []
        self._places: dict[str, str] = {}
        self._device = DeviceWatch(self.recorder)
        self._facts: dict[str, Any] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="powertrain-trace", daemon=True)
        self._thread.start()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def kept(self) -> RecordedProcess:
        """Return all records so far; on the recording thread also the newest marks."""
        self.recorder.process_marks()
        self._take()
        with self._lock:
            return RecordedProcess(
                own_rank(),
                socket.gethostname(),
                b"".join(part for _, part in self._parts),
                b"".join(self._samples),
                dict(self._places),
                {**self._facts, "device": device_name(self.recorder.gpu)},
            )

    def end(self) -> None:
        """Close the last step and stop recording. Idempotent."""
        self._device.close()
        self.recorder.flush()
        self._over.set()
        self._thread.join()
        self._take(final=True)

    # -- the watching thread

    def _watch(self) -> None:
        sampler, places, next_look = Sampler(lambda: self.recorder.gpu), PlaceCounts(), 0.0
        while not self._over.wait(_GLANCE_EVERY):
            try:
                places.look(NAMES[self.recorder.phase_now()], self.recorder.steps)
                self._places = places.news() or self._places
                self._device.look()
                if time.monotonic() >= next_look:
                    next_look = time.monotonic() + _LOOK_EVERY
                    self._samples.append(samples.pack(sampler.look(self.recorder.steps)))
                    self._take()
            except Exception:  # errors of samplers must not end training
                _logger.debug("Sampling this process failed.", exc_info=True)

    def _take(self, final: bool = False) -> None:
        """Keep the steps since the last call."""
        with self._lock:
            self._facts |= self._device.news()
            first, steps = self.recorder.drain(self._taken, final)
            self._taken = first + len(steps) // RECORD_SIZE
            if steps:
                self._keep(steps)
            while sum(len(part) for _, part in self._parts) > self._most and len(self._parts) > 1:
                self._thin()

    def _keep(self, steps: bytes) -> None:
        level, newest = self._parts[-1] if self._parts else (1, b"")
        if level == 0 and len(newest) < self._most // _PARTS:
            self._parts[-1] = 0, newest + steps
        else:
            self._parts.append((0, steps))

    def _thin(self) -> None:
        """Thin the oldest of the least thinned parts; the newest stays complete."""
        place = min(range(len(self._parts) - 1), key=lambda place: (self._parts[place][0], place))
        level, part = self._parts[place]
        whole = [store.PartFrame(0, 0, store.STEPS, part)]
        smaller = _steps_of(store.thinned(whole, store.GROUP * 4**level))
        self._parts[place : place + 1] = [(level + 1, smaller)] if len(smaller) < len(part) else []


def _steps_of(frames: Iterable[store.PartFrame]) -> bytes:
    return b"".join(frame.data for frame in frames if frame.kind == store.STEPS)


def own_rank() -> int:
    """Return the rank of the environment, as set by torchrun; 0 without one."""
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


_alone: Alone | None = None


def begin() -> None:
    """Start recording the calling thread."""
    global _alone
    _alone = Alone()
    current.use(_alone.recorder)


def end() -> None:
    """Stop recording and remove the patches. Records stay. May be called again."""
    from powertrain.trace.recording import patches

    if _alone is None or _alone.is_over:
        return
    if current.recording() is _alone.recorder:
        patches.uninstall()
        current.use(None)
    _alone.end()


def newest() -> Alone | None:
    """Return the current or last recording of this process, outside runs."""
    return _alone


def forget() -> None:
    """Stop recording and drop the records. Nothing is printed at exit."""
    global _alone
    end()
    _alone = None
