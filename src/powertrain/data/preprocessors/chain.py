"""Several preprocessors, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from powertrain.data.arguments import shown
from powertrain.data.preprocessors.base import FitStatus, Preprocessor
from powertrain.errors import DataError

if TYPE_CHECKING:
    from powertrain.data.dataset import Dataset


class Chain(Preprocessor):
    """Applies preprocessors one after the other; each is fitted to what those before it have made.

    Args:
        *preprocessors: The preprocessors.

    Raises:
        DataError: Something else was given.

    Example::

        Chain(SimpleImputer(["age"]), StandardScaler(["age"]))
    """

    def __init__(self, *preprocessors: Preprocessor) -> None:
        super().__init__()
        for each in preprocessors:
            if not isinstance(each, Preprocessor):
                raise DataError(f"Chain takes preprocessors, and got {shown(each)}.")
        if not preprocessors:
            raise DataError("Chain was given no preprocessor. Give at least one.")
        self.preprocessors = preprocessors

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.preprocessors))})"

    def fit_status(self) -> FitStatus:
        """Return whether all of them are fitted."""
        found = {each.fit_status() for each in self.preprocessors} - {FitStatus.NOT_FITTABLE}
        if not found:
            return FitStatus.NOT_FITTABLE
        return found.pop() if len(found) == 1 else FitStatus.PARTIALLY_FITTED

    def _fit(self, ds: Dataset) -> Chain:
        for each in self.preprocessors[:-1]:
            ds = each.fit_transform(ds)
        self.preprocessors[-1].fit(ds)
        return self

    def transform(self, ds: Dataset, **options: Any) -> Dataset:
        """Return a dataset with its rows changed by all of them.

        Args:
            ds: The dataset.
            **options: Those of :meth:`Preprocessor.transform`.
        """
        self._check_fitted("transform")
        for each in self.preprocessors:
            ds = each.transform(ds, **options)
        return ds

    def transform_batch(self, data: Any) -> Any:
        """Return a batch with its rows changed by all of them.

        Args:
            data: A DataFrame, a ``pyarrow.Table`` or a dict of arrays.
        """
        self._check_fitted("transform_batch")
        for each in self.preprocessors:
            data = each.transform_batch(data)
        return data

    def get_input_columns(self) -> list[str]:
        """Return the columns that the first one reads."""
        return self.preprocessors[0].get_input_columns()

    def get_output_columns(self) -> list[str]:
        """Return the columns that the last one makes."""
        return self.preprocessors[-1].get_output_columns()
