"""Hugging Face libraries, imported when they are first needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def load(name: str) -> Any:
    """Import a library of Hugging Face.

    Args:
        name: Name of the package, which is also its name for pip.

    Returns:
        The module.

    Raises:
        ImportError: The library, or something that it needs, is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"powertrain.huggingface needs {name}, which cannot be imported ({error}): pip install {name} accelerate"
        ) from error
