"""Messages of the driver to its terminal."""

from __future__ import annotations

import time
from typing import Any


def warn(terminal: Any, message: str) -> None:
    """Show a warning on the terminal."""
    from powertrain.run.events import Warned

    terminal.event(Warned(time=time.time(), message=message))
