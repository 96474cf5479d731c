"""Small collectives over the run's own wire: they need no process group, and work on any backend."""

from powertrain.worker.context import barrier, broadcast_from_rank_zero

__all__ = ["barrier", "broadcast_from_rank_zero"]
