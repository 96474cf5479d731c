"""Tasks beside training: ``@ray.remote`` functions, with options, several at once, and one that fails."""

import ray


@ray.remote
def square(number):
    return number * number


@ray.remote(num_cpus=1, max_retries=0)
def fail():
    raise ValueError("on purpose")


assert ray.get(square.remote(7)) == 49
assert ray.get([square.remote(number) for number in range(3)]) == [0, 1, 4]
assert ray.get(square.options(num_cpus=1, max_retries=2, scheduling_strategy="SPREAD").remote(3)) == 9
try:
    ray.get(fail.remote())
except ValueError as error:
    assert "on purpose" in str(error)
else:
    raise AssertionError("a task that raises did not raise in get()")
