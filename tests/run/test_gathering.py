"""Large runs gather more before they send; small ones send at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.run.workers.pacing import BATCHES_A_SECOND, SECONDS_AT_MOST, gathering_seconds


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [(1, 0.0), (512, 0.0), (513, 513 / 512), (1024, 2.0), (2048, 4.0), (2560, 5.0), (10_000, 5.0)],
)
def test_up_to_512_ranks_send_at_once_and_more_send_less_often(ranks: int, seconds: float) -> None:
    assert gathering_seconds(ranks) == seconds


@given(st.integers(1, 100_000))
def test_batches_come_at_an_easy_pace_until_a_report_would_be_kept_back_for_too_long(ranks: int) -> None:
    seconds = gathering_seconds(ranks)
    assert seconds == 0.0 or seconds > 1.0
    assert seconds <= SECONDS_AT_MOST
    if 0.0 < seconds < SECONDS_AT_MOST:
        assert ranks / seconds == pytest.approx(BATCHES_A_SECOND)
