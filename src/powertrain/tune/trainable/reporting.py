"""Adapter of a user function for a trial: a returned dict is the last report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast


class ReportingFunction:
    """Calls a function with the configuration of a trial, and reports the values that it returns or yields.

    Args:
        function: A function of the configuration. A dict that it returns, and each dict that it yields, is a report.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        # The function's name in messages, and whether its module is pickled with it.
        owner = getattr(function, "func", function)
        self.__name__ = getattr(owner, "__name__", type(owner).__name__)
        self.__qualname__ = getattr(owner, "__qualname__", self.__name__)
        self.__module__ = getattr(owner, "__module__", "__main__")

    def __call__(self, config: dict[str, Any]) -> Any:
        """Run the function in the process of the trial."""
        from powertrain.worker import context

        returned: Any = self._function(config)
        if inspect.isgenerator(returned):
            for metrics in cast("Iterator[dict[str, Any]]", returned):
                context.report(metrics)
            return None
        if isinstance(returned, Mapping) and returned and all(isinstance(key, str) for key in returned):
            context.report(dict(returned))
        return returned
