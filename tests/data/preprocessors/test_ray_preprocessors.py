"""Preprocessors change batches as those of Ray Data do that have the same statistics. Needs no cluster."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from powertrain import data
from powertrain.data import preprocessors as ours

theirs = pytest.importorskip("ray.data.preprocessors")

FRAME = pd.DataFrame(
    {
        "x": [1.0, -2.0, 3.5, 0.0, 9.0],
        "n": [3, 1, 4, 1, 5],
        "s": ["b", "a", "b", "c", "a"],
        "t": ["a b", "b", "a a c", "", "c b a"],
        "l": [["p"], ["q", "p"], [], ["q", "q"], ["r"]],
    }
)
CASES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "StandardScaler": ("StandardScaler", (["x", "n"],), {}),
    "MinMaxScaler": ("MinMaxScaler", (["x", "n"],), {"output_columns": ["a", "b"]}),
    "MaxAbsScaler": ("MaxAbsScaler", (["x"],), {}),
    "Normalizer": ("Normalizer", (["x", "n"],), {"norm": "l1"}),
    "PowerTransformer": ("PowerTransformer", (["x"],), {"power": 0.5}),
    "OrdinalEncoder": ("OrdinalEncoder", (["s", "n"],), {}),
    "OrdinalEncoder of lists": ("OrdinalEncoder", (["l"],), {}),
    "OneHotEncoder": ("OneHotEncoder", (["s"],), {"output_columns": ["code"]}),
    "MultiHotEncoder": ("MultiHotEncoder", (["l"],), {}),
    "LabelEncoder": ("LabelEncoder", ("s",), {}),
    "Categorizer": ("Categorizer", (["s"],), {}),
    "SimpleImputer": ("SimpleImputer", (["x"],), {"strategy": "constant", "fill_value": 3.0}),
    "CustomKBinsDiscretizer": ("CustomKBinsDiscretizer", (["x"],), {"bins": [-3, 0, 2, 10]}),
    "UniformKBinsDiscretizer": ("UniformKBinsDiscretizer", (["x", "n"],), {"bins": 3}),
    "Tokenizer": ("Tokenizer", (["t"],), {}),
    "HashingVectorizer": ("HashingVectorizer", (["t"],), {"num_features": 7}),
    "CountVectorizer": ("CountVectorizer", (["t"],), {}),
    "FeatureHasher": ("FeatureHasher", (["x", "n"],), {"num_features": 5, "output_column": "v"}),
    "Concatenator": ("Concatenator", (["x", "n"],), {}),
}


def plain(value: Any) -> Any:
    if isinstance(value, (list, np.ndarray)):
        return [plain(each) for each in value]
    return value.item() if isinstance(value, np.generic) else value


@pytest.mark.parametrize("case", sorted(CASES))
def test_batches_are_those_of_ray(case: str) -> None:
    name, args, options = CASES[case]
    mine = getattr(ours, name)(*args, **options).fit(data.from_pandas(FRAME))
    other = getattr(theirs, name)(*args, **options)
    other.stats_ = mine.stats_
    other._fitted = True
    expected = other.transform_batch(FRAME.copy())
    found = mine.transform_batch(FRAME)
    assert sorted(found.columns) == sorted(expected.columns)
    for column in expected.columns:
        left, right = plain(found[column].tolist()), plain(expected[column].tolist())
        if isinstance(left[0], float):
            np.testing.assert_allclose(left, right, rtol=1e-12)
        else:
            assert left == right, column
