"""Preprocessors: changes of rows that are fitted to a dataset, with the names and arguments of Ray Data's."""

from __future__ import annotations

from typing import Any

from powertrain.data.options.refused import refused_name
from powertrain.data.preprocessors.base import FitStatus, Preprocessor, PreprocessorNotFittedException
from powertrain.data.preprocessors.chain import Chain
from powertrain.data.preprocessors.discretizers import CustomKBinsDiscretizer, UniformKBinsDiscretizer
from powertrain.data.preprocessors.encoders import (
    Categorizer,
    LabelEncoder,
    MultiHotEncoder,
    OneHotEncoder,
    OrdinalEncoder,
)
from powertrain.data.preprocessors.imputing import SimpleImputer
from powertrain.data.preprocessors.rows import Concatenator, Normalizer, PowerTransformer
from powertrain.data.preprocessors.scalers import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler
from powertrain.data.preprocessors.text import CountVectorizer, FeatureHasher, HashingVectorizer, Tokenizer

__all__ = [
    "Categorizer",
    "Chain",
    "Concatenator",
    "CountVectorizer",
    "CustomKBinsDiscretizer",
    "FeatureHasher",
    "FitStatus",
    "HashingVectorizer",
    "LabelEncoder",
    "MaxAbsScaler",
    "MinMaxScaler",
    "MultiHotEncoder",
    "Normalizer",
    "OneHotEncoder",
    "OrdinalEncoder",
    "PowerTransformer",
    "Preprocessor",
    "PreprocessorNotFittedException",
    "RobustScaler",
    "SimpleImputer",
    "StandardScaler",
    "Tokenizer",
    "UniformKBinsDiscretizer",
]
#: Names of Ray Data's, and what to do instead.
_REFUSED = {"TorchVisionPreprocessor": "call the transform of torchvision in map() or map_batches()"}


def __getattr__(name: str) -> Any:
    found = refused_name(name, {}, _REFUSED)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found
