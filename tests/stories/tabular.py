"""Real data of scikit-learn's for the stories of other frameworks than torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def digits() -> tuple[Any, Any]:
    """Return the 1,797 handwritten digits: 64 pixels each from 0 to 16, and what they show."""
    from sklearn.datasets import load_digits

    features, labels = load_digits(return_X_y=True)
    return features.astype("float32"), labels


def digits_frame() -> pd.DataFrame:
    """The digits as a table with a column for each pixel and one named "label"."""
    import pandas as pd

    features, labels = digits()
    frame = pd.DataFrame(features, columns=[f"pixel_{number:02}" for number in range(features.shape[1])])
    frame["label"] = labels
    return frame
