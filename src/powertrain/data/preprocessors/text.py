"""Text as tokens and as vectors of counts."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import column_names, optional_whole, shown, whole
from powertrain.data.preprocessors.base import ColumnPreprocessor, Preprocessor
from powertrain.data.preprocessors.fitting import token_counts
from powertrain.errors import DataError

if TYPE_CHECKING:
    import pandas as pd

    from powertrain.data.dataset import Dataset

Tokenize = Callable[[str], Iterable[str]]


def simple_split_tokenizer(value: str) -> list[str]:
    """Return the parts of a text between single spaces.

    Args:
        value: The text.
    """
    return value.split(" ")


def simple_hash(value: object, num_features: int) -> int:
    """Return a number below ``num_features`` that follows from the text of a value, as in Ray Data.

    Args:
        value: The value.
        num_features: The number of different results.
    """
    return int(hashlib.sha256(str(value).encode()).hexdigest(), 16) % num_features


class _OfText(ColumnPreprocessor):
    def __init__(
        self, columns: Sequence[str], tokenization_fn: Tokenize | None, output_columns: Sequence[str] | None
    ) -> None:
        super().__init__(columns, output_columns)
        if tokenization_fn is not None and not callable(tokenization_fn):
            raise DataError(f"tokenization_fn={shown(tokenization_fn)} must be a function of a text.")
        self.tokenization_fn: Tokenize = tokenization_fn or simple_split_tokenizer

    def _mapped(self, values: pd.Series[Any], change: Callable[[Iterable[str]], Any]) -> pd.Series[Any]:
        """Return the result for the tokens of each text; None for null."""
        import pandas as pd

        missing = values.isna().tolist()
        found = [
            None if gone else change(self.tokenization_fn(text))
            for text, gone in zip(values, missing, strict=True)
        ]
        return pd.Series(found, index=values.index, dtype=object)


class Tokenizer(_OfText):
    """Replaces each text by the list of its tokens.

    Args:
        columns: The columns.
        tokenization_fn: Returns the tokens of a text; None splits it at spaces.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        tokenization_fn: Tokenize | None = None,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, tokenization_fn, output_columns)

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        return df.assign(**{output: self._mapped(df[column], list) for column, output in self._pairs()})


class HashingVectorizer(_OfText):
    """Replaces each text by a vector with the numbers of its tokens, each counted at a place given by its hash.

    Args:
        columns: The columns.
        num_features: The length of the vectors.
        tokenization_fn: Returns the tokens of a text; None splits it at spaces.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    _is_fittable = False

    def __init__(
        self,
        columns: Sequence[str],
        num_features: int,
        tokenization_fn: Tokenize | None = None,
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, tokenization_fn, output_columns)
        self.num_features = whole("num_features", num_features, 1)

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np

        places: dict[str, int] = {}

        def vector(tokens: Iterable[str]) -> Any:
            made = np.zeros(self.num_features, np.int64)
            for token in tokens:
                if token not in places:
                    places[token] = simple_hash(token, self.num_features)
                made[places[token]] += 1
            return made

        return df.assign(**{output: self._mapped(df[column], vector) for column, output in self._pairs()})


class CountVectorizer(_OfText):
    """Replaces each text by a vector with the number of times that each known token occurs in it.

    The tokens are in the order of their frequency in the data that it was fitted to, the most frequent first.

    Args:
        columns: The columns.
        tokenization_fn: Returns the tokens of a text; None splits it at spaces.
        max_features: The number of tokens to count: the most frequent ones; None for all.
        output_columns: Names of the results; None replaces the columns.

    Raises:
        DataError: An argument has a wrong value.
    """

    def __init__(
        self,
        columns: Sequence[str],
        tokenization_fn: Tokenize | None = None,
        max_features: int | None = None,
        *,
        output_columns: Sequence[str] | None = None,
    ) -> None:
        super().__init__(columns, tokenization_fn, output_columns)
        self.max_features = optional_whole("max_features", max_features, 1)

    def _fit(self, ds: Dataset) -> CountVectorizer:
        for name, counts in token_counts(ds, self.columns, self.tokenization_fn).items():
            self.stats_[f"token_counts({name})"] = Counter(dict(counts.most_common(self.max_features)))
        return self

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np

        made: dict[str, Any] = {}
        for column, output in self._pairs():
            tokens = [token for token, _ in self.stats_[f"token_counts({column})"].most_common()]
            places = {token: place for place, token in enumerate(tokens)}

            def vector(found: Iterable[str], places: dict[str, int] = places) -> Any:
                counts = np.zeros(len(places), np.int64)
                for token in found:
                    if token in places:
                        counts[places[token]] += 1
                return counts

            made[output] = self._mapped(df[column], vector)
        return df.assign(**made)


class FeatureHasher(Preprocessor):
    """Adds up columns in a vector, each at a place given by the hash of its name.

    Args:
        columns: The columns, of numbers.
        num_features: The length of the vectors.
        output_column: The name of the new column.

    Raises:
        DataError: An argument has a wrong value.
    """

    _is_fittable = False

    def __init__(self, columns: Sequence[str], num_features: int, output_column: str) -> None:
        super().__init__()
        self.columns = list(column_names("FeatureHasher", columns))
        self.num_features = whole("num_features", num_features, 1)
        [self.output_column] = column_names("FeatureHasher", output_column)[:1]

    def get_output_columns(self) -> list[str]:
        """Return the column that it makes."""
        return [self.output_column]

    def _transform_pandas(self, df: pd.DataFrame) -> pd.DataFrame:
        import numpy as np
        import pandas as pd

        vectors = np.zeros((len(df), self.num_features))
        for name in self.columns:
            vectors[:, simple_hash(name, self.num_features)] += df[name].to_numpy(dtype=np.float64)
        return df.assign(**{self.output_column: pd.Series(list(vectors), index=df.index, dtype=object)})
