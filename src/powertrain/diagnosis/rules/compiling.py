"""Functions that ``torch.compile`` compiles again and again, or cuts into pieces. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from powertrain.diagnosis import words
from powertrain.diagnosis.finding import Finding
from powertrain.diagnosis.tables.steady import SteadySteps

#: Compilations of one function from which on they are too many: one, and one with dynamic shapes, are usual.
_MANY = 3
#: Seconds that recompilations must take, and their share of the time since the first step.
_LEAST_SECONDS, _LEAST_SHARE = 0.5, 0.01
_SIZES_SHOWN = 5
#: Breaks from which on they need an action even if nothing else is found, and letters of a reason that are shown.
_MANY_BREAKS, _REASON_SHOWN = 4, 160
_SIZE = re.compile(
    r"tensor '(?P<tensor>.+?)' size mismatch at index (?P<index>\d+)\. expected (?P<old>\d+), actual (?P<new>\d+)"
)


def find(run: SteadySteps, compiled: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Finding]:
    """Return one finding for the function whose recompilations took longest, on the rank where they did."""
    worst = max(
        ((rank, one) for rank, functions in compiled.items() for one in functions if _is_excessive(one, run)),
        key=lambda found: _lost(found[1]),
        default=None,
    )
    if worst is None:
        return []
    rank, function = worst
    lost, count = _lost(function), int(function["count"])
    reason, action = _in_words([str(one) for one in function.get("reasons", ())])
    total = _seconds_of(run)
    return [
        Finding(
            kind="recompiles",
            severity="warning",
            summary=f"{function['where']} was compiled {count} times on rank {rank}, which took {words.seconds(lost)} "
            f"after the first time: {reason}.",
            action=action,
            phase="forward",
            ranks=tuple(
                sorted(rank for rank, functions in compiled.items() if _has(functions, function["where"]))
            ),
            cost=min(1.0, lost / total) if total > 0 else 0.0,
            evidence={
                "line": function["where"],
                "count": count,
                "seconds": float(function["seconds"]),
                "seconds_lost": lost,
                "reasons": [str(one) for one in function.get("reasons", ())],
            },
        )
    ]


def find_breaks(run: SteadySteps, facts: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Return one finding for compiled code that the compiler has cut into several graphs."""
    breaks = {rank: of["graph_breaks"] for rank, of in facts.items() if of.get("graph_breaks")}
    if not breaks or not run.enough:
        return []
    rank = max(breaks, key=lambda one: sum(breaks[one].values()))
    count = sum(breaks[rank].values())
    reason, _ = max(breaks[rank].items(), key=lambda item: item[1])
    return [
        Finding(
            kind="graph_breaks",
            severity="warning" if count >= _MANY_BREAKS else "info",
            summary=f"torch.compile broke graphs of rank {rank} {'once' if count == 1 else f'{count} times'}, so that "
            f"their pieces run one by one: {reason[:_REASON_SHOWN].rstrip('.')}.",
            action="Take prints, .item(), numpy and data-dependent branches out of the compiled function; "
            "torch.compile(model, fullgraph=True) raises an error at the first such line.",
            phase="forward",
            evidence={"count": count, "reasons": dict(breaks[rank])},
        )
    ]


def _has(functions: Sequence[Mapping[str, Any]], where: str) -> bool:
    return any(one["where"] == where and int(one["count"]) >= _MANY for one in functions)


def _lost(function: Mapping[str, Any]) -> float:
    return max(0.0, float(function["seconds"]) - float(function["first_seconds"]))


def _is_excessive(function: Mapping[str, Any], run: SteadySteps) -> bool:
    lost = _lost(function)
    return (
        int(function["count"]) >= _MANY and lost >= _LEAST_SECONDS and lost >= _LEAST_SHARE * _seconds_of(run)
    )


def _seconds_of(run: SteadySteps) -> float:
    """Return the seconds of all recorded steps on the slowest rank."""
    totals = run.steps.total.sum(axis=0)
    return float(totals.max()) if totals.size else 0.0


def _in_words(reasons: Sequence[str]) -> tuple[str, str]:
    """Return why a function was compiled again, and the remedy."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for reason in reasons:
        for match in _SIZE.finditer(reason):
            seen = sizes.setdefault((match["tensor"], match["index"]), [])
            seen += [size for size in (int(match["old"]), int(match["new"])) if size not in seen]
    if not sizes:
        why = reasons[-1].partition("\n")[0] if reasons else "torch did not record why"
        return why, "Keep what the function depends on the same from step to step, or pass it as a tensor."
    (tensor, index), seen = max(sizes.items(), key=lambda item: len(item[1]))
    shown = ", ".join(map(str, seen[:_SIZES_SHOWN])) + (" and more" if len(seen) > _SIZES_SHOWN else "")
    return (
        f"dimension {index} of '{tensor}' was {shown}",
        f"Compile with dynamic=True, or call torch._dynamo.mark_dynamic({tensor}, {index}) before the call, or pad "
        "batches to a few fixed lengths.",
    )
