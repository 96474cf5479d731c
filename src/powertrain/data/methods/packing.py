"""Documents packed into windows of one length."""

from __future__ import annotations

from typing import TypeVar

from powertrain.data.arguments import column_names, flag, optional_whole, whole
from powertrain.data.consuming import PlanReader
from powertrain.data.methods.combining import CombiningMethods
from powertrain.data.plan.changing import picked, shuffle_like
from powertrain.data.plan.plan import Part, Plan

_D = TypeVar("_D", bound="PackingMethods")
#: Most tokens of a window: a row of them must fit in memory many times.
_LONGEST_WINDOW = 2**27


class PackingMethods(CombiningMethods):
    """The method of :class:`powertrain.data.Dataset` that packs documents."""

    __slots__ = ()

    def pack(
        self: _D,
        length: int,
        *,
        column: str | None = None,
        separator: int | None = None,
        drop_last: bool = False,
        padding: int = 0,
        documents: bool = False,
    ) -> _D:
        """Pack documents of different lengths into windows of ``length`` tokens, for language models.

        The tokens of all documents are one stream, in the order of the data, and every window is the next ``length`` of
        them: a row, as any other, of one array in the column of the tokens. So every token comes once per epoch at any
        number of ranks, and a run resumes at the very token. Documents are read through once to count their tokens.
        ``random_shuffle()``, before or after it, shuffles windows. Rows of a dataset with functions, such as a
        tokenizer, are computed and kept first as ``materialize()`` does; write those of large data once, with
        ``write_parquet()``.

        Args:
            length: The number of tokens of a window.
            column: The column with a list of tokens in each row; by default the only column with lists. Other columns
                are left out. A row whose list is null is not a document.
            separator: A token that is put behind each document.
            drop_last: Leave out the last tokens where they do not fill a window; by default it is filled up.
            padding: The token that the last window is filled up with.
            documents: Add the columns "document_ids", the number of each token's document in the data (-1 for padding),
                and "positions", the token's place in its document, for attention within documents.

        Returns:
            The new dataset.

        Raises:
            DataError: An argument has a wrong value, or the column has no lists of numbers.

        Example::

            powertrain.data.read_parquet("data/tokens").pack(2048, separator=50256).random_shuffle(seed=1)
        """
        from powertrain.data.sources.packing.packed import PackedSource, Packing

        packing = Packing(
            None if column is None else column_names("pack", column)[0],
            whole("length", length, 1, _LONGEST_WINDOW),
            optional_whole("separator", separator, -(2**63), 2**63 - 1),
            whole("padding", padding, -(2**63), 2**63 - 1),
            flag("drop_last", drop_last),
            flag("documents", documents),
        )
        chosen = picked(_without_functions(self.plan))
        order = None if chosen.blocks is None else [(block.part, block.index) for block in chosen.blocks]
        source = PackedSource([part.source for part in chosen.parts], order, packing)
        return self._of_plan(shuffle_like(Plan((Part(source),)), self.plan))


def _without_functions(plan: Plan) -> Plan:
    """Return a plan of the same rows in the order of the data: computed and kept where functions make them."""
    if plan.mixture is None and not any(part.operations for part in plan.parts):
        return plan
    return PlanReader(plan if plan.mixture is not None else Plan(plan.parts, plan.blocks)).materialize()
