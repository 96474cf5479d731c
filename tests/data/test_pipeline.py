"""Work ahead on threads, given out in order."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from powertrain.data.loading.pipeline import Pipeline


def threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("powertrain-data")}


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_results_come_in_the_order_of_their_tasks(workers: int) -> None:
    pipeline = Pipeline(iter(range(200)), lambda n: n * n, threads=workers, depth=8)
    assert list(pipeline) == [n * n for n in range(200)]
    assert list(pipeline) == []


def test_no_more_is_begun_than_was_allowed() -> None:
    begun = []
    allowed = threading.Semaphore(0)

    def tasks() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            allowed.release()
            yield number

    pipeline = Pipeline(tasks(), lambda n: n, threads=2, depth=3)
    for _ in range(3):
        assert allowed.acquire(timeout=10)
    assert not allowed.acquire(timeout=0.2)
    assert begun == [0, 1, 2]
    assert next(pipeline) == 0
    assert allowed.acquire(timeout=10)
    pipeline.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_comes_where_its_result_would_have(workers: int) -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    pipeline = Pipeline(iter(range(10)), work, threads=workers, depth=4)
    assert [next(pipeline) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(pipeline)
    pipeline.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_in_making_tasks_comes_after_what_was_made(workers: int) -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    pipeline = Pipeline(tasks(), lambda n: n, threads=workers, depth=4)
    assert next(pipeline) == 1
    with pytest.raises(OSError, match="no more"):
        next(pipeline)
    pipeline.close()


def test_a_dropped_pipeline_ends_its_threads() -> None:
    before = threads()
    pipeline = Pipeline(iter(range(100)), lambda n: n, threads=2, depth=2)
    assert next(pipeline) == 0
    mine = threads() - before
    assert mine
    del pipeline
    gc.collect()
    for thread in mine:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_a_closed_pipeline_gives_nothing_and_has_no_threads() -> None:
    pipeline = Pipeline(iter(range(100)), lambda n: n, threads=2, depth=2)
    next(pipeline)
    pipeline.close()
    assert list(pipeline) == []
    assert not any(thread.is_alive() for thread in pipeline._threads)
