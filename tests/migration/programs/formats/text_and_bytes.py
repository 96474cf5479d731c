"""Text line by line, files as bytes, arrays of numpy, and the same file given twice."""

import os

import numpy as np
import ray.data

with open("lines.txt", "w") as file:
    file.write("one\ntwo\n\nthree\n")
lines = ray.data.read_text(os.path.abspath("lines.txt"))
assert sorted(row["text"] for row in lines.take_all()) == ["one", "three", "two"]
twice = ray.data.read_text([os.path.abspath("lines.txt")] * 2)
assert twice.count() == 6

whole = ray.data.read_binary_files(os.path.abspath("lines.txt"), include_paths=True)
(row,) = whole.take_all()
assert row["bytes"].startswith(b"one")
assert row["path"].endswith("lines.txt")

ray.data.range_tensor(6, shape=(2,)).write_numpy(os.path.abspath("arrays"), column="data")
arrays = ray.data.read_numpy(os.path.abspath("arrays"))
assert sorted(row["data"].tolist() for row in arrays.take_all()) == [[number] * 2 for number in range(6)]
np.save("more.npy", np.ones((2, 2), np.int64))
assert ray.data.read_numpy([os.path.abspath("more.npy")]).count() == 2
