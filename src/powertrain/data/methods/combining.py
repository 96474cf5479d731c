"""Several datasets as one: one after the other, side by side, or mixed."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from powertrain.data.arguments import number, shown, values_of
from powertrain.data.consuming import PlanReader
from powertrain.data.methods.columns import ColumnMethods
from powertrain.data.operations.functions import MapBatches
from powertrain.data.plan.changing import picked, shuffle_like
from powertrain.data.plan.mixing import LONGEST, SHORTEST
from powertrain.data.plan.plan import Part, Plan
from powertrain.data.plan.plan import mix as mixture_of
from powertrain.data.plan.plan import union as union_of
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.readable import ReadableDataset

_D = TypeVar("_D", bound="ColumnMethods")


class MixStoppingCondition(enum.Enum):
    """The end of a mixture: see :meth:`Dataset.mix`."""

    STOP_ON_SHORTEST = SHORTEST
    STOP_ON_LONGEST_DROP = LONGEST


class CombiningMethods(ColumnMethods):
    """The methods of :class:`powertrain.data.Dataset` that combine several."""

    __slots__ = ()

    def union(self: _D, *other: ReadableDataset) -> _D:
        """Return a dataset with the rows of other datasets after its own.

        Args:
            *other: Datasets with the same columns.

        Returns:
            The new dataset; if one of them is shuffled, all rows are.

        Raises:
            DataError: Another object was given.

        Example::

            old.union(new)
        """
        return self._of_plan(union_of([_without_mixture(plan) for plan in _plans("union", self, other)]))

    def zip(self: _D, *other: ReadableDataset) -> _D:
        """Return a dataset whose row i has the columns of row i of this and the other datasets.

        Rows of datasets with functions, or in shuffled order, are computed and kept first as ``materialize()`` does; of
        others nothing is read. The order is that of the rows; ``random_shuffle()`` afterwards keeps rows together.

        Args:
            *other: Datasets with as many rows. A column with a name that exists gets a number: "x_1", "x_2".

        Returns:
            The new dataset.

        Raises:
            DataError: Another object was given, or the numbers of rows differ.

        Example::

            features.zip(labels)
        """
        from powertrain.data.sources.zipped import ZippedSource

        if not other:
            raise DataError("zip() was given no other dataset. Give at least one.")
        sides = [picked(_in_order(plan)) for plan in _plans("zip", self, other)]
        source = ZippedSource(
            [[part.source for part in side.parts] for side in sides],
            [
                None if side.blocks is None else [(block.part, block.index) for block in side.blocks]
                for side in sides
            ],
        )
        source.inspect()  # numbers of rows that differ are an error of this line
        return self._of_plan(Plan((Part(source),)))

    def mix(
        self: _D,
        *other: ReadableDataset,
        weights: Sequence[float] | None = None,
        stopping_condition: MixStoppingCondition | str = MixStoppingCondition.STOP_ON_LONGEST_DROP,
    ) -> _D:
        """Return a dataset that interleaves the rows of this and other datasets by weight.

        Every stretch of it has rows of each dataset in proportion to the weights, as long as they last. The order
        follows from weights and numbers of rows alone: a run can resume in it at any number of ranks. Datasets that
        are shuffled stay so, each within itself, anew for each epoch. Rows of a dataset with ``filter()`` by a function
        or ``flat_map()`` are computed and kept first as ``materialize()`` does, because their number counts; of
        ``map_batches()`` the rows that it is given count.

        Args:
            *other: Datasets with the same columns.
            weights: A number above 0 for each dataset, this one first; None for equal ones.
            stopping_condition: ``STOP_ON_LONGEST_DROP``: an epoch has each row of each dataset once, and shorter
                datasets end earlier. ``STOP_ON_SHORTEST``: it ends when the first dataset has no rows left; of the
                others the first rows take part, of shuffled ones others in each epoch.

        Returns:
            The new dataset.

        Raises:
            DataError: Another object was given, or weights do not fit.

        Example::

            web.mix(books, code, weights=[0.7, 0.2, 0.1])
        """
        plans = [_counted(_without_mixture(plan)) for plan in _plans("mix", self, other)]
        shares = _checked_weights(weights, len(plans))
        return self._of_plan(mixture_of(plans, shares, _checked_end(stopping_condition)))


def _plans(method: str, first: ReadableDataset, others: Sequence[Any]) -> list[Plan]:
    for one in others:
        if not isinstance(one, ColumnMethods):
            raise DataError(
                f"{method}() takes datasets, and got a {type(one).__name__}. Give Dataset objects."
            )
    return [first.plan, *(one.plan for one in others)]


def _without_mixture(plan: Plan) -> Plan:
    """Return a plan with blocks in the order of its rows: a mixture is computed and kept first."""
    return plan if plan.mixture is None else PlanReader(plan).materialize()


def _counted(plan: Plan) -> Plan:
    """Return a plan whose number of rows is known: computed and kept where a filter or flat_map() changes it."""
    operations = [operation for part in plan.parts for operation in part.operations]
    # map_batches() may change the number of rows, but mostly does not, and its rows may be far too many to keep.
    if all(operation.keeps_count or isinstance(operation, MapBatches) for operation in operations):
        return plan
    in_order = dataclasses.replace(plan, shuffled=False)
    return shuffle_like(PlanReader(in_order).materialize(), plan)


def _in_order(plan: Plan) -> Plan:
    """Return a plan of the same rows without functions, in a fixed order: computed and kept where needed."""
    if plan.is_plain and not any(part.operations for part in plan.parts):
        return plan
    return PlanReader(plan).materialize()


def _checked_weights(weights: Any, count: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0,) * count
    what = f"must be numbers above 0, one for each of the {count} datasets."
    given = values_of("weights", weights, f"They {what}")
    found = tuple(float(number("a value of weights", each, what)) for each in given)
    if len(found) != count or min(found) <= 0:
        raise DataError(f"weights={shown(given)} {what}")
    total = sum(found)
    if total == float("inf") or min(found) / total < 1e-9:
        raise DataError(
            f"weights={shown(given)} are too far apart: the smallest must be at least 1e-9 of their sum."
        )
    return tuple(weight / total for weight in found)


def _checked_end(condition: Any) -> str:
    value = condition.value if isinstance(condition, enum.Enum) else condition
    if not isinstance(value, str) or value not in (SHORTEST, LONGEST):
        raise DataError(
            f"stopping_condition={shown(condition)} is unknown. Use MixStoppingCondition.STOP_ON_SHORTEST or "
            "STOP_ON_LONGEST_DROP."
        )
    return value
