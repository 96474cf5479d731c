"""Two datasets joined by a key: inner, outer, semi and anti joins, suffixes, keys of different names."""

import ray.data

people = ray.data.from_items([{"id": number, "value": number * 10} for number in range(4)])
visits = ray.data.from_items([{"id": number, "value": number * 100} for number in (2, 3, 3, 5)])


def joined(kind, **options):
    found = people.join(visits, kind, 2, on=("id",), **options).take_all()
    return sorted(found, key=lambda row: row["id"])


both = {"left_suffix": "_here", "right_suffix": "_there"}
inner = joined("inner", **both)
assert [(row["id"], row["value_here"], row["value_there"]) for row in inner] == [
    (2, 20, 200), (3, 30, 300), (3, 30, 300),
]  # fmt: skip
left = joined("left_outer", **both)
assert [row["id"] for row in left] == [0, 1, 2, 3, 3]
assert left[0]["value_there"] is None
right = joined("right_outer", **both)
assert [row["id"] for row in right] == [2, 3, 3, 5]
full = joined("full_outer", **both)
assert [row["id"] for row in full] == [0, 1, 2, 3, 3, 5]
assert joined("left_semi") == [{"id": 2, "value": 20}, {"id": 3, "value": 30}]
assert joined("left_anti") == [{"id": 0, "value": 0}, {"id": 1, "value": 10}]
assert [row["id"] for row in joined("right_semi")] == [2, 3, 3]
assert joined("right_anti") == [{"id": 5, "value": 500}]

other = visits.rename_columns({"id": "person", "value": "visits"})
named = people.join(other, "inner", 2, on=("id",), right_on=("person",)).take_all()
assert sorted(row["visits"] for row in named) == [200, 300, 300]
assert "person" not in named[0]
