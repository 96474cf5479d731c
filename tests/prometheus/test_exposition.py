"""The text that Prometheus reads: every line parses, whatever the values are, and gives them back."""

from __future__ import annotations

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from powertrain.driver.prometheus.exposition import (
    OPEN_METRICS,
    TEXT,
    FigureFamily,
    FigureSample,
    choose_format,
    format_number,
    render,
)

_SAMPLE = re.compile(
    r'(?P<name>[a-z_]+)\{(?P<labels>(?:[a-z]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (?P<value>\S+)'
)
_LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\[\\"n])*)"')
_UNESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


def parse(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return the samples of a text in Prometheus' format; fails on a line that is not of it."""
    found = []
    assert text.endswith("\n")
    for line in text.removesuffix("\n").split("\n"):
        if line.startswith(("# HELP ", "# TYPE ", "# EOF")):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, repr(line)
        labels = {
            key: re.sub(r"\\.", lambda one: _UNESCAPED[one[0]], value)
            for key, value in _LABEL.findall(match["labels"])
        }
        found.append((match["name"], labels, float(match["value"])))
    return found


FAMILY = FigureFamily(
    "powertrain_rows_total", 'Rows\nof "it" \\ all.', "counter", [FigureSample({"run": "a"}, 3)]
)


def test_plain_text_names_a_counter_with_its_ending_and_open_metrics_without() -> None:
    assert render([FAMILY]).decode() == (
        '# HELP powertrain_rows_total Rows\\nof "it" \\\\ all.\n'
        "# TYPE powertrain_rows_total counter\n"
        'powertrain_rows_total{run="a"} 3.0\n'
    )
    assert render([FAMILY], OPEN_METRICS).decode() == (
        '# HELP powertrain_rows Rows\\nof \\"it\\" \\\\ all.\n'
        "# TYPE powertrain_rows counter\n"
        'powertrain_rows_total{run="a"} 3.0\n'
        "# EOF\n"
    )


def test_the_format_is_what_the_client_accepts() -> None:
    assert choose_format("application/openmetrics-text;version=1.0.0,text/plain;q=0.5") == OPEN_METRICS
    assert choose_format("text/html, */*") == choose_format("") == TEXT


def test_numbers_that_are_not_finite_have_their_own_spelling() -> None:
    assert [format_number(value) for value in (math.nan, math.inf, -math.inf, 1e300, 3)] == [
        "NaN", "+Inf", "-Inf", "1e+300", "3.0"
    ]  # fmt: skip


@given(st.text(max_size=30), st.floats())
def test_any_name_and_number_come_back(name: str, value: float) -> None:
    family = FigureFamily(
        "powertrain_metric", "Help.", "gauge", [FigureSample({"run": name, "name": "x"}, value)]
    )
    for content_type in (TEXT, OPEN_METRICS):
        ((metric, labels, back),) = parse(render([family], content_type).decode())
        encodable = name.encode("utf-8", "replace").decode()
        assert (metric, labels) == ("powertrain_metric", {"run": encodable, "name": "x"})
        assert back == value or (math.isnan(back) and math.isnan(value))
