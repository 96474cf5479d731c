"""What can be read from a ScalingConfig."""

from ray.train import ScalingConfig

fixed = ScalingConfig(num_workers=3, resources_per_worker={"CPU": 2})
assert (fixed.min_workers, fixed.max_workers) == (3, 3)
assert not fixed.elasticity_enabled
assert fixed.total_resources["CPU"] == 6
assert fixed.num_cpus_per_worker == 2
assert fixed.num_gpus_per_worker == 0

elastic = ScalingConfig(num_workers=(2, 4), use_gpu=True)
assert (elastic.min_workers, elastic.max_workers) == (2, 4)
assert elastic.elasticity_enabled
assert elastic.num_gpus_per_worker == 1
