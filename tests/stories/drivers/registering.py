"""A training function that registers its state only when the story has come so far."""

from __future__ import annotations

import time
from typing import Any

import story

import powertrain


def registers_when_told(config: dict[str, Any]) -> None:
    """Waits for "asked-ATTEMPT" before it registers its state, and leaves checkpoints to the run; ends at "enough"."""
    context = powertrain.get_context()
    attempt = context.get_attempt()
    story.tell(f"begun-{attempt}")
    if attempt < config["waits"]:
        story.await_told(f"asked-{attempt}")
    clock = {"step": 0}
    powertrain.register_state(clock=clock)
    clock.update((powertrain.load_state() or {}).get("clock", {}))
    while not story.told("enough"):
        time.sleep(0.02)
        clock["step"] += 1
        powertrain.report({"step": clock["step"]})
