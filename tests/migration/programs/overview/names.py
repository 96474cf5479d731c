"""Constants and types by name."""

from ray.train import TRAIN_DATASET_KEY, BackendConfig, SyncConfig, TrainContext, ValidationFn
from ray.train.torch import TorchConfig

assert TRAIN_DATASET_KEY == "train"
assert issubclass(TorchConfig, BackendConfig)
assert isinstance(ValidationFn, type)
assert hasattr(TrainContext, "get_world_rank")
assert SyncConfig().sync_artifacts is False
