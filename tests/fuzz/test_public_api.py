"""The public API answers hostile values with a value or one clear error: a small budget of the fuzzer, and its rule."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from tests.fuzz import public_api
from tests.fuzz.public_api_values import HostileError, verdict

from powertrain.errors import ConfigError

SEED = int(os.environ.get("POWERTRAIN_FUZZ_SEED", "1"))


@pytest.mark.parametrize(("place", "budget"), [("driver", 100), ("loop", 100), ("ranks", 25)])
def test_no_call_hangs_crashes_or_raises_a_raw_error(place: str, budget: int) -> None:
    outcomes = list(public_api.fuzz(place, SEED, range(budget)))
    assert [str(outcome) for outcome in outcomes if isinstance(outcome, public_api.Finding)] == []
    counts = Counter(outcomes)
    assert counts["returned"] >= budget / 20
    assert counts["refused"] >= budget / 20


def test_a_case_can_be_made_again_from_its_number(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [public_api.make_case("loop", 5, number)[0] for number in range(20)]

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # cases make directories where they are
        first = names()
        assert names() == first
    assert len(set(first)) > 10


# --------------------------------------------------------------------------- the rule


def _outcome(call: object) -> str:
    try:
        call()  # type: ignore[operator]
    except BaseException as error:
        return verdict(error)
    return verdict(None)


def test_the_rule_distinguishes_clear_errors_from_raw_ones() -> None:
    from powertrain import RunConfig, report

    def raises(error: BaseException) -> None:
        raise error

    assert _outcome(lambda: None) == "returned"
    assert _outcome(lambda: raises(ConfigError("wrong"))) == "refused"
    assert _outcome(lambda: raises(ConfigError(""))) == "unreadable ConfigError"
    assert _outcome(lambda: raises(ConfigError("x" * 100_000))) == "unreadable ConfigError"
    assert _outcome(lambda: raises(HostileError())).startswith("raw HostileError at test_public_api.py")
    assert _outcome(lambda: report({}, no_such_argument=1)) == "refused", "Python's own, of the signature"  # type: ignore[call-arg]
    assert _outcome(lambda: RunConfig(no_such_field=1)) == "refused"  # type: ignore[call-arg]
    assert verdict(TimeoutError("late"), (TimeoutError,)) == "refused"
