"""The names of the package itself: what ``from powertrain import *`` brings, and what is reached by its full name."""

from __future__ import annotations

from typing import Any

import pytest

import powertrain


def test_a_star_import_leaves_short_names_of_a_program_alone() -> None:
    own = ("get", "put", "wait", "kill", "init", "remote", "shutdown", "is_initialized", "torch", "data")
    program: dict[str, Any] = {name: f"the program's {name}" for name in own}
    exec("from powertrain import *", program)
    assert {name: program[name] for name in own} == {name: f"the program's {name}" for name in own}
    assert program["report"] is powertrain.report
    assert program["RunConfig"] is powertrain.RunConfig


@pytest.mark.parametrize(
    "name", ["get", "put", "wait", "kill", "init", "remote", "shutdown", "is_initialized"]
)
def test_what_a_star_import_leaves_out_is_reached_by_its_full_name(name: str) -> None:
    assert callable(getattr(powertrain, name))
    assert name in dir(powertrain)
    program: dict[str, Any] = {}
    exec(f"from powertrain import {name}", program)
    assert program[name] is getattr(powertrain, name)
