"""The Ray engine's options for a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from powertrain.engine.ray.streams import RankStream


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The engine's options for a run."""

    run: str
    #: The run's directories, the same on every node; the first of them is the driver's runtime directory.
    runtime_dir: str
    directories: Sequence[str] = ()
    #: Directories whose modules workers may import, by their names on nodes: ``node.LAUNCH``, ``node.SCRIPT``.
    modules: Mapping[str, str] = field(default_factory=dict)
    #: Where the driver finds modules.
    import_path: Sequence[str] = ()
    #: Directories of the driver that every node needs a copy of.
    copied: Sequence[str] = ()
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    trainer_resources: Mapping[str, float] = field(default_factory=dict)
    #: Modules that the processes import which workers are forked from.
    preload: Sequence[str] = ()
    #: Datasets of Ray's that ranks are fed from.
    streams: Sequence[RankStream] = ()
