"""ORC files: rows are written and read again."""

import os

import ray.data

rows = [{"id": number, "name": f"n{number}", "values": [number] * 3} for number in range(20)]
ray.data.from_items(rows).write_orc(os.path.abspath("table"))
dataset = ray.data.read_orc(os.path.abspath("table"))
found = sorted(dataset.take_all(), key=lambda row: row["id"])
assert [(row["id"], row["name"], list(row["values"])) for row in found] == [
    tuple(row.values()) for row in rows
]
assert sorted(dataset.schema().names) == ["id", "name", "values"]
