"""An engine for Powertrain that starts each rank as a fresh Python interpreter."""

from __future__ import annotations

from powertrain.engine.registry import EngineProvider, EngineTraits
from powertrain_subprocess.engine import SubprocessEngine

#: The entry point names this value.
PROVIDER = EngineProvider(
    EngineTraits("subprocess"),
    make=lambda run: SubprocessEngine(run.runtime_dir, run.custom_resources),
)
