"""All that is found out about a rank's device while it trains, as facts for the diagnosis."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from powertrain.trace.device.activity_window import ActivityWindow
from powertrain.trace.device.allocations import KeptAllocations
from powertrain.trace.device.counted_step import CountedStep

if TYPE_CHECKING:
    from powertrain.trace.recording.recorder import Recorder

_MIB = 2.0**20
#: Relative change of the allocator's figures that is sent, and how many of its last figures count.
_NEWS, _LOOKS = 0.05, 20
#: Operators of a step from which on its kernels are not recorded: that would stop the loop for seconds.
_MOST_OPERATORS = 30_000


class DeviceWatch:
    """Counts one step, takes windows of kernels, and follows the allocator. Created on the training thread."""

    def __init__(self, recorder: Recorder, *, counts_flops: bool = True) -> None:
        self._recorder, self._counts_flops = recorder, counts_flops
        self._counted: CountedStep | None = CountedStep(recorder)
        self._operators = 0
        self._activity = ActivityWindow(recorder, is_too_large=self._is_step_too_large)
        self._allocations = KeptAllocations(recorder)
        self._allocator: dict[str, float] = {}
        self._sent: dict[str, float] = {}
        #: Of the last looks the MiB in free pieces, and the number of allocations from the device with that of steps.
        self._splits: deque[float] = deque(maxlen=_LOOKS)
        self._allocations_made: deque[tuple[int, int]] = deque(maxlen=_LOOKS)
        #: MiB of the device, and the most that tensors have had; torch's own peak can be reset by the user.
        self._total = self._peak = 0.0

    def close(self) -> None:
        """End what is under way. Training thread."""
        counted = self._counted  # the service thread drops it once it is sent
        for one in (counted, self._activity, self._allocations):
            with contextlib.suppress(Exception):  # of a device that has failed: the others still end
                if one is not None:
                    one.close()

    def _is_step_too_large(self) -> bool:
        counting = self._counted
        counted = counting.counted if counting is not None else None
        return (self._operators if counted is None else counted.operators) > _MOST_OPERATORS

    def look(self) -> None:
        """Look at the allocator and at the pace of the steps; some times a second. Service thread."""
        gpu = self._recorder.gpu
        torch = sys.modules.get("torch")
        if gpu is None or torch is None:
            return
        self._activity.look_at_pace()
        stats: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # of a device that has failed
            # Not memory_stats(): that makes one flat dict of it, for which the training thread would wait.
            stats = torch.cuda.memory_stats_as_nested_dict(gpu)
            self._total = self._total or torch.cuda.get_device_properties(gpu).total_memory / _MIB
        allocated = _all_pools(stats, "allocated_bytes")
        peak = allocated.get("peak", 0) / _MIB
        self._allocations.look(peak)
        self._peak = max(self._peak, peak)
        # Within a step, much memory is free for a moment: only what is free all the time is of no use.
        self._splits.append(_all_pools(stats, "inactive_split_bytes").get("current", 0) / _MIB)
        self._allocations_made.append((stats.get("num_device_alloc", 0), self._recorder.steps))
        self._allocator = {
            "used": allocated.get("current", 0) / _MIB,
            "peak": self._peak,
            "reserved": _all_pools(stats, "reserved_bytes").get("current", 0) / _MIB,
            "split": min(self._splits),
            "retries": stats.get("num_alloc_retries", 0),
            "allocations": _by_step(self._allocations_made),
            "total": self._total,
        }

    def news(self) -> dict[str, Any]:
        """Return the facts that are new since the last call, as plain values by name. Service thread."""
        facts: dict[str, Any] = {}
        if self._counted is not None and (counted := self._counted.counted) is not None:
            self._counted, self._operators = None, counted.operators
            facts["operators"] = msgspec.to_builtins(counted)
            if self._counts_flops:
                facts["step_flops"] = counted.flops
        if (activity := self._activity.news()) is not None:
            facts["activity"] = msgspec.to_builtins(activity)
        if (lines := self._allocations.news()) is not None:
            facts["kept_allocations"] = lines
        if _differs(self._allocator, self._sent):
            facts["allocator"] = self._sent = self._allocator
        return facts


def _all_pools(stats: dict[str, Any], name: str) -> dict[str, int]:
    """Return a figure of the allocator over all of its pools: "current", "peak" and others; empty where unknown."""
    figures: dict[str, int] = stats.get(name, {}).get("all", {})
    return figures


def _by_step(made: Sequence[tuple[int, int]]) -> float:
    """Return the allocations by step between the first and the last look; 0 where no step was made."""
    (first, first_step), (last, last_step) = made[0], made[-1]
    return (last - first) / (last_step - first_step) if last_step > first_step else 0.0


def _differs(new: dict[str, float], old: dict[str, float]) -> bool:
    """Return whether the allocator holds or takes other memory than when its figures were last sent."""
    names = new.keys() & {"reserved", "peak", "split", "retries"}
    names |= (
        {"allocations"} if max(new.get("allocations", 0.0), old.get("allocations", 0.0)) >= 1.0 else set()
    )
    return any(
        abs(new[name] - old.get(name, 0.0)) > _NEWS * max(new[name], old.get(name, 0.0)) for name in names
    )
