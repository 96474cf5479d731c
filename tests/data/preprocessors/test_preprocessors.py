"""Preprocessors: the numbers of scikit-learn, the same for datasets and batches, and back from text."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn import preprocessing as sk
from sklearn.feature_extraction.text import CountVectorizer as SkCountVectorizer
from sklearn.impute import SimpleImputer as SkImputer

from powertrain import data
from powertrain.data import preprocessors as pre
from powertrain.data.dataset import Dataset
from powertrain.errors import DataError, NotSupportedError

GENERATOR = np.random.default_rng(3)
FRAME = pd.DataFrame(
    {
        "a": GENERATOR.normal(5, 3, 500),
        "b": GENERATOR.integers(-40, 90, 500),
        "c": GENERATOR.exponential(2, 500).astype(np.float32),
        "constant": 7.0,
    }
)
NUMBERS = ["a", "b", "c", "constant"]


def dataset() -> Dataset:
    return data.from_pandas(FRAME).repartition(3)


def vectors(values: Any) -> Any:
    return np.stack([np.asarray(each) for each in values])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (pre.StandardScaler(NUMBERS), sk.StandardScaler()),
        (pre.MinMaxScaler(NUMBERS), sk.MinMaxScaler()),
        (pre.MaxAbsScaler(NUMBERS), sk.MaxAbsScaler()),
        (pre.RobustScaler(NUMBERS), sk.RobustScaler()),
        (
            pre.RobustScaler(NUMBERS, quantile_range=(0.1, 0.8)),
            sk.RobustScaler(quantile_range=(10, 80)),
        ),
    ],
    ids=["standard", "min_max", "max_abs", "robust", "robust_range"],
)
def test_scalers_have_the_numbers_of_scikit_learn(ours: Any, theirs: Any) -> None:
    expected = theirs.fit_transform(FRAME.astype(np.float64))
    found = ours.fit_transform(dataset()).to_pandas()
    np.testing.assert_allclose(found[NUMBERS].to_numpy(np.float64), expected, rtol=2e-6, atol=1e-6)
    batch = ours.transform_batch(FRAME)
    np.testing.assert_allclose(batch[NUMBERS].to_numpy(np.float64), expected, rtol=2e-6, atol=1e-6)
    assert ours.fit_status() is pre.FitStatus.FITTED


def test_scalers_leave_out_nulls_and_keep_float32() -> None:
    frame = pd.DataFrame({"x": [1.0, None, 3.0], "y": np.array([0, 5, 10], np.float32)})
    scaler = pre.StandardScaler(["x", "y"], output_columns=["sx", "sy"])
    found = scaler.fit_transform(data.from_pandas(frame)).to_pandas()
    assert scaler.stats_ == {
        "mean(x)": 2.0,
        "std(x)": 1.0,
        "mean(y)": 5.0,
        "std(y)": pytest.approx(math.sqrt(50 / 3)),
    }
    assert list(found.columns) == ["x", "y", "sx", "sy"]
    assert found["sx"].tolist()[0::2] == [-1.0, 1.0]
    assert math.isnan(found["sx"][1])
    assert found["sy"].dtype == np.float32
    nothing = pa.table({"x": pa.array([None, None], pa.float64())})
    for made in (pre.StandardScaler, pre.MinMaxScaler, pre.MaxAbsScaler, pre.RobustScaler):
        empty = made(["x"]).fit_transform(data.from_arrow(nothing)).to_pandas()
        assert empty["x"].isna().all(), made


@pytest.mark.parametrize("norm", ["l1", "l2", "max"])
def test_norms_are_those_of_scikit_learn(norm: str) -> None:
    frame = FRAME[["a", "b"]].astype(np.float64)
    frame.loc[0] = 0
    found = pre.Normalizer(["a", "b"], norm=norm).transform(data.from_pandas(frame)).to_pandas()
    np.testing.assert_allclose(found[["a", "b"]], sk.Normalizer(norm=norm).transform(frame.to_numpy()))


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("method", ["yeo-johnson", "box-cox"])
def test_powers_are_those_of_scikit_learn(power: float, method: str) -> None:
    values = FRAME["a"].abs() + 0.1 if method == "box-cox" else FRAME["a"]
    theirs = sk.PowerTransformer(method=method, standardize=False).fit(values.to_numpy()[:, None])
    theirs.lambdas_ = np.array([power])
    ours = pre.PowerTransformer(["x"], power=power, method=method)
    found = ours.transform(data.from_pandas(pd.DataFrame({"x": values}))).to_pandas()
    np.testing.assert_allclose(found["x"], theirs.transform(values.to_numpy()[:, None])[:, 0], rtol=1e-9)


WORDS = pd.DataFrame({"color": ["red", "blue", "red", "green"], "size": [3, 1, 2, 1]})


def test_encoders_have_the_numbers_of_scikit_learn() -> None:
    rows = data.from_pandas(WORDS)
    ordinal = pre.OrdinalEncoder(["color", "size"]).fit(rows)
    expected = sk.OrdinalEncoder().fit_transform(WORDS)
    assert ordinal.transform(rows).to_pandas().to_numpy().tolist() == expected.tolist()
    assert ordinal.stats_["unique_values(color)"] == {"blue": 0, "green": 1, "red": 2}
    one_hot = pre.OneHotEncoder(["color"], output_columns=["code"])
    found = one_hot.fit_transform(rows).to_pandas()
    expected = sk.OneHotEncoder(sparse_output=False).fit_transform(WORDS[["color"]])
    assert vectors(found["code"]).tolist() == expected.tolist()
    assert found["color"].tolist() == WORDS["color"].tolist()
    labels = pre.LabelEncoder("color")
    encoded = labels.fit_transform(rows)
    assert [row["color"] for row in encoded.take_all()] == sk.LabelEncoder().fit_transform(
        WORDS["color"]
    ).tolist()
    assert [row["color"] for row in labels.inverse_transform(encoded).take_all()] == WORDS["color"].tolist()


def test_unknown_values_and_the_most_frequent_ones() -> None:
    rows = data.from_pandas(WORDS)
    unknown = pd.DataFrame({"color": ["black", "red"]})
    ordinal = pre.OrdinalEncoder(["color"]).fit(rows).transform_batch(unknown)["color"]
    assert math.isnan(ordinal[0])
    assert ordinal[1] == 2
    one_hot = pre.OneHotEncoder(["color"], max_categories={"color": 1}).fit(rows)
    assert vectors(one_hot.transform_batch(WORDS)["color"]).tolist() == [[1], [0], [1], [0]]
    assert vectors(pre.OneHotEncoder(["color"]).fit(rows).transform_batch(unknown)["color"]).tolist() == [
        [0, 0, 0],
        [0, 0, 1],
    ]


def test_lists_are_encoded_by_their_values_or_as_they_are() -> None:
    lists = data.from_items([{"tags": ["a", "b", "a"]}, {"tags": ["c"]}, {"tags": []}])
    hot = pre.MultiHotEncoder(["tags"]).fit_transform(lists)
    assert vectors(hot.to_pandas()["tags"]).tolist() == [[2, 1, 0], [0, 0, 1], [0, 0, 0]]
    binarized = sk.MultiLabelBinarizer().fit_transform([["a", "b"], ["c"], []])
    assert (vectors(hot.to_pandas()["tags"]) > 0).astype(int).tolist() == binarized.tolist()
    ordinal = pre.OrdinalEncoder(["tags"]).fit_transform(lists)
    assert [list(row["tags"]) for row in ordinal.take_all()] == [[0, 1, 0], [2], []]
    whole = pre.OrdinalEncoder(["tags"], encode_lists=False).fit_transform(lists)
    assert [row["tags"] for row in whole.take_all()] == [1, 2, 0]


def test_categories_are_those_of_the_data_or_given() -> None:
    rows = data.from_pandas(WORDS)
    kind = pd.CategoricalDtype(["green", "red"])
    made = pre.Categorizer(["color", "size"], dtypes={"color": kind}).fit(rows)
    batch = made.transform_batch(WORDS)
    assert batch["color"].dtype == kind
    assert batch["size"].dtype == pd.CategoricalDtype([1, 2, 3])
    assert [row["color"] for row in made.transform(rows).take_all()] == ["red", None, "red", "green"]


@pytest.mark.parametrize("strategy", ["mean", "most_frequent"])
def test_missing_values_are_filled_as_scikit_learn_does(strategy: str) -> None:
    frame = pd.DataFrame({"x": [1.0, 4.0, None, 4.0, 1.0], "y": [2.0, None, None, 8.0, 2.0]})
    found = (
        pre.SimpleImputer(["x", "y"], strategy=strategy).fit_transform(data.from_pandas(frame)).to_pandas()
    )
    np.testing.assert_allclose(found.to_numpy(), SkImputer(strategy=strategy).fit_transform(frame))


def test_missing_text_constants_and_columns() -> None:
    rows = data.from_items([{"s": "a"}, {"s": None}, {"s": "b"}, {"s": "b"}])
    frequent = pre.SimpleImputer(["s"], strategy="most_frequent").fit_transform(rows)
    assert [row["s"] for row in frequent.take_all()] == ["a", "b", "b", "b"]
    constant = pre.SimpleImputer(["s", "t"], strategy="constant", fill_value="?")
    assert constant.transform(rows).take(2)[1] == {"s": "?", "t": "?"}
    categories = pd.DataFrame({"s": pd.Series(["a", None], dtype="category"), "t": ["x", "y"]})
    assert constant.transform_batch(categories)["s"].tolist() == ["a", "?"]
    with pytest.raises(DataError, match=r"needs the constant"):
        pre.SimpleImputer(["s"], strategy="constant")
    empty = data.from_arrow(pa.table({"s": pa.array([None], pa.float64())}))
    with pytest.raises(DataError, match="had no values when it was fitted"):
        pre.SimpleImputer(["s"]).fit_transform(empty).take_all()


def test_intervals_are_those_of_pandas_and_scikit_learn() -> None:
    rows = data.from_pandas(FRAME[["a", "b"]])
    custom = (
        pre.CustomKBinsDiscretizer(["a"], bins=[0, 2, 5, 20], output_columns=["bin"])
        .transform(rows)
        .to_pandas()
    )
    expected = pd.cut(FRAME["a"], [0, 2, 5, 20], labels=False)
    np.testing.assert_array_equal(custom["bin"].astype(float), expected)
    uniform = pre.UniformKBinsDiscretizer(["a", "b"], bins={"a": 4, "b": 6}, right=False).fit_transform(rows)
    theirs = sk.KBinsDiscretizer([4, 6], encode="ordinal", strategy="uniform").fit_transform(
        FRAME[["a", "b"]]
    )
    assert uniform.to_pandas().to_numpy().tolist() == theirs.tolist()
    right = pre.UniformKBinsDiscretizer(["b"], bins=5).fit_transform(rows).to_pandas()["b"]
    assert right.tolist() == pd.cut(FRAME["b"], 5, labels=False).tolist()
    named = pre.CustomKBinsDiscretizer(
        ["a"], bins=[0, 5, 30], dtypes={"a": pd.CategoricalDtype(["low", "high"])}
    )
    assert set(named.transform_batch(FRAME)["a"].dropna()) == {"low", "high"}
    constant = pre.UniformKBinsDiscretizer(["constant"], bins=2).fit(dataset())
    assert constant.transform_batch(FRAME)["constant"].notna().all()


TEXTS = ["the cat sat", "the the dog", "cat"]


def test_tokens_and_counts_of_text() -> None:
    rows = data.from_items([{"text": text} for text in [*TEXTS, None]])
    tokens = pre.Tokenizer(["text"], output_columns=["tokens"]).transform(rows).take_all()
    assert [None if row["tokens"] is None else list(row["tokens"]) for row in tokens] == [
        ["the", "cat", "sat"],
        ["the", "the", "dog"],
        ["cat"],
        None,
    ]
    counter = pre.CountVectorizer(["text"]).fit(rows)
    assert counter.stats_["token_counts(text)"] == Counter({"the": 3, "cat": 2, "sat": 1, "dog": 1})
    found = counter.transform(rows).take_all()
    assert found[3]["text"] is None
    theirs = SkCountVectorizer().fit(TEXTS)
    columns = [theirs.vocabulary_[token] for token in ("the", "cat", "sat", "dog")]
    expected = theirs.transform(TEXTS).toarray()[:, columns]
    assert [list(row["text"]) for row in found[:3]] == expected.tolist()
    few = pre.CountVectorizer(["text"], max_features=1, tokenization_fn=lambda text: text.upper().split())
    assert vectors(few.fit(rows).transform_batch(pd.DataFrame({"text": TEXTS}))["text"]).tolist() == [
        [1],
        [2],
        [0],
    ]


def test_hashes_are_the_same_everywhere() -> None:
    rows = data.from_items([{"text": text} for text in TEXTS])
    found = pre.HashingVectorizer(["text"], num_features=8).transform(rows).take_all()
    # The places follow from SHA-256 of the tokens, as in Ray Data.
    from powertrain.data.preprocessors.text import simple_hash

    for row, text in zip(found, TEXTS, strict=True):
        expected = [0] * 8
        for token in text.split(" "):
            expected[simple_hash(token, 8)] += 1
        assert list(row["text"]) == expected
    assert [simple_hash(token, 1000) for token in ("the", "cat", 3)] == [288, 366, 678]
    numbers = data.from_items([{"x": 1, "y": 2.5, "z": None}, {"x": 3, "y": 4.0, "z": 1.0}])
    hashed = pre.FeatureHasher(["x", "y"], num_features=4, output_column="v").transform(numbers).take_all()
    vector = np.zeros(4)
    vector[simple_hash("x", 4)] += 1
    vector[simple_hash("y", 4)] += 2.5
    assert list(hashed[0]["v"]) == vector.tolist()


def test_columns_become_vectors() -> None:
    rows = data.from_items([{"a": 1, "b": 2.0, "v": [3.0, 4.0]}, {"a": 5, "b": 6.0, "v": [7.0, 8.0]}])
    found = pre.Concatenator(
        ["a", "v", "b"], output_column_name="x", dtype=np.float32, flatten=True
    ).transform(rows)
    batch = found.take_batch(2)
    assert batch["x"].tolist() == [[1.0, 3.0, 4.0, 2.0], [5.0, 7.0, 8.0, 6.0]]
    assert batch["x"].dtype == np.float32
    assert list(batch) == ["x"]
    plain = pre.Concatenator(["a", "b"]).transform_batch({"a": [1, 2], "b": [3, 4], "c": [5, 6]})
    assert list(plain.columns) == ["c", "concat_out"]
    with pytest.raises(DataError, match=r"the columns \['z'\] do not exist"):
        pre.Concatenator(["a", "z"], raise_if_missing=True).transform(rows).take_all()
    with pytest.raises(DataError, match="have different lengths"):
        pre.Concatenator(["v"]).transform_batch(pd.DataFrame({"v": [[1], [1, 2]]}))


def test_a_chain_fits_each_to_what_those_before_it_have_made() -> None:
    frame = pd.DataFrame({"x": [0.0, None, 4.0], "s": ["b", "a", "b"]})
    chain = pre.Chain(
        pre.SimpleImputer(["x"]),
        pre.StandardScaler(["x"]),
        pre.OneHotEncoder(["s"]),
        pre.Concatenator(["x", "s"]),
    )
    assert chain.fit_status() is pre.FitStatus.NOT_FITTED
    found = chain.fit_transform(data.from_pandas(frame))
    spread = math.sqrt(8 / 3)
    expected: Any = [[-2 / spread, 0, 1], [0, 1, 0], [2 / spread, 0, 1]]
    np.testing.assert_allclose(vectors(found.to_pandas()["concat_out"]), expected)
    np.testing.assert_allclose(vectors(chain.transform_batch(frame)["concat_out"]), expected)
    assert chain.fit_status() is pre.FitStatus.FITTED
    assert pre.Chain(pre.Normalizer(["x"])).fit_status() is pre.FitStatus.NOT_FITTABLE
    half = pre.Chain(pre.SimpleImputer(["x"]).fit(data.from_pandas(frame)), pre.StandardScaler(["x"]))
    assert half.fit_status() is pre.FitStatus.PARTIALLY_FITTED
    with pytest.raises(
        pre.PreprocessorNotFittedException, match=r"Chain.transform\(\) was called before fit"
    ):
        half.transform(data.from_pandas(frame))


def test_fitted_ones_come_back_from_text_and_from_a_checkpoint(tmp_path: Path) -> None:
    from powertrain import Checkpoint

    made = pre.Chain(
        pre.StandardScaler(["a"]), pre.CountVectorizer(["t"], tokenization_fn=lambda text: text.split("-"))
    )
    made.fit(data.from_items([{"a": 1.0, "t": "x-y"}, {"a": 3.0, "t": "x"}]))
    checkpoint = Checkpoint.from_directory(str(tmp_path))
    checkpoint.update_metadata({"preprocessor": made.serialize()})
    again = pre.Preprocessor.deserialize(
        Checkpoint.from_directory(str(tmp_path)).get_metadata()["preprocessor"]
    )
    batch = pd.DataFrame({"a": [2.0], "t": ["y-y"]})
    assert again.transform_batch(batch)["a"].tolist() == [0.0]
    assert again.transform_batch(batch)["t"][0].tolist() == [0, 2]
    assert batch["t"].tolist() == ["y-y"], "the given batch stays as it is"
    for wrong in ("nothing", "bm90aGluZw==", data.preprocessors.Preprocessor().serialize()[:20]):
        with pytest.raises(DataError, match="not that of a preprocessor"):
            pre.Preprocessor.deserialize(wrong)


def test_a_preprocessor_of_the_users_own() -> None:
    class Shifted(pre.Preprocessor):
        def _fit(self, ds: Dataset) -> Shifted:
            self.stats_ = {"least": ds.min("x")}
            return self

        def _transform_numpy(self, np_data: dict[str, Any]) -> dict[str, Any]:
            return {"x": np_data["x"] - self.stats_["least"]}

    rows = data.from_items([{"x": 5}, {"x": 7}])
    made = Shifted()
    with pytest.raises(pre.PreprocessorNotFittedException, match="called before fit"):
        made.transform_batch({"x": np.array([9])})
    assert [row["x"] for row in made.fit_transform(rows).take_all()] == [0, 2]
    assert made.transform_batch({"x": np.array([9])})["x"].tolist() == [4]
    assert made.transform_batch(pa.table({"x": [9]}))["x"].tolist() == [4]
    assert data.Preprocessor is pre.Preprocessor
    made_once = type("Nothing", (pre.Preprocessor,), {"_is_fittable": False})()
    with pytest.raises(DataError, match="defines neither"):
        made_once.transform(rows)


def test_fitting_again_replaces_the_statistics(caplog: pytest.LogCaptureFixture) -> None:
    scaler = pre.MinMaxScaler(["x"]).fit(data.from_items([{"x": 1}, {"x": 3}]))
    scaler.fit(data.from_items([{"x": 1}, {"x": 5}]))
    assert scaler.stats_ == {"min(x)": 1, "max(x)": 5}
    assert "was fitted before" in caplog.text


def test_wrong_arguments_are_errors_that_name_them() -> None:
    rows = data.from_items([{"x": 1, "s": "a", "n": None}, {"x": 2, "s": "b", "n": 1}])
    with pytest.raises(DataError, match="There is no column 'y'"):
        pre.StandardScaler(["y"]).fit(rows)
    with pytest.raises(DataError, match="the column has the type string"):
        pre.StandardScaler(["s"]).fit(rows)
    with pytest.raises(DataError, match="takes a Dataset, and got a DataFrame"):
        pre.StandardScaler(["x"]).fit(pd.DataFrame({"x": [1]}))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="output_columns has 1 names for 2 columns"):
        pre.StandardScaler(["x", "s"], output_columns=["y"])
    with pytest.raises(DataError, match="'n' has nulls, which cannot be encoded"):
        pre.OneHotEncoder(["n"]).fit(rows)
    with pytest.raises(DataError, match=r"\['x'\] have nulls"):
        pre.OrdinalEncoder(["x"]).fit(rows).transform_batch(pd.DataFrame({"x": [1, None]}))
    with pytest.raises(DataError, match="which is not one of the columns"):
        pre.OneHotEncoder(["x"], max_categories={"y": 1})
    with pytest.raises(DataError, match="norm='l3' is unknown"):
        pre.Normalizer(["x"], norm="l3")
    with pytest.raises(DataError, match=r"has nothing for the columns \['x'\]"):
        pre.UniformKBinsDiscretizer(["x"], bins={"y": 1})
    with pytest.raises(DataError, match="quantile_range"):
        pre.RobustScaler(["x"], quantile_range=(0.9, 0.1))
    with pytest.raises(DataError, match="Give a DataFrame"):
        pre.Normalizer(["x"]).transform_batch(3)
    with pytest.raises(DataError, match="Chain takes preprocessors"):
        pre.Chain(3)  # type: ignore[arg-type]
    with pytest.raises(NotSupportedError, match="torchvision"):
        pre.TorchVisionPreprocessor(["x"])
    with pytest.raises(AttributeError):
        _ = pre.Nothing
