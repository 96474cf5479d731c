"""Images: a column of pixels is written as files and read again."""

import os

import numpy as np
import ray.data

pixels = np.stack([np.full((4, 5, 3), number, np.uint8) for number in range(6)])
ray.data.from_numpy(pixels).write_images(os.path.abspath("images"), column="data", file_format="png")
assert sum(name.endswith(".png") for name in os.listdir("images")) == 6

dataset = ray.data.read_images(os.path.abspath("images"), mode="RGB", include_paths=True)
rows = dataset.take_all()
assert sorted(int(row["image"][0, 0, 0]) for row in rows) == list(range(6))
assert {row["image"].shape for row in rows} == {(4, 5, 3)}
assert all(row["path"].endswith(".png") for row in rows)
