"""Fold findings into root causes with the findings that they explain, ordered by severity and cost. Pure.

One late rank makes all others wait; a leak fills a machine. Each is one fault and should be read as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from powertrain.diagnosis.finding import SEVERITIES, Finding
from powertrain.diagnosis.rules.device import MANY_ALLOCATIONS, MANY_WAITS

_COMPUTE_STRAGGLERS = frozenset(
    f"{phase}_straggler" for phase in ("forward", "backward", "optimizer", "inside")
)
STRAGGLERS = _COMPUTE_STRAGGLERS | {"input_straggler", "transfer_straggler", "outside_straggler"}
#: Share of steps from which on a rank is late in every one.
_EVERY_STEP = 0.95
#: Maximum time that ranks which wait for each other lose, per share of stolen cores.
_LOST_PER_STOLEN = 3.0
#: A device that waits for the host, which launches too slowly or does other work.
_HOST_BOUNDS = frozenset({"launch_bound", "host_bound"})
_BOUNDS = frozenset({"input_bound", "transfer_bound", "outside_bound", "checkpoint_bound"})


class _Rule(NamedTuple):
    """A finding of one of ``causes`` explains one of ``echoes`` when the condition (cause, echo) holds."""

    causes: frozenset[str]
    echoes: frozenset[str]
    holds: Callable[[Finding, Finding], bool]


def _always(cause: Finding, echo: Finding) -> bool:
    return True


def _within(cause: Finding, echo: Finding) -> bool:
    """The echo is about no rank but those of the cause."""
    return bool(echo.ranks) and (not cause.ranks or set(echo.ranks) <= set(cause.ranks))


def _within_defect(cause: Finding, echo: Finding) -> bool:
    return cause.severity != "info" and _within(cause, echo)


def _comes_and_goes(cause: Finding, echo: Finding) -> bool:
    """Return whether the finding is intermittent, as a wait for a core is; a delay in every step has another cause."""
    return float(echo.evidence.get("late_in") or 0.0) < _EVERY_STEP


def _steal_explains_cost(cause: Finding, echo: Finding) -> bool:
    """Return whether stolen cores can cost that much: a missing core delays all ranks, so that more is lost than was
    stolen, but not much more, and not by ranks on other hosts."""
    stolen = float(cause.evidence.get("stolen_cores") or 0.0) / float(cause.evidence.get("cores") or 1.0)
    are_there = not echo.ranks or set(echo.ranks) <= set(cause.ranks)
    return are_there and echo.cost <= _LOST_PER_STOLEN * stolen and _comes_and_goes(cause, echo)


def _never_lets_ahead(cause: Finding, echo: Finding) -> bool:
    """Return whether the host waits so often that it cannot launch anything in advance."""
    return float(cause.evidence.get("waits") or 0.0) >= MANY_WAITS


def _takes_most_of(cause: Finding, echo: Finding) -> bool:
    """Return whether the cause costs at least half of what the echo does."""
    return cause.cost >= 0.5 * echo.cost


def _costs_more_in_all(cause: Finding, echo: Finding) -> bool:
    """Return whether the cause took more of the run's time than the echo, which is measured by its share of a step."""
    return float(cause.evidence.get("seconds_lost") or 0.0) > float(
        echo.evidence.get("seconds_in_all") or 0.0
    )


def _waits_for_memory(cause: Finding, echo: Finding) -> bool:
    """Return whether the host waits for memory of the device: torch gives it back or takes more again and again."""
    retries = int(echo.evidence.get("alloc_retries") or cause.evidence.get("retries") or 0)
    allocations = float(echo.evidence.get("allocations") or cause.evidence.get("allocations") or 0.0)
    is_measured = cause.kind == "fragmented_memory" and cause.cost >= 0.5 * echo.cost > 0
    return cause.evidence.get("where") == "device" and (
        retries >= 3 or allocations >= MANY_ALLOCATIONS or is_measured
    )


def _breaks_what_runs(cause: Finding, echo: Finding) -> bool:
    """Return whether compiled code launches most of the kernels: those of other code each have an operator."""
    operators, kernels = (float(echo.evidence.get(name) or 0.0) for name in ("operators", "kernels"))
    return cause.severity != "info" or operators < 0.6 * kernels


def _is_information(cause: Finding, echo: Finding) -> bool:
    return echo.severity == "info"


def _is_trouble_in_same_phase(cause: Finding, echo: Finding) -> bool:
    return cause.severity != "info" and cause.phase == echo.phase


def _in_same_phase(cause: Finding, echo: Finding) -> bool:
    return cause.phase == echo.phase


def _meets_on(where: str) -> Callable[[Finding, Finding], bool]:
    def meets(cause: Finding, echo: Finding) -> bool:
        return echo.evidence.get("where") == where and not set(cause.ranks).isdisjoint(echo.ranks)

    return meets


