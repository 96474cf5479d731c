"""A rank's looks become a table: in order, each once, and what is not known is said to be not known."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.diagnosis.looks import looks

from powertrain.diagnosis.tables.samples import SAMPLE, by_host, samples_of
from powertrain.trace.machine import samples as records


def test_a_packed_sample_is_a_row_of_the_table() -> None:
    sample = records.Sample(time=12.5, step=3, throttle=records.POWER, cpu=1.5, rss=400.0, gpu_power=70.0)
    table = samples_of({4: np.frombuffer(records.pack(sample), SAMPLE)}, {4: "node-b"})[4]
    assert (table.rank, table.host, len(table)) == (4, "node-b", 1)
    assert table.column("time") == [12.5]
    assert table.flags("throttle") == [records.POWER]
    assert table.known("gpu_power") == [70.0]


@given(st.lists(st.integers(0, 30)), st.randoms())
def test_looks_come_out_in_order_and_once_whatever_the_order_they_came_in(
    times: list[int], random: Random
) -> None:
    random.shuffle(times)
    table = np.zeros(len(times), SAMPLE)
    table["time"] = times
    assert samples_of({0: table})[0].column("time").tolist() == sorted(set(times))


def test_a_look_without_a_time_is_left_out() -> None:
    table = np.zeros(3, SAMPLE)
    table["time"] = [1.0, np.nan, 2.0]
    assert len(samples_of({0: table})[0]) == 2


def test_zero_and_no_number_are_not_known() -> None:
    table = looks(count=4, rss=[5.0, 0.0, np.nan, np.inf])
    assert np.isnan(table.known("rss")).tolist() == [False, True, True, True]


def test_looks_before_the_first_step_are_not_of_the_training_unless_there_are_no_others() -> None:
    assert len(looks(count=5, step=[0, 0, 1, 2, 3]).while_training()) == 3
    assert len(looks(count=5, step=0).while_training()) == 5


def test_ranks_are_put_together_by_host() -> None:
    tables = {rank: looks(rank, 1, host) for rank, host in ((0, "a"), (1, "b"), (2, "a"))}
    assert {host: [table.rank for table in of] for host, of in by_host(tables).items()} == {
        "a": [0, 2],
        "b": [1],
    }
