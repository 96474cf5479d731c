"""Databases: rows are inserted into a table of SQLite, and the rows of a query are trained on."""

import os
import sqlite3

import ray.data
import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer

path = os.path.abspath("movies.db")


def create_connection():
    return sqlite3.connect(path)


connection = create_connection()
connection.execute("CREATE TABLE movie (title TEXT, year INTEGER, score REAL)")
connection.commit()
connection.close()

rows = [{"title": f"movie {number}", "year": 1990 + number, "score": number / 2} for number in range(10)]
ray.data.from_items(rows).write_sql("INSERT INTO movie VALUES (?, ?, ?)", create_connection)

dataset = ray.data.read_sql(
    "SELECT year, score FROM movie WHERE year >= 1995 ORDER BY year", create_connection
)
assert [row["year"] for row in dataset.take_all()] == [1995, 1996, 1997, 1998, 1999]
chosen = ray.data.read_sql("SELECT title FROM movie WHERE year = ?", create_connection, sql_params=(1992,))
assert chosen.take_all() == [{"title": "movie 2"}]


def train_func():
    shard = ray.train.get_dataset_shard("train")
    return sum(float(batch["score"].sum()) for batch in shard.iter_torch_batches(batch_size=2))


result = TorchTrainer(
    train_func, datasets={"train": dataset}, scaling_config=ScalingConfig(num_workers=1)
).fit()
assert result.return_value == 17.5
