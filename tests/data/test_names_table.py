"""docs/ray_data.md lists every public name and argument of Ray Data with the state that the code gives it."""

from __future__ import annotations

from tests.data.names_table import PAGE, page


def test_the_page_is_the_one_that_the_code_gives() -> None:
    assert PAGE.read_text("utf-8") == page(), "write it anew: python -m tests.data.names_table"


def test_every_refused_name_has_a_sentence() -> None:
    rows = [line for line in page().splitlines() if "| refused |" in line]
    assert len(rows) > 40
    assert [row for row in rows if len(row.split("|")[3].strip()) < 5] == []
