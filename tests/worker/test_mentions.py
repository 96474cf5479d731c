"""Names that a training function mentions are found without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import powertrain
from powertrain.worker.scripts.mentions import mentions


def saves_itself() -> None:
    powertrain.save_state()


def saves_in_a_helper() -> None:
    saves_itself()


def saves_in_an_inner_function() -> None:
    def save() -> None:
        powertrain.save_state()

    save()


def saves_in_a_comprehension() -> list[Any]:
    return [powertrain.save_state() for _ in range(2)]


class Loop:
    def __call__(self) -> None:
        self.save()

    def save(self) -> None:
        powertrain.save_state()


def uses_a_class() -> None:
    Loop()()


def closes_over() -> Callable[[], None]:
    save = functools.partial(saves_itself)

    def run() -> None:
        save()

    return run


def decorated(function: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(function)
    def call() -> None:
        function()

    return call


@decorated
def is_decorated() -> None:
    powertrain.save_state()


def calls_itself() -> None:
    calls_itself()


def calls_another_package() -> None:
    pytest.importorskip("torch")


@pytest.mark.parametrize(
    "function",
    [
        saves_itself,
        saves_in_a_helper,
        saves_in_an_inner_function,
        saves_in_a_comprehension,
        uses_a_class,
        closes_over(),
        is_decorated,
        functools.partial(saves_in_a_helper),
        Loop().save,
        Loop(),
    ],
)
def test_a_name_is_found_wherever_the_users_own_code_has_it(function: Callable[[], Any]) -> None:
    assert mentions(function, "save_state")


@pytest.mark.parametrize("function", [calls_itself, calls_another_package, print, len])
def test_functions_without_it_do_not_mention_it(function: Callable[[], Any]) -> None:
    assert not mentions(function, "save_state")
