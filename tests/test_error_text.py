from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.text.errors import describe_error, message_of, sendable


class Broken(Exception):
    """An error whose text is another error."""

    def __init__(self, fault: BaseException) -> None:
        self.fault = fault

    def __str__(self) -> str:
        raise self.fault


@given(st.text(st.characters(exclude_categories=[])))
def test_any_text_can_be_sent_and_whole_text_is_left_as_it_is(text: str) -> None:
    sent = sendable(text)
    sent.encode()
    if not any("\ud800" <= character <= "\udfff" for character in text):
        assert sent == text
    assert message_of(ValueError(text)) == sent


@pytest.mark.parametrize("fault", [RuntimeError("no"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()])
def test_an_error_that_cannot_say_what_it_is_is_named_by_its_type(fault: BaseException) -> None:
    error = Broken(fault)
    assert describe_error(error) == f"Broken: <its message cannot be shown: {type(fault).__name__}>"


def test_an_error_without_a_message_is_its_type() -> None:
    assert describe_error(MemoryError()) == "MemoryError"
    assert describe_error(SystemExit(3)) == "SystemExit: 3"
