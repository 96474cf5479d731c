"""``ray.put`` keeps a value to pass to tasks, and ``ray.wait`` gives what is ready first."""

import ray


@ray.remote
def total(numbers):
    return sum(numbers)


kept = ray.put([1, 2, 3])
assert ray.get(kept) == [1, 2, 3]
ready, waiting = ray.wait([total.remote(kept), total.remote([10])], num_returns=2, timeout=60)
assert not waiting
assert sorted(ray.get(ready)) == [6, 10]
