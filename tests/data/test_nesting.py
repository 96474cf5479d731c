"""Values that contain themselves are found before Arrow follows them, however they do it."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest

from powertrain.data.rows.nesting import MOST_LEVELS, check_nesting
from powertrain.errors import DataError


def _list() -> Any:
    made: list[Any] = [1, "x"]
    made += [made, made]
    return made


def _dict() -> Any:
    made: dict[str, Any] = {}
    made.update(a=made, b=made, c=[made])
    return made


def _mapping() -> Any:
    made: UserDict[str, Any] = UserDict()
    made["self"] = made
    return made


def _pair() -> Any:
    one: list[Any] = []
    other = {"one": one}
    one += [other, other]
    return (other,)


def _array() -> Any:
    made = np.empty(2, object)
    made[0] = made
    return made


def _deep() -> Any:
    made: Any = 1
    for _ in range(MOST_LEVELS + 1):
        made = [made]
    return made


@pytest.mark.parametrize("make", [_list, _dict, _mapping, _pair, _array, _deep])
def test_a_value_without_an_end_is_refused(make: Any) -> None:
    with pytest.raises(DataError, match="A value of column 'x' contains itself"):
        check_nesting([None, 1, make()], "column 'x'")


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1, 2.0, None, "x"],
        [[1, 2], [3.5], [], ["x"], [True, 10**400]],
        [{"a": [1, {"b": (1, 2)}]}] * 3,
        [np.zeros((2, 3)), np.array([{"a": 1}], object)],
        [[[[[[[[1]]]]]]]],
        iter([1, [2]]),
        [[shared := [1, "x"], shared, [shared, [shared, [shared]]]]],
    ],
)
def test_values_with_an_end_are_taken(values: Any) -> None:
    check_nesting(values, "column 'x'")
