"""Notebooks: the code of all cells as one program, changed in place. Pure.

Commands of IPython (``%pip``, ``!ls``, a cell of ``%%bash``) are masked for Python's parser, in as many characters.
"""

from __future__ import annotations

import json
import re
from typing import Any

from powertrain.cli.migrate.edits import Edit, apply_edits
from powertrain.cli.migrate.rewriting import MigrationRemark, Rewriting, rewrite

_COMMAND = re.compile(r"^(?P<indent>[ \t]*)(?P<rest>[%!?].*|.*\?|[\w., ]+=[ \t]*[%!].*)$", re.MULTILINE)
_LINE_REST = re.compile(r"[^\r\n]+")
#: What separates cells: an end of a line, so that the last line of a cell is whole.
_SEPARATOR = "\n"


class NotebookError(ValueError):
    """A file that is not a notebook of version 4."""


def rewrite_notebook(text: str) -> tuple[str, list[MigrationRemark]]:
    """Return a notebook after its code was rewritten, and what is left for a person.

    Lines of remarks are lines of the code of all cells together. The form of the JSON is kept where it is a usual one.

    Raises:
        NotebookError: It is not a notebook.
        SyntaxError: A cell is not Python.
    """
    try:
        notebook = json.loads(text)
    except ValueError as error:
        raise NotebookError(f"it is not JSON ({error})") from None
    cells = _code_cells(notebook)
    sources = [_source(cell) for cell in cells]
    program = "".join(source + _SEPARATOR for source in sources)
    rewriting = rewrite(program, "".join(mask(source) + _SEPARATOR for source in sources))
    if not rewriting.edits:
        return text, rewriting.remarks
    start = 0
    for cell, source in zip(cells, sources, strict=True):
        own = [
            _moved(edit, start, len(source))
            for edit in rewriting.edits
            if start <= edit.start <= start + len(source)
        ]
        _put(cell, apply_edits(source, own))
        start += len(source) + len(_SEPARATOR)
    return _as_text(notebook, text), rewriting.remarks


def _moved(edit: Edit, start: int, length: int) -> Edit:
    """Return a change of the whole program as one of a cell; a line that is removed may end with the separator."""
    return Edit(edit.start - start, min(edit.end - start, length), edit.text)


def mask(source: str) -> str:
    """Return a cell without commands of IPython, with all other characters where they were."""
    if source.lstrip().startswith("%%"):
        return _LINE_REST.sub(lambda line: "#" * len(line[0]), source)
    return _COMMAND.sub(lambda found: found["indent"] + "0" + "#" * (len(found["rest"]) - 1), source)


def _code_cells(notebook: Any) -> list[dict[str, Any]]:
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
        raise NotebookError("it has no list of cells; notebooks of format 4 do")
    return [cell for cell in cells if cell.get("cell_type") == "code"]


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return "".join(map(str, source)) if isinstance(source, list) else str(source)


def _put(cell: dict[str, Any], source: str) -> None:
    as_lines = isinstance(cell.get("source"), list)
    if source != _source(cell):
        cell["source"] = source.splitlines(keepends=True) if as_lines else source


def _as_text(notebook: Any, before: str) -> str:
    """Return the notebook as JSON in the form that it had, or in that of Jupyter."""
    end = before[len(before.rstrip()) :]
    for indent in (1, 2, 4, None):
        for escapes in (False, True):
            form = {"indent": indent, "ensure_ascii": escapes}
            if json.dumps(json.loads(before), **form) + end == before:  # type: ignore[arg-type]
                return json.dumps(notebook, **form) + end  # type: ignore[arg-type]
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def as_rewriting(text: str) -> Rewriting:
    """Return the changes of a notebook's text as one change of all of it."""
    after, remarks = rewrite_notebook(text)
    return Rewriting([] if after == text else [Edit(0, len(text), after)], remarks)
