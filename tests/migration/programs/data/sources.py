"""Datasets from memory: items, pandas, numpy, arrow; their rows, columns and numbers."""

import numpy as np
import pandas as pd
import pyarrow as pa
import ray.data

items = ray.data.from_items([{"x": 1}, {"x": 2}, {"x": 3}])
assert items.count() == 3
assert [row["x"] for row in items.take_all()] == [1, 2, 3]
assert ray.data.from_items([5, 6]).take(1) == [{"item": 5}]

frame = ray.data.from_pandas(pd.DataFrame({"a": [1, 2], "b": ["u", "v"]}))
assert frame.columns() == ["a", "b"]
assert frame.to_pandas()["b"].tolist() == ["u", "v"]

array = ray.data.from_numpy(np.arange(6).reshape(3, 2))
assert array.take_batch(3)["data"].shape == (3, 2)

table = ray.data.from_arrow(pa.table({"n": [1, 2, 3, 4]}))
assert table.schema().names == ["n"]
train, test = table.train_test_split(test_size=0.25)
assert (train.count(), test.count()) == (3, 1)
