"""Groups: counts, sums and means of each, several keys, and a function that is given whole groups."""

import numpy as np
import ray.data
from ray.data.aggregate import AggregateFn, Count, Max, Mean, Min, Quantile, Std, Sum

rows = [
    {"city": city, "year": 2020 + number % 2, "sold": float(number)}
    for number, city in enumerate(["Rome", "Bonn", "Rome", "Lima", "Bonn", "Rome"])
]
sales = ray.data.from_items(rows)


def by_city(dataset):
    return {row["city"]: row for row in dataset.take_all()}


assert by_city(sales.groupby("city").count()) == {
    "Bonn": {"city": "Bonn", "count()": 2},
    "Lima": {"city": "Lima", "count()": 1},
    "Rome": {"city": "Rome", "count()": 3},
}
assert by_city(sales.groupby("city").sum("sold"))["Rome"] == {"city": "Rome", "sum(sold)": 7.0}
assert by_city(sales.groupby("city").mean(["sold", "year"]))["Bonn"] == {
    "city": "Bonn",
    "mean(sold)": 2.5,
    "mean(year)": 2020.5,
}
found = by_city(
    sales.groupby("city").aggregate(
        Count(),
        Min("sold"),
        Max("sold", alias_name="most"),
        Mean("sold"),
        Sum("sold"),
        Quantile("sold", q=0.5),
    )
)["Rome"]
assert found == {
    "city": "Rome", "count()": 3, "min(sold)": 0.0, "most": 5.0, "mean(sold)": 7 / 3, "sum(sold)": 7.0,
    "quantile(sold)": 2.0,
}  # fmt: skip
spread = by_city(sales.groupby("city").std("sold", ddof=0))["Bonn"]["std(sold)"]
assert abs(spread - 1.5) < 1e-9
both = by_city(sales.groupby("city").aggregate(Std("sold", ddof=1), Count("sold", alias_name="n")))
assert both["Rome"]["n"] == 3
pairs = {
    (row["city"], row["year"]): row["count()"] for row in sales.groupby(["city", "year"]).count().take_all()
}
assert pairs == {
    ("Rome", 2020): 2,
    ("Bonn", 2021): 1,
    ("Lima", 2021): 1,
    ("Bonn", 2020): 1,
    ("Rome", 2021): 1,
}

longest = AggregateFn(
    init=lambda key: 0,
    accumulate_row=lambda longest, row: max(longest, len(row["city"])),
    merge=max,
    name="longest",
)
assert sales.aggregate(longest) == {"longest": 4}


def share(group):
    return {"city": group["city"], "share": group["sold"] / max(group["sold"].sum(), 1.0)}


shares = sales.groupby("city").map_groups(share)
assert shares.count() == 6
assert abs(sum(row["share"] for row in shares.take_all() if row["city"] == "Bonn") - 1) < 1e-9


class FirstRows:
    def __init__(self, count):
        self.count = count

    def __call__(self, frame):
        return frame.sort_values("sold").head(self.count)


first = sales.groupby("city").map_groups(
    FirstRows, batch_format="pandas", fn_constructor_args=(1,), concurrency=1
)
assert {row["city"]: row["sold"] for row in first.take_all()} == {"Rome": 0.0, "Bonn": 1.0, "Lima": 3.0}
whole = sales.groupby(None).map_groups(lambda group: {"rows": np.array([len(group["sold"])])})
assert whole.take_all() == [{"rows": 6}]
