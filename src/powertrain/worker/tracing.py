"""Tracing of one rank: the recorder, its sources, and the telemetry that the service thread sends.

Telemetry never ends a run, nor slows it: a failure here is warned of once, and the rank trains on untraced.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.trace.compilations import Compilations, graph_breaks
from powertrain.trace.device.watch import DeviceWatch
from powertrain.trace.machine.devices import device_name, peak_flops
from powertrain.trace.profiling.orders import ProfileOrder, ProfileResult
from powertrain.trace.recording import current, marks
from powertrain.trace.recording import ring as recording_ring
from powertrain.trace.recording.arrival import Arrival
from powertrain.trace.recording.phases import NAMES, RECORD_SIZE
from powertrain.trace.recording.recorder import Recorder
from powertrain.trace.stacks.whereabouts import PlaceCounts
from powertrain.wire.from_controller import Profile
from powertrain.wire.from_worker import Profiled, Telemetry

if TYPE_CHECKING:
    from powertrain.trace.machine.samplers import Sampler
    from powertrain.trace.profiling.window import ProfileWindow
    from powertrain.trace.recording.patch_choice import Choice

#: Seconds between two messages, and until the first: unsent records die with the run's driver.
_SEND_INTERVAL_S, _FIRST_SEND_DELAY_S = 0.5, 0.1
#: Parts of the time between two before and after which they ride with a report or a beat, before they go by themselves.
_RIDE_BEFORE, _RIDE_AFTER = 0.4, 1.4
#: The same where the run does not keep up.
_RETRY_INTERVAL_S = 0.05
#: Seconds between two samples of where the training thread is.
_PLACE_INTERVAL_S = 0.25
_PATCHES = "powertrain.trace.recording.patches"
#: Steps in one message: half a megabyte. So many do not wait: the ring holds four times as many.
_MOST_STEPS = 4096


class TraceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a rank is traced."""

    #: False where only the machine is sampled.
    steps: bool = True
    mode: str = "auto"
    dataloader: bool | None = None
    forward: bool | None = None
    backward: bool | None = None
    h2d: bool | None = None
    #: Seconds between two samples of the machine.
    interval: float = 1.0
    #: A file for the newest steps, which outlives the process; "" for memory.
    ring: str = ""
    #: A profile of given steps on these ranks; None for none.
    profile: ProfileOrder | None = None
    profiled_ranks: tuple[int, ...] = ()
    #: Facts that are known from the start, for readers of the record.
    facts: dict[str, Any] = {}


class Untraced:
    """The recorder of this process from before a rank started in it, put aside meanwhile: a script may trace itself and
    train inline. Until the rank is traced, marks of its loop are dropped."""

    def __init__(self) -> None:
        self._recorder = current.recording()
        self._patches = patches.installed() if (patches := sys.modules.get(_PATCHES)) else None
        current.use(Recorder(bytearray(recording_ring.ring_size(2)), thread=marks.NOBODY))

    def restore(self) -> None:
        """Restore the recorder and undo the rank's patches. Again is fine."""
        if (patches := sys.modules.get(_PATCHES)) is not None:
            patches.uninstall()
            if self._patches is not None:
                patches.install(self._patches.recorder, self._patches.choice)
        current.use(self._recorder)


