"""Loggers of modules, whose messages are made safe to show."""

from __future__ import annotations

import logging

from powertrain.text.redaction import FitToShow

_FILTER = FitToShow()


def module_logger(name: str) -> logging.Logger:
    """Return the logger of a module.

    ``logging.getLogger(name)`` alone is not enough: a filter of the logger "powertrain" does not apply to messages of
    the loggers below it, so each has the filter that removes secrets and control characters.

    Args:
        name: The module's ``__name__``.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_FILTER)
    return logger
