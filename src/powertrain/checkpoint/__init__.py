"""Checkpoints as values, their commit protocol, and their retention. Importing this does not import torch."""

from __future__ import annotations

from powertrain.checkpoint.checkpoint import Checkpoint, ReportedCheckpoint, ReportedCheckpointStatus

__all__ = ["Checkpoint", "ReportedCheckpoint", "ReportedCheckpointStatus"]
