"""Plans made from plans: other columns, other sources, a sample, a seed. Pure: nothing is read but block counts."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from powertrain.data.plan import cutting
from powertrain.data.plan.plan import WHOLE_BLOCK, Block, Inspected, Part, Plan
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
    chosen = picked(plan)
    parts = [
        dataclasses.replace(part, source=FilteredSource(part.source, expression)) for part in chosen.parts
    ]
    return dataclasses.replace(chosen, parts=tuple(parts))


def picked(plan: Plan) -> Plan:
    """Return a plan of the same rows, in the same order, that uses every block of its sources as a whole."""
    from powertrain.data.sources.picked import PickedSource

    if plan.blocks is None or any(block.rows == WHOLE_BLOCK for block in plan.blocks):
        return plan
    chosen = cutting.by_part(plan.blocks)
    parts = [
        dataclasses.replace(part, source=PickedSource(part.source, chosen.get(number, [])))
        for number, part in enumerate(plan.parts)
    ]
    return dataclasses.replace(plan, parts=tuple(parts), blocks=_order_of_parts(plan.blocks))


def _order_of_parts(blocks: Sequence[Block]) -> tuple[Block, ...] | None:
    """Return ``blocks`` as blocks of sources that have no others; None where the parts follow one another."""
    if all(one.part <= next_one.part for one, next_one in itertools.pairwise(blocks)):
        return None
    counters: dict[int, itertools.count[int]] = defaultdict(itertools.count)
    return tuple(Block(block.part, next(counters[block.part]), 0, WHOLE_BLOCK) for block in blocks)


def sample(inspected: Inspected, kept: int) -> tuple[Plan, Plan]:
    """Return plans of ``kept`` rows from everywhere, and of the others."""
    from powertrain.data.sources.filtered import SampledSource

    plan = inspected.plan
    seed = plan.seed if plan.seed is not None else seed_of_data(inspected)
    chosen = picked(plan)
    parts = chosen.parts
    counts = [sum(block.rows for block in part.source.inspect().blocks) for part in parts]
    halves = []
    for complement in (False, True):
        sampled = [
            dataclasses.replace(
                part, source=SampledSource(part.source, Fraction(take, max(count, 1)), seed, complement)
            )
            for part, count, take in zip(parts, counts, cutting.shares(counts, kept), strict=True)
        ]
        halves.append(dataclasses.replace(chosen, parts=tuple(sampled)))
    return halves[0], halves[1]


def shuffle_like(plan: Plan, other: Plan) -> Plan:
    """Return the same rows, shuffled for each epoch if ``other`` is, by its seed."""
    return dataclasses.replace(plan, shuffled=other.shuffled, seed=other.seed)


def with_seed(plan: Plan) -> Plan:
    """Return the plan with a seed, so that keeping its rows again gives the same rows in the same order."""
    if plan.seed is not None:
        return plan
    return dataclasses.replace(plan, seed=seed_of_data(plan.inspected()))
