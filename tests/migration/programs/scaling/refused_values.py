"""Numbers of workers that make no sense are refused with a ValueError before anything starts."""

from ray.train import CheckpointConfig, LoggingConfig, ScalingConfig


def is_refused(make):
    try:
        make()
    except ValueError:
        return True
    return False


assert is_refused(lambda: ScalingConfig(num_workers=-1))
assert is_refused(lambda: ScalingConfig(num_workers=(4, 2)))
assert is_refused(lambda: ScalingConfig(num_workers=(1, 2, 3)))
assert is_refused(lambda: ScalingConfig(num_workers="two"))
assert is_refused(lambda: ScalingConfig(use_gpu=False, resources_per_worker={"GPU": 1}))
assert is_refused(lambda: CheckpointConfig(num_to_keep=0))
assert is_refused(lambda: CheckpointConfig(checkpoint_score_order="best"))
assert is_refused(lambda: LoggingConfig(log_level="LOUD"))
