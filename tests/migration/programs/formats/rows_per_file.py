"""Numbers of rows in each file, modes of writing, and arguments of Arrow's writers."""

import os

import pyarrow.parquet as pq
import ray.data
from ray.data import SaveMode


def files(directory):
    return sorted(os.path.join(directory, name) for name in os.listdir(directory))


rows = ray.data.range(100, override_num_blocks=10)
rows.write_parquet(os.path.abspath("few"), min_rows_per_file=50, compression="gzip")
assert all(pq.ParquetFile(path).metadata.num_rows >= 50 for path in files("few"))
assert pq.ParquetFile(files("few")[0]).metadata.row_group(0).column(0).compression == "GZIP"

rows.write_parquet(os.path.abspath("small"), max_rows_per_file=20)
assert all(pq.ParquetFile(path).metadata.num_rows <= 20 for path in files("small"))

rows.write_json(os.path.abspath("lines"), min_rows_per_file=100)
before = files("lines")
rows.write_json(os.path.abspath("lines"), min_rows_per_file=100, mode=SaveMode.OVERWRITE)
assert ray.data.read_json(os.path.abspath("lines")).count() == 100
assert not set(before) & set(files("lines"))
rows.write_json(os.path.abspath("lines"), mode=SaveMode.IGNORE)
assert ray.data.read_json(os.path.abspath("lines")).count() == 100
rows.write_parquet(os.path.abspath("zstd"), arrow_parquet_args_fn=lambda: {"compression": "zstd"})
assert pq.ParquetFile(files("zstd")[0]).metadata.row_group(0).column(0).compression == "ZSTD"
