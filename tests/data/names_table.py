"""docs/ray_data.md: ``python -m tests.data.names_table`` writes it anew, from the names of the installed Ray.

Every public name and argument of Ray Data is in it, with its state; a test compares it with the code.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.data.test_api_table import table

from powertrain.data.options.refused import CLASSES, FUNCTIONS, ITERATOR_METHODS, METHODS
from powertrain.data.options.scheduling import REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "ray_data.md"
_HEAD = """# Names and arguments of Ray Data

Every public name of `ray.data` 2.60, its functions' arguments, and the methods of `Dataset` and `DataIterator`. A name
or an argument *works* as in Ray Data; it is *accepted* where it only affects how Ray schedules tasks, and one line
of the log names it; or it is *refused*: using it raises `NotImplementedError` with the sentence given here.
Differences in what works are in [migration.md](migration.md), and datasets themselves in [data.md](data.md).

This page is generated: `python -m tests.data.names_table`.

"""


def page() -> str:
    """The page, as it must be."""
    return _HEAD + _names() + "\n" + _refused_arguments()


def _names() -> str:
    arguments: dict[str, dict[str, list[str]]] = {}
    states: dict[str, str] = {}
    for name, state in table():
        owner, has_argument, argument = name.partition("(")
        if has_argument:
            arguments.setdefault(owner, {}).setdefault(state, []).append(argument.rstrip(")"))
        else:
            states[name] = state
    lines = ["## Names", "", "| name | state | arguments, or what to use |", "|---|---|---|"]
    for name, state in states.items():
        found = arguments.get(name, {})
        words = "; ".join(
            f"{kind}: {', '.join(f'`{one}`' for one in found[kind])}" for kind in sorted(found, reverse=True)
        )
        lines.append(f"| `{name}` | {state} | {_sentence(name) if state == 'refused' else words} |")
    return "\n".join(lines) + "\n"


def _sentence(name: str) -> str:
    owner, _, method = name.rpartition(".")
    tables = {"": {**FUNCTIONS, **CLASSES}, "Dataset": METHODS, "DataIterator": ITERATOR_METHODS}
    sentence = tables[owner].get(method, "")
    return re.sub(r"\|", r"\\|", sentence.format(name=method))


def _refused_arguments() -> str:
    lines = ["## Refused arguments", "", "| argument | what to do |", "|---|---|"]
    lines += [f"| `{name}` | {sentence} |" for name, sentence in REFUSED.items() if not name.startswith("_")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
