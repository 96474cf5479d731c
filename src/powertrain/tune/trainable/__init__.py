"""Trainables: functions and classes that a sweep runs, with their parameters and resources."""

from powertrain.tune.trainable.base import Trainable, TrainingResult
from powertrain.tune.trainable.functions import TrainableFunction, as_function, is_trainable_class
from powertrain.tune.trainable.resources import PlacementGroupFactory
from powertrain.tune.trainable.wrappers import request_of, resources_of, with_parameters, with_resources

__all__ = [
    "Trainable",
    "TrainableFunction",
    "TrainingResult",
    "PlacementGroupFactory",
    "as_function",
    "is_trainable_class",
    "request_of",
    "resources_of",
    "with_parameters",
    "with_resources",
]