#: Kinds that explain other kinds. A tree, so that no finding explains itself.
_RULES = (
    _Rule(frozenset({"gpu_throttled"}), _COMPUTE_STRAGGLERS | {"slow_node"}, _within_defect),
    _Rule(frozenset({"slow_node"}), STRAGGLERS, _within),
    _Rule(frozenset({"threads_oversubscribed"}), _COMPUTE_STRAGGLERS, _within_defect),
    _Rule(
        frozenset({"threads_oversubscribed"}),
        frozenset({"alternating_straggler", "collective_bound"}),
        _always,
    ),
    _Rule(
        STRAGGLERS | {"slow_node", "alternating_straggler"},
        frozenset({"collective_bound", "gpu_idle"}),
        _always,
    ),
    _Rule(_BOUNDS, frozenset({"gpu_idle"}), _always),
    _Rule(frozenset({"sync_bound"}), frozenset({"launch_bound"}), _never_lets_ahead),
    _Rule(frozenset({"sync_bound", "launch_bound"}), frozenset({"gpu_idle", "compute_bound"}), _always),
    _Rule(frozenset({"host_bound"}), frozenset({"gpu_idle"}), _always),
    _Rule(frozenset({"host_bound"}), frozenset({"compute_bound"}), _is_information),
    _Rule(frozenset({"compute_bound"}), frozenset({"host_bound"}), _is_trouble_in_same_phase),
    _Rule(frozenset({"unfused_optimizer"}), _HOST_BOUNDS | {"gpu_idle"}, _takes_most_of),
    _Rule(
        frozenset({"memory_pressure", "fragmented_memory"}),
        _HOST_BOUNDS | {"gpu_idle"},
        _waits_for_memory,
    ),
    _Rule(frozenset({"graph_breaks"}), _HOST_BOUNDS, _breaks_what_runs),
    _Rule(
        frozenset({"unfused_optimizer", "full_float_products"}), frozenset({"compute_bound"}), _is_information
    ),
    _Rule(
        frozenset({"recompiles"}),
        frozenset({"gpu_idle", "alternating_straggler", "collective_bound"}) | _COMPUTE_STRAGGLERS,
        _always,
    ),
    _Rule(frozenset({"recompiles"}), frozenset({"periodic_spike"}), _in_same_phase),
    _Rule(frozenset({"recompiles"}), _HOST_BOUNDS | {"sync_bound"}, _costs_more_in_all),
    _Rule(frozenset({"input_bound"}), frozenset({"alternating_straggler"}), _in_same_phase),
    _Rule(frozenset({"machine_shared"}), frozenset({"collective_bound"}), _always),
    _Rule(frozenset({"machine_shared"}), frozenset({"alternating_straggler"}), _comes_and_goes),
    _Rule(
        frozenset({"cpu_stolen"}),
        frozenset({"collective_bound", "alternating_straggler"}),
        _steal_explains_cost,
    ),
    _Rule(
        frozenset({"host_memory_leak"}), frozenset({"memory_pressure", "memory_imbalance"}), _meets_on("host")
    ),
    _Rule(
        frozenset({"device_memory_creep"}),
        frozenset({"memory_pressure", "memory_imbalance"}),
        _meets_on("device"),
    ),
)


def fold(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Return the root causes, the most severe and costliest first, each with its echoes and without duplicates.

    A cause is as severe as the findings that it explains, and as costly if its own cost is unknown.
    """
    ranked = _ranked(_once(findings))
    parents = {place: _cause_of(place, ranked) for place in range(len(ranked))}
    echoes: dict[int, list[Finding]] = {}
    for place in parents:
        root = _root(place, parents)
        if root != place:
            echoes.setdefault(root, []).append(ranked[place])
    roots = [place for place in parents if _root(place, parents) == place]
    return tuple(_ranked([_with_echoes(ranked[root], echoes.get(root, [])) for root in roots]))


def _with_echoes(cause: Finding, echoes: Sequence[Finding]) -> Finding:
    everything = (cause, *echoes)
    return msgspec.structs.replace(
        cause,
        severity=min((one.severity for one in everything), key=SEVERITIES.index),
        cost=cause.cost or max(one.cost for one in everything),
        echoes=(*cause.echoes, *echoes),
    )


def is_trouble(finding: Finding) -> bool:
    """Return whether the finding needs an action."""
    return finding.severity != "info"


def _ranked(findings: Sequence[Finding]) -> list[Finding]:
    def weight(finding: Finding) -> tuple[int, bool, float, str, tuple[int, ...]]:
        severity = SEVERITIES.index(finding.severity)
        return severity, finding.kind != "healthy", -finding.cost, finding.kind, finding.ranks

    return sorted(findings, key=weight)


def _once(findings: Sequence[Finding]) -> list[Finding]:
    return list(
        {(one.kind, one.phase, one.ranks, one.evidence.get("where")): one for one in findings}.values()
    )


def _cause_of(place: int, ranked: Sequence[Finding]) -> int | None:
    """The weightiest finding that explains the one at ``place``, if any does."""
    echo = ranked[place]
    for other, cause in enumerate(ranked):
        if other != place and any(_explains(rule, cause, echo) for rule in _RULES):
            return other
    return None


def _explains(rule: _Rule, cause: Finding, echo: Finding) -> bool:
    return cause.kind in rule.causes and echo.kind in rule.echoes and rule.holds(cause, echo)


def _root(place: int, parents: dict[int, int | None]) -> int:
    while (parent := parents[place]) is not None:
        place = parent
    return place
