"""Files in directories by the values of columns: written with ``partition_cols``, read with and without a filter."""

import os

import ray.data
from ray.data.datasource import Partitioning, PathPartitionFilter

rows = [{"id": number, "year": 2020 + number % 3, "x": number / 2} for number in range(12)]
ray.data.from_items(rows).write_parquet(os.path.abspath("table"), partition_cols=["year"])
assert sorted(name for name in os.listdir("table") if "=" in name) == ["year=2020", "year=2021", "year=2022"]

whole = ray.data.read_parquet(os.path.abspath("table"))
assert sorted(row["id"] for row in whole.take_all()) == list(range(12))
assert {(row["id"] % 3, int(row["year"])) for row in whole.take_all()} == {(0, 2020), (1, 2021), (2, 2022)}

ray.data.from_items([{"id": 1}]).write_csv(os.path.abspath("files/2020/a"))
ray.data.from_items([{"id": 2}]).write_csv(os.path.abspath("files/2021/b"))
chosen = ray.data.read_csv(
    os.path.abspath("files"),
    partitioning=Partitioning("dir", field_names=["year", "part"], base_dir=os.path.abspath("files")),
    partition_filter=PathPartitionFilter.of(
        lambda found: found["year"] == "2021",
        style="dir",
        field_names=["year", "part"],
        base_dir=os.path.abspath("files"),
    ),
)
assert [(row["id"], row["part"]) for row in chosen.take_all()] == [(2, "b")]
