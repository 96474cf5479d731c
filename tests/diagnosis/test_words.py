"""Amounts read well at every size."""

from __future__ import annotations

import pytest

from powertrain.diagnosis import words


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        (0.00042, "0.42 ms"),
        (0.031, "31.0 ms"),
        (0.9996, "1.00 s"),
        (1.2, "1.20 s"),
        (75, "75 s"),
        (4e3, "4,000 s"),
    ],
)
def test_seconds(amount: float, said: str) -> None:
    assert words.seconds(amount) == said


def test_a_duration_that_is_no_number_is_not_known() -> None:
    assert words.seconds(float("nan")) == "an unknown time"


@pytest.mark.parametrize(
    ("amount", "said"),
    [(0.25, "0.25 MiB"), (1.024, "1.02 MiB"), (512, "512 MiB"), (3482, "3.4 GiB"), (1024**2, "1.0 TiB")],
)
def test_memory(amount: float, said: str) -> None:
    assert words.mebibytes(amount) == said


@pytest.mark.parametrize(("part", "said"), [(0, "0 %"), (0.004, "0.4 %"), (0.07, "7 %"), (1.2, "120 %")])
def test_shares(part: float, said: str) -> None:
    assert words.share(part) == said


@pytest.mark.parametrize(
    ("amount", "said"),
    [(40, "40 s"), (720, "12 minutes"), (12600, "3.5 hours"), (777600, "9.0 days"), (864e4, "100 days")],
)
def test_times_to_come(amount: float, said: str) -> None:
    assert words.long_time(amount) == said


def test_hosts_are_named_once_and_only_a_few() -> None:
    assert words.hosts(["", ""]) == ""
    assert words.hosts(["b", "a", "b"]) == " on a and b"
    assert words.hosts("abcdef") == " on a, b, c and 3 more"


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (12, "12 FLOP/s"),
        (4.5e9, "4.5 GFLOP/s"),
        (9.999e11, "1 TFLOP/s"),
        (4.02e14, "402 TFLOP/s"),
        (3e21, "3000 EFLOP/s"),
    ],
)
def test_operations_per_second_have_three_digits(rate: float, text: str) -> None:
    assert words.flops(rate) == text
