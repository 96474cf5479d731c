"""A profile as lines for the terminal. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from powertrain.diagnosis import words
from powertrain.diagnosis.profiles.hotspots import HotSpot, MemorySpot, ProfileSummary

_NAME_WIDTH = 78


def profile_lines(rank: int, profile: ProfileSummary) -> list[str]:
    """Return the tables of one rank."""
    steps = "1 step" if profile.steps == 1 else f"{profile.steps} steps"
    lines = [f"rank {rank}: {steps} of {_ms(profile.step_ms)} while profiled"]
    if profile.device_ms is not None:
        busy = profile.device_ms / profile.step_ms if profile.step_ms > 0 else 0.0
        lines.append(
            f"  the device works for {_ms(profile.device_ms)} of a step ({words.share(min(busy, 1.0))})"
        )
    outside = max(0.0, profile.step_ms - profile.operators_ms)
    lines.append(
        f"  the training thread is in torch's operators for {_ms(profile.operators_ms)}, outside of them (Python, "
        f"data, profiler) for {_ms(outside)}"
    )
    lines += _table("kernels and copies", profile.kernels)
    lines += _table("operators, without those they call", profile.operators)
    what = (
        "lines, by time of their kernels"
        if profile.device_ms is not None
        else "lines, by time of their operators"
    )
    lines += _table(what, profile.lines)
    lines += _table("pauses of the device", profile.gaps)
    lines += _table("waits of the host for the device", profile.syncs)
    return lines + _memory_table(profile.allocations)


def _table(title: str, spots: Sequence[HotSpot]) -> list[str]:
    if not spots:
        return []
    head = f"  {'ms a step':>10} {'share':>6} {'calls':>7}  {title}"
    return ["", head, *(_row(spot) for spot in spots)]


def _row(spot: HotSpot) -> str:
    return f"  {spot.ms:>10.3f} {words.share(spot.share):>6} {spot.calls:>7.5g}  {_shortened(spot.name)}"


def _memory_table(spots: Sequence[MemorySpot]) -> list[str]:
    if not spots:
        return []
    rows = [f"  {spot.mib:>10.1f} {'':>6} {spot.calls:>7.5g}  {_shortened(spot.name)}" for spot in spots]
    return ["", f"  {'MiB a step':>10} {'':>6} {'calls':>7}  lines, by allocated memory", *rows]


def _ms(milliseconds: float) -> str:
    return words.seconds(milliseconds / 1e3)


def _shortened(name: str) -> str:
    """Names of kernels are long, and differ at both ends."""
    if len(name) <= _NAME_WIDTH:
        return name
    half = (_NAME_WIDTH - 1) // 2
    return f"{name[:half]}…{name[-half:]}"
