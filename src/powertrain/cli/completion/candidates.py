"""The words that may come next in a command line. Pure: the tree of commands goes in, words come out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

#: Names that a shell inserts as they are: one with other characters could be run as a command.
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
#: Names of arguments that take a run.
_RUN_ARGUMENTS = frozenset({"run", "first", "second"})


def complete(command: Any, words: Sequence[str], runs: Callable[[], Iterable[str]]) -> list[str]:
    """Return the words that may take the place of the last of ``words``, which may be "".

    Args:
        command: The command of typer, or a group of them.
        words: The words after the command's name.
        runs: Called for names of runs, where one may come next.
    """
    *before, current = words or [""]
    takes_value = False
    for word in before:
        if takes_value:
            takes_value = False
        elif word.startswith("-"):
            takes_value = _takes_value(command, word)
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return []
            command = command.commands[word]
    if takes_value:
        return []
    if current.startswith("-"):
        found: Iterable[str] = [
            option for one in command.params for option in one.opts if option.startswith("-")
        ]
        found = [*found, "--help"]
    elif hasattr(command, "commands"):
        found = command.commands
    elif any(one.name in _RUN_ARGUMENTS for one in command.params):
        found = runs()
    else:
        found = []
    return sorted({word for word in found if word.startswith(current) and _PLAIN.fullmatch(word)})


def _takes_value(command: Any, word: str) -> bool:
    """Return True when an option's value is the next word."""
    option = next((one for one in command.params if word in one.opts), None)
    return option is not None and not getattr(option, "is_flag", False)
