"""Which loops skip, after a restart, batches that were skipped for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.data.loading.own_skips import ResumedEpoch, SkipWatch
from powertrain.errors import DataError

TOTALS = st.integers(2, 40)


class Loop:
    """Draws batches of one epoch after another, and makes a step after each ``accumulate`` that it trains on."""

    def __init__(self, watch: SkipWatch, total: int, accumulate: int = 1) -> None:
        self.watch, self.total, self.accumulate = watch, total, accumulate
        self.steps = self.trained = 0

    def epoch(self, first: int = 0, skips: int = 0, until: int | None = None) -> None:
        for number in range(first, self.total + 1):
            self.watch.request(self.steps)
            if number == until or number == self.total:  # the latter finds that there is none
                return
            self.watch.draw()
            if number - first < skips:
                continue
            self.trained += 1
            if self.trained % self.accumulate == 0:
                self.steps += 1


def known_after(total: int, until: int, accumulate: int = 1) -> int | None:
    """What the checkpoint of an attempt says that was ended when it requested batch ``until``."""
    watch = SkipWatch("train")
    Loop(watch, total, accumulate).epoch(until=until)
    return watch.longest


@given(st.data(), TOTALS, st.integers(1, 5))
def test_a_loop_that_goes_on_training_is_never_stopped(
    data: st.DataObject, total: int, accumulate: int
) -> None:
    skipped = data.draw(st.integers(1, total // accumulate)) * accumulate if total >= accumulate else total
    watch = SkipWatch("train", known_after(total, skipped, accumulate))
    watch.resume(ResumedEpoch(0, skipped, total))
    loop = Loop(watch, total, accumulate)
    loop.epoch(first=skipped)
    loop.epoch()


@given(st.data(), TOTALS)
def test_a_loop_that_skips_as_many_again_is_stopped_before_it_trains(data: st.DataObject, total: int) -> None:
    skipped = data.draw(st.integers(1, total - 1))
    watch = SkipWatch("train", known_after(total, skipped))
    watch.resume(ResumedEpoch(0, skipped, total))
    loop = Loop(watch, total)
    with pytest.raises(DataError, match=rf"resumed at batch {skipped} of {total}.*resume='epoch'"):
        loop.epoch(first=skipped, skips=skipped)
    assert loop.trained == 0


@given(st.data(), TOTALS, st.integers(0, 3))
def test_a_dataset_that_is_read_without_steps_is_read_on(
    data: st.DataObject, total: int, whole_epochs: int
) -> None:
    """Steps are made between its epochs at most, as with data of an evaluation."""
    skipped = data.draw(st.integers(1, total - 1))
    before = SkipWatch("eval")
    for number in range(whole_epochs):
        draw_all(before, total, steps=10 * number)
    draw_all(before, skipped, steps=10 * whole_epochs)
    watch = SkipWatch("eval", before.longest)
    watch.resume(ResumedEpoch(0, skipped, total))
    draw_all(watch, total - skipped, steps=0)
    draw_all(watch, total, steps=10)


def draw_all(watch: SkipWatch, batches: int, steps: int) -> None:
    for _ in range(batches):
        watch.request(steps)
        watch.draw()
    watch.request(steps)


def test_of_a_checkpoint_that_says_nothing_of_steps_nothing_is_concluded() -> None:
    watch = SkipWatch("train")
    watch.resume(ResumedEpoch(0, 1, 10))
    for _ in range(9):
        watch.request(0)
        watch.draw()


def test_it_is_said_where_an_epoch_goes_on() -> None:
    assert ResumedEpoch(0, 6, 10).described("train") == (
        "data: resuming epoch 0 of 'train' at batch 6 of 10; batches already consumed are skipped for you"
    )
