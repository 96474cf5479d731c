"""Trackers: the reports of a run sent to TensorBoard, MLflow, W&B, a CSV file, or a tracker of your own.

See docs/trackers.md. Importing this imports none of their packages.
"""

from powertrain.trackers.base import RunEnding, TrackedPoint, TrackedRun, Tracker, TrackerSession
from powertrain.trackers.csv import CSV
from powertrain.trackers.mlflow import MLflow
from powertrain.trackers.tensorboard import TensorBoard
from powertrain.trackers.wandb import WandB

__all__ = [
    "CSV",
    "MLflow",
    "RunEnding",
    "TensorBoard",
    "TrackedPoint",
    "TrackedRun",
    "Tracker",
    "TrackerSession",
    "WandB",
]
