"""Prepared loaders in loops of Hugging Face Accelerate.

``accelerator.prepare`` leaves a prepared loader as it is (:attr:`PreparedDataLoader._is_accelerate_prepared`): it would
divide the rows a second time, and read one batch ahead of the loop, which a checkpoint would count as trained on. The
end of an epoch, for which Accelerate reads ahead, is known here without that.
"""

from __future__ import annotations

import sys
from typing import Any


class _Unfollowed:
    """An iteration in a process without Accelerate."""

    end_of_dataloader = False

    def end(self) -> None:
        pass


def follow_iteration() -> Any:
    """Begin an iteration and announce it to Accelerate, where the process uses it.

    Returns:
        An object whose ``end_of_dataloader`` is to be set when the last batch is handed out, and whose ``end()`` is to
        be called when the iteration is over.
    """
    loaders: Any = sys.modules.get("accelerate.data_loader")
    state: Any = sys.modules.get("accelerate.state")
    if loaders is None or state is None or not state.GradientState._shared_state:
        return _Unfollowed()

    class Iteration(loaders.DataLoaderStateMixin):  # type: ignore[misc]
        """The attribute that Accelerate reads for the end of accumulated gradients."""

        gradient_state = state.GradientState()

    iteration = Iteration()
    iteration.begin()
    return iteration
