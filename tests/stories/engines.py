"""On which engines a story plays: a mark for each choice. What it says once holds on every one of them.

"local" is this machine's warm server, "inline" this very process, "torchrun" a driver of torchrun's, and "ray" the
session's cluster of several raylets: in this process through its own connection, in a driver of its own by RAY_ADDRESS.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def on(*engines: str, smoke: Collection[str] = ()) -> pytest.MarkDecorator:
    """The story plays on each of these, and on those of ``smoke`` also in the fast tests."""
    cases = [pytest.param(name, marks=[pytest.mark.smoke] if name in smoke else []) for name in engines]
    return pytest.mark.parametrize("engine", cases, indirect=True)


def on_cases(arguments: tuple[str, ...], cases: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """The story plays once for each case; "engine" is among the arguments."""
    # Said here because not all arguments are fixtures: the engine is the module's, like its connection to a cluster.
    return pytest.mark.parametrize(arguments, cases, indirect=["engine"], scope="module")


#: Where workers are processes of their own that the engine starts.
ON_BOTH = on("local", "ray")
#: Also where the only rank lives in the driver.
ON_ALL = on("local", "inline", "ray")
#: What the cluster would only repeat.
ON_ONE_MACHINE = on("local", "inline")


def ranks(engine: str) -> range:
    """The ranks of a story that says nothing else."""
    return range(1 if engine == "inline" else 2)
