"""Plans made from plans: other columns, other sources, a sample, a seed. Pure: nothing is read but block counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING

from powertrain.data.plan import cutting
from powertrain.data.plan.plan import Inspected, Part, Plan
from powertrain.data.plan.prepared import seed_of_data

if TYPE_CHECKING:
    import pyarrow.compute as pc

    from powertrain.data.expressions.expr import Expr
    from powertrain.data.operations.operation import Operation
    from powertrain.data.sources.base import Source


def project(plan: Plan, wrap: Callable[[Source], Source], operation: Operation) -> Plan:
    """Return the plan with other columns: chosen by the source where no operation precedes, which may save reading."""
    parts = tuple(
        dataclasses.replace(part, operations=(*part.operations, operation))
        if part.operations
        else Part(wrap(part.source))
        for part in plan.parts
    )
    return dataclasses.replace(plan, parts=parts)


def filter_rows(plan: Plan, expression: pc.Expression | Expr) -> Plan:
    """Return the plan with the rows that an expression keeps, counted exactly where no operation precedes."""
    from powertrain.data.expressions.expr import Expr
    from powertrain.data.operations.columns import FilterExpression
    from powertrain.data.operations.computing import FilterComputed
    from powertrain.data.sources.filtered import FilteredSource

    if isinstance(expression, Expr):  # it calls functions
        return plan.then(FilterComputed(expression))
    if any(part.operations for part in plan.parts):
        return plan.then(FilterExpression(expression))
    parts = [
        dataclasses.replace(part, source=FilteredSource(part.source, expression)) for part in picked(plan)
    ]
    return dataclasses.replace(plan, parts=tuple(parts), blocks=None)


def picked(plan: Plan) -> list[Part]:
    """Return the parts of a plan as sources of which every block counts."""
    from powertrain.data.sources.picked import PickedSource

    if plan.blocks is None:
        return list(plan.parts)
    chosen = cutting.by_part(plan.blocks)
    return [
        dataclasses.replace(part, source=PickedSource(part.source, chosen.get(number, [])))
        for number, part in enumerate(plan.parts)
    ]


def sample(inspected: Inspected, kept: int) -> tuple[Plan, Plan]:
    """Return plans of ``kept`` rows from everywhere, and of the others."""
    from powertrain.data.sources.filtered import SampledSource

    plan = inspected.plan
    seed = plan.seed if plan.seed is not None else seed_of_data(inspected)
    parts = picked(plan)
    counts = [sum(block.rows for block in part.source.inspect().blocks) for part in parts]
    halves = []
    for complement in (False, True):
        sampled = [
            dataclasses.replace(
                part, source=SampledSource(part.source, Fraction(take, max(count, 1)), seed, complement)
            )
            for part, count, take in zip(parts, counts, cutting.shares(counts, kept), strict=True)
        ]
        halves.append(dataclasses.replace(plan, parts=tuple(sampled), blocks=None))
    return halves[0], halves[1]


def shuffle_like(plan: Plan, other: Plan) -> Plan:
    """Return the same rows, shuffled for each epoch if ``other`` is, by its seed."""
    return dataclasses.replace(plan, shuffled=other.shuffled, seed=other.seed)


def with_seed(plan: Plan) -> Plan:
    """Return the plan with a seed, so that keeping its rows again gives the same rows in the same order."""
    if plan.seed is not None:
        return plan
    return dataclasses.replace(plan, seed=seed_of_data(plan.inspected()))