class Tracing:
    """The tracing of one rank, from the beginning of the user's function to its end."""

    def __init__(self, settings: TraceSettings, warn: Callable[[str], None], every: float = 0.0) -> None:
        """Call on the thread that will run the user's function. ``warn`` is called once, should anything fail. The
        rank sends something ``every`` so many seconds, where that is less often than usual."""
        self._settings, self._warn = settings, warn
        self._every = max(_SEND_INTERVAL_S, every)
        self._recorder = Recorder(_mapped(settings.ring))
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._is_over = False
        self._sent = 0
        self._facts: dict[str, Any] = dict(settings.facts)
        self._seen = PlaceCounts()
        self._compilations = Compilations()
        now = time.monotonic()
        self._next_send, self._next_sample, self._next_place = (
            now + _FIRST_SEND_DELAY_S,
            now,
            now + _PLACE_INTERVAL_S,
        )
        self._samples: list[bytes] = []
        self._sampler: Sampler | None = None
        self._torch: Arrival | None = None
        self._is_device_recorded = False
        self._window: ProfileWindow | None = None
        self._device: DeviceWatch | None = None
        self._given_gpu: int | None = None

    @property
    def _gpu(self) -> int | None:
        """Return the GPU that the rank trains on; until that is known, the one that it was given."""
        seen = self._recorder.gpu
        return self._given_gpu if seen is None else seen

    @classmethod
    def begin(
        cls, settings: TraceSettings, warn: Callable[[str], None], gpu: int = -1, *, every: float = 0.0
    ) -> Tracing | None:
        """Begin, just before the user's function is called on this thread, with the ``gpu``-th as its own unless that
        is -1. Warn and return None where it cannot be traced."""
        before = current.recording()
        try:
            tracing = cls(settings, warn, every)
            tracing._given_gpu = gpu if gpu >= 0 else None
            if settings.steps:
                current.use(tracing._recorder)
                tracing._patch()
                # Not counted are operations whose number the user has given.
                counts_flops = "flops_per_sample" not in settings.facts
                tracing._device = DeviceWatch(tracing._recorder, counts_flops=counts_flops)
        except Exception as error:
            current.use(before)
            warn(f"This rank is not traced: {type(error).__name__}: {error}")
            return None
        return tracing

    def _patch(self) -> None:
        """Patch torch, or wait until the function has loaded it."""
        from powertrain.trace.recording import patch_choice

        s = self._settings
        choice = patch_choice.choose(s.mode, s.dataloader, s.forward, s.backward, s.h2d)
        self._torch = Arrival("torch", lambda: self._install(choice), self._failed)
        self._torch.wait()

    def _install(self, choice: Choice) -> None:
        from powertrain.trace.recording import patches

        if not self._is_over and os.getpid() == self._pid:  # and not a process that the function has forked
            patches.install(self._recorder, choice)

    def end(self) -> Telemetry | None:
        """End recording, on the same thread, after the user's function has returned or raised. Return the unsent
        telemetry; None the second time. :class:`Untraced` undoes the patches."""
        try:
            if self._torch is not None:
                self._torch.give_up()
            if self._window is not None:
                self._window.close()
            if self._device is not None:
                self._device.close()
            self._recorder.flush()
            with self._lock:
                if self._is_over:
                    return None
                self._is_over = True
                return self._gather(final=True)
        except Exception as error:
            self._failed(error)
            return None

    @property
    def is_over(self) -> bool:
        """Return True when nothing is recorded any more, whatever the reason."""
        return self._is_over

    def _failed(self, error: Exception) -> None:
        self._is_over = True
        self._warn(f"Tracing of this rank has stopped: {type(error).__name__}: {error}")

    # -- the service thread

    def profile_for(self, send: Callable[[Profiled], None]) -> Callable[[Profile], None]:
        """Return what profiles the next steps on request, and sends the outcome with ``send``. Any thread."""

        def profile(request: Profile) -> None:
            if not self._settings.steps or self._is_over:
                send(Profiled(ask=request.ask, error="its steps are not recorded"))
                return
            self._begin_profile(
                ProfileOrder(ask=request.ask, steps=request.steps, memory=request.memory), send
            )

        return profile

    def profile_given_steps(self, rank: int, send: Callable[[Profiled], None]) -> None:
        """Profile the steps that the run was configured to profile on this rank, if any."""
        if self._settings.profile is not None and rank in self._settings.profiled_ranks:
            self._begin_profile(self._settings.profile, send)

    def _begin_profile(self, order: ProfileOrder, send: Callable[[Profiled], None]) -> None:
        from powertrain.trace.profiling.window import ProfileWindow

        if self._window is None:
            self._window = ProfileWindow(self._recorder, lambda result: send(_profiled(result)))
        self._window.begin(order)

    @property
    def due(self) -> float:
        """Return when to call :meth:`collect` next, in ``time.monotonic`` seconds."""
        glance = self._next_place if self._settings.steps else float("inf")
        return min(self._next_send + _RIDE_AFTER * self._every, self._next_sample, glance)

    @property
    def rides_from(self) -> float:
        """Return from when to call :meth:`collect` together with other messages."""
        return self._next_send - _RIDE_BEFORE * self._every

    def collect(self, can_send: bool = True, *, rides: bool = True) -> Telemetry | None:
        """Sample the machine, if due, and return the telemetry to send, if due: a little earlier where it ``rides``
        with another message, a little later where it does not."""
        with self._lock:
            if self._is_over:
                self._next_send = self._next_sample = self._next_place = float("inf")
                return None
            try:
                return self._collect(can_send, self._every * (-_RIDE_BEFORE if rides else _RIDE_AFTER))
            except Exception as error:
                self._failed(error)
                return None

    def _collect(self, can_send: bool, later: float) -> Telemetry | None:
        now = time.monotonic()
        send_at = self._next_send + later
        if self._recorder.trouble:
            raise RuntimeError(self._recorder.trouble)
        if now >= self._next_place and self._settings.steps:
            self._next_place = now + _PLACE_INTERVAL_S
            self._seen.look(NAMES[self._recorder.phase_now()], self._recorder.steps)
            if self._device is not None:
                self._device.look()
        if now >= self._next_sample:
            self._next_sample = now + self._settings.interval
            self._sample()
        if self._recorder.steps - self._sent >= _MOST_STEPS:
            send_at = now
        if now < send_at or not can_send:
            if now >= send_at:
                self._next_send = now + _RETRY_INTERVAL_S
            return None
        self._next_send = now + self._every
        return self._gather(final=False)

    def _gather(self, *, final: bool) -> Telemetry | None:
        first, steps = self._recorder.drain(self._sent, final)
        if len(steps) > _MOST_STEPS * RECORD_SIZE and not final:
            steps = steps[: _MOST_STEPS * RECORD_SIZE]
            self._next_send = 0.0
        self._sent = first + len(steps) // RECORD_SIZE
        samples, self._samples = b"".join(self._samples), []
        if places := self._seen.news():
            self._facts["seen"] = places
        if (compiled := self._compilations.news()) is not None:
            self._facts |= {"compiled": compiled, "graph_breaks": graph_breaks()}
        if self._device is not None:
            self._facts |= self._device.news()
        facts, self._facts = msgspec.json.encode(self._facts) if self._facts else b"", {}
        if not (steps or samples or facts):
            return None
        return Telemetry(first=first, steps=steps, samples=samples, facts=facts)

    def _sample(self) -> None:
        from powertrain.trace.machine import samples
        from powertrain.trace.machine.samplers import Sampler

        if self._sampler is None:
            self._sampler = Sampler(lambda: self._gpu)
        self._samples.append(samples.pack(self._sampler.look(self._recorder.steps)))
        if not self._is_device_recorded:
            self._record_device()

    def _record_device(self) -> None:
        """Record the rank's device, once it is known."""
        name = device_name(self._gpu)
        if not name:
            return
        self._is_device_recorded = True
        self._facts["device"] = name
        if "peak_flops" not in self._settings.facts and (peak := peak_flops(name)):
            self._facts["peak_flops"] = peak


