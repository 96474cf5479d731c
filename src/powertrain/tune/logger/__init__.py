"""Callbacks that write the reports of each trial to files: CSV, JSON lines and TensorBoard."""

from powertrain.tune.logger.base import LoggerCallback, pretty_print
from powertrain.tune.logger.csv_logger import CSVLoggerCallback
from powertrain.tune.logger.json_logger import JsonLoggerCallback
from powertrain.tune.logger.tensorboard import TBXLoggerCallback, has_tensorboard

__all__ = [
    "LoggerCallback",
    "CSVLoggerCallback",
    "JsonLoggerCallback",
    "TBXLoggerCallback",
    "has_tensorboard",
    "pretty_print",
]
