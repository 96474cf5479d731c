"""Fewer rows, several datasets, other blocks: plans cut by the numbers of their rows."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from powertrain.data.arguments import flag, number, optional_whole, seed_number, shown, values_of, whole
from powertrain.data.consuming import PlanReader
from powertrain.data.plan import cutting
from powertrain.data.plan.changing import sample, shuffle_like
from powertrain.data.plan.order import permutation
from powertrain.data.plan.plan import Plan
from powertrain.data.plan.prepared import seed_of_data
from powertrain.errors import DataError

#: Limits of the datasets made by a split and the blocks made by a repartition: each costs memory.
MOST_PIECES = 100_000
MOST_BLOCKS = 1_000_000


def limit_rows(reader: PlanReader, limit: int) -> Plan:
    """Return the plan of the first ``limit`` rows; of a shuffled plan as many, drawn evenly."""
    plan, limit = reader.plan, min(whole("limit", limit, 0), sys.maxsize)
    inspected = plan.inspected()
    if not inspected.is_exact or plan.mixture is not None:
        return shuffle_like(reader.materialize(limit), plan)
    if limit >= inspected.rows:
        return plan
    if plan.shuffled:
        return sample(_exact(reader, plan).inspected(), limit)[0]
    return dataclasses.replace(plan, blocks=cutting.between(inspected.blocks, 0, limit))


def random_sample(reader: PlanReader, fraction: float, seed: int | None) -> Plan:
    """Return the plan of a share of the rows, drawn evenly from all blocks."""
    what = "must be a number from 0 to 1."
    share = number("fraction", fraction, what)
    if not 0 <= share <= 1:
        raise DataError(f"fraction={shown(fraction)} {what}")
    counted = _exact(reader, reader.plan)
    inspected = dataclasses.replace(counted, seed=seed).inspected()
    chosen = sample(inspected, int(cutting.decimal(share) * inspected.rows))[0]
    return dataclasses.replace(chosen, seed=counted.seed)


def randomize_blocks(reader: PlanReader, seed: int | None) -> Plan:
    """Return the plan with its blocks in another order."""
    plan = _exact(reader, reader.plan)
    inspected = plan.inspected()
    chosen = seed_of_data(inspected) if seed is None else seed
    order = permutation(len(inspected.blocks), chosen, "block order")
    return dataclasses.replace(plan, blocks=tuple(inspected.blocks[place] for place in order.tolist()))


def split(reader: PlanReader, n: int, equal: bool) -> list[Plan]:
    """Return ``n`` plans of consecutive rows."""
    n, equal = whole("n", n, 1, MOST_PIECES), flag("equal", equal)
    counted = _countable(reader)
    rows = counted.inspected().rows
    if equal:
        rows -= rows % n
    return _pieces(reader.plan, counted, [*cutting.even_cuts(rows, n), rows])[:n]


def split_at_indices(reader: PlanReader, indices: Sequence[int]) -> list[Plan]:
    """Return plans of the rows before, between and after these row numbers."""
    what = "Give row numbers of at least 0, and at least one."
    cuts = [whole("indices", index, 0) for index in values_of("indices", indices, what)]
    if not cuts or len(cuts) > MOST_PIECES:
        raise DataError(f"indices has {len(cuts)} row numbers. Give from 1 to {MOST_PIECES} of them.")
    if sorted(cuts) != cuts:
        raise DataError(f"indices={shown(cuts)} must not fall. Sort them.")
    return _pieces(reader.plan, _countable(reader), cuts)


def split_proportionately(reader: PlanReader, proportions: Sequence[float]) -> list[Plan]:
    """Return plans of these proportions of the rows, and one more of the rest."""
    what = "must be numbers that are each more than 0 and together less than 1; the rest is the last dataset."
    given = values_of("proportions", proportions, f"They {what}")
    shares = [number("a value of proportions", each, what) for each in given]
    if not 0 < len(shares) <= MOST_PIECES or min(shares) <= 0 or sum(map(cutting.decimal, shares)) >= 1:
        raise DataError(f"proportions={shown(given)} {what}")
    counted = _countable(reader)
    return _pieces(reader.plan, counted, cutting.proportional_cuts(counted.inspected().rows, shares))


def train_test_split(
    reader: PlanReader, test_size: int | float, shuffle: bool, seed: int | None
) -> tuple[Plan, Plan]:
    """Return a plan to train on and one of ``test_size`` rows to test with."""
    test_size = _checked_test_size(test_size)
    shuffle, seed = flag("shuffle", shuffle), seed_number("seed", seed)
    counted = _exact(reader, reader.plan)
    if shuffle:
        counted = dataclasses.replace(counted, shuffled=True, seed=seed)
    inspected = counted.inspected()
    test = cutting.rows_of_test(inspected.rows, test_size)
    if not 0 < test < inspected.rows:
        raise DataError(
            f"test_size={test_size!r} leaves nothing to train on or nothing to test with: there are "
            f"{inspected.rows} rows. Choose a size between them."
        )
    if counted.shuffled:
        return sample(inspected, inspected.rows - test)
    train, rest = _pieces(reader.plan, counted, [inspected.rows - test])
    return train, rest


def repartition(reader: PlanReader, num_blocks: int | None, target_rows: int | None, shuffle: bool) -> Plan:
    """Return the same rows in ``num_blocks`` blocks, or in blocks of ``target_rows`` rows."""
    if (num_blocks is None) == (target_rows is None):
        raise DataError("repartition() takes one of num_blocks and target_num_rows_per_block. Give one.")
    # There can be no more blocks than rows.
    blocks = optional_whole("num_blocks", num_blocks, 1)
    size = optional_whole("target_num_rows_per_block", target_rows, 1)
    plan = reader.plan
    if flag("shuffle", shuffle):
        plan = dataclasses.replace(plan, shuffled=True, seed=None)
    counted = _exact(reader, plan)
    inspected = counted.inspected()
    blocks = min(-(-inspected.rows // size) if size is not None else blocks or 1, max(inspected.rows, 1))
    if blocks > MOST_BLOCKS:
        raise DataError(f"repartition() would make {blocks} blocks. Ask for at most {MOST_BLOCKS}.")
    if size is None:
        cuts = cutting.even_cuts(inspected.rows, blocks)
    else:
        cuts = list(range(size, inspected.rows, size))
    found = cutting.repartitioned(inspected.blocks, cuts)
    if found is not None:
        return dataclasses.replace(counted, blocks=found)
    in_order = PlanReader(dataclasses.replace(counted, shuffled=False))
    return shuffle_like(in_order.materialize(sizes=list(cutting.sizes(inspected.rows, cuts))), counted)


def _countable(reader: PlanReader) -> Plan:
    """Return the same rows in a fixed order and exactly counted, so that row numbers mean something."""
    inspected = reader.plan.inspected()
    if reader.plan.is_plain and inspected.is_exact and not inspected.has_row_numbers:
        return reader.plan
    return reader.materialize()


def _exact(reader: PlanReader, plan: Plan) -> Plan:
    """Return ``plan`` exactly counted, its rows in the order of its blocks: materialized where functions change the
    number of rows, where columns hold their numbers, or where it is a mixture."""
    inspected = plan.inspected()
    if inspected.is_exact and not inspected.has_row_numbers and plan.mixture is None:
        return plan
    source = reader if plan is reader.plan else PlanReader(plan)
    sizes = None
    if inspected.is_exact and plan.mixture is None:
        sizes = [block.rows for block in inspected.blocks if block.rows]
    return shuffle_like(source.materialize(sizes=sizes), plan)


def _pieces(plan: Plan, counted: Plan, cuts: Sequence[int]) -> list[Plan]:
    """Cut ``counted``, which has the rows of ``plan``; each piece is shuffled for each epoch if ``plan`` is."""
    found = cutting.pieces(counted.inspected().blocks, cuts)
    return [shuffle_like(dataclasses.replace(counted, blocks=blocks), plan) for blocks in found]


def _checked_test_size(test_size: Any) -> int | float:
    size = number("test_size", test_size, "must be a number of rows, or a fraction between 0 and 1.")
    if isinstance(size, float) and not 0 < size < 1:
        raise DataError(
            f"test_size={shown(test_size)} is a fraction and must lie between 0 and 1; 1 and more is an int."
        )
    return size