def _profiled(result: ProfileResult) -> Profiled:
    return Profiled(
        ask=result.ask,
        error=result.error,
        steps=result.steps,
        first_step=result.first_step,
        start_seconds=result.cost.start,
        step_seconds=result.cost.steps,
        stop_seconds=result.cost.stop,
        packing_seconds=result.cost.packing,
        trace=result.trace,
        memory=result.memory,
    )


def newest_steps(path: str, after: int = 0, most: int = 0) -> bytes:
    """Return the steps in the ring of a rank from ``after`` on, only the newest ``most`` of them where that is given;
    b"" where there is no ring. The rank may be dead."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as ring:
            records = recording_ring.read_ring(bytes(ring), after)[1]
    except (OSError, ValueError):  # none, or not yet written
        return b""
    return records[-most * RECORD_SIZE :] if most else records


def remove_ring(path: str) -> None:
    """Remove the ring of a rank after its content was read."""
    with contextlib.suppress(OSError):
        os.unlink(path)


def _mapped(path: str) -> bytearray | mmap.mmap:
    """Return a ring in a file that outlives this process; in memory where that is not possible."""
    if not path:
        return bytearray(recording_ring.ring_size())
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # Written, and not only made longer: a full disk is an error here, and a crash once it is mapped.
            os.posix_fallocate(descriptor, 0, recording_ring.ring_size())
            return mmap.mmap(descriptor, recording_ring.ring_size())
        finally:
            os.close(descriptor)
    except OSError:
        return bytearray(recording_ring.ring_size())
