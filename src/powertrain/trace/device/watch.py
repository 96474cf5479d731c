"""All that is found out about a rank's device while it trains, as facts for the diagnosis."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.trace.device.activity_window import ActivityWindow
from powertrain.trace.device.allocations import KeptAllocations
from powertrain.trace.device.counted_step import CountedStep

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

_MIB = 2.0**20


class DeviceWatch:
    """Counts one step, takes windows of kernels, and follows the allocator. Created on the training thread."""

    def __init__(self, recorder: Recorder, *, counts_flops: bool = True) -> None:
        self._recorder, self._counts_flops = recorder, counts_flops
        self._counted: CountedStep | None = CountedStep(recorder)
        self._activity = ActivityWindow(recorder)
        self._allocations = KeptAllocations(recorder)
        self._allocator: dict[str, Any] = {}

    def close(self) -> None:
        """End what is under way. Training thread."""
        if (counted := self._counted) is not None:  # the service thread drops it once it is sent
            counted.close()
        self._activity.close()
        self._allocations.close()

    def look(self) -> None:
        """Look at the allocator and at the pace of the steps; some times a second. Service thread."""
        gpu = self._recorder.gpu
        torch = sys.modules.get("torch")
        if gpu is None or torch is None:
            return
        self._activity.look_at_pace()
        stats = torch.cuda.memory_stats(gpu)
        peak = stats.get("allocated_bytes.all.peak", 0) / _MIB
        self._allocations.look(peak)
        self._allocator = {
            "used": stats.get("allocated_bytes.all.current", 0) / _MIB,
            "peak": peak,
            "reserved": stats.get("reserved_bytes.all.current", 0) / _MIB,
            "split": stats.get("inactive_split_bytes.all.current", 0) / _MIB,
            "retries": stats.get("num_alloc_retries", 0),
        }

    def news(self) -> dict[str, Any]:
        """Return the facts that are new since the last call, as plain values by name. Service thread."""
        facts: dict[str, Any] = {}
        if self._counted is not None and (counted := self._counted.counted) is not None:
            self._counted = None
            facts["operators"] = msgspec.to_builtins(counted)
            if self._counts_flops:
                facts["step_flops"] = counted.flops
        if (activity := self._activity.news()) is not None:
            facts["activity"] = msgspec.to_builtins(activity)
        if (lines := self._allocations.news()) is not None:
            facts["kept_allocations"] = lines
        if self._allocator:
            facts["allocator"], self._allocator = self._allocator, {}
        return facts
