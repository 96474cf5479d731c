"""The verb on files: encodings, line ends, modes, links, notebooks, errors, and writing in one step."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from powertrain.cli.main import app
from powertrain.cli.migrate import files
from powertrain.cli.migrate.notebooks import mask

THEIRS = "from ray import train\ntrain.report({})\n"
OURS = "import powertrain as train\ntrain.report({})\n"


def invoke(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, ["migrate", *map(str, arguments)])


def test_without_write_the_change_is_shown_and_the_file_stays(tmp_path: Path) -> None:
    program = tmp_path / "a.py"
    program.write_text(THEIRS)
    shown = invoke(program)
    assert shown.exit_code == 0, shown.output
    assert "-from ray import train\n+import powertrain as train\n" in shown.output
    assert (
        "1 file read, 1 file to rewrite (--write does it), 0 places for a person, 0 skipped" in shown.output
    )
    assert program.read_text() == THEIRS


def test_write_changes_all_programs_of_a_directory_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / ".venv").mkdir()
    (tmp_path / "deep" / "a.py").write_text(THEIRS)
    (tmp_path / ".venv" / "b.py").write_text(THEIRS)
    (tmp_path / "notes.txt").write_text(THEIRS)
    assert "1 file rewritten" in invoke(tmp_path, "--write").output
    assert (tmp_path / "deep" / "a.py").read_text() == OURS
    assert (tmp_path / ".venv" / "b.py").read_text() == (tmp_path / "notes.txt").read_text() == THEIRS
    assert "0 files rewritten" in invoke(tmp_path, "--write").output
    assert sorted(path.name for path in tmp_path.rglob("*.py")) == ["a.py", "b.py"]


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ("# coding: latin-1\n# é\n", "latin-1"),
        ("# é\n", "utf-8"),
        ("# é\n", "utf-8-sig"),
        ("# é\r\n", "utf-8"),
    ],
    ids=["latin-1", "utf-8", "mark", "crlf"],
)
def test_encoding_and_line_ends_are_kept(tmp_path: Path, head: str, encoding: str) -> None:
    ending = "\r\n" if "\r" in head else "\n"
    before, after = (head + text.replace("\n", ending) for text in (THEIRS, OURS))
    program = tmp_path / "a.py"
    program.write_bytes(before.encode(encoding))
    assert invoke(program, "--write").exit_code == 0
    assert program.read_bytes() == after.encode(encoding)


def test_mode_and_link_are_kept(tmp_path: Path) -> None:
    program, link = tmp_path / "a.py", tmp_path / "link.py"
    program.write_text(THEIRS)
    program.chmod(0o750)
    link.symlink_to(program)
    assert invoke(link, "--write").exit_code == 0
    assert (link.is_symlink(), program.read_text()) == (True, OURS)
    assert stat.S_IMODE(program.stat().st_mode) == 0o750


def test_files_that_are_not_programs_are_named_and_skipped_with_exit_code_1(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(THEIRS)
    (tmp_path / "b.py").write_text("print 1\n")
    (tmp_path / "c.py").write_bytes(b"\xff\xfe")
    (tmp_path / "d.py").write_bytes(b"# coding: nonsense\n")
    (tmp_path / "e.ipynb").write_text("[]")
    (tmp_path / "f.ipynb").write_text("{")
    (tmp_path / "g.py").symlink_to("nowhere")
    done = invoke(tmp_path, "--write")
    assert done.exit_code == 1
    assert (tmp_path / "a.py").read_text() == OURS
    assert "b.py: it is not a program of this version of Python" in done.output
    assert "e.ipynb: it has no list of cells" in done.output
    assert "6 skipped" in done.output


def test_json_has_the_changes_and_remarks(tmp_path: Path) -> None:
    program = tmp_path / "a.py"
    program.write_text("import ray\nray.nodes()\n")
    (found,) = json.loads(invoke(program, "--json").output)["files"]
    assert (found["changed"], found["error"], found["path"]) == (False, "", str(program))
    assert found["remarks"][0]["line"] == 2
    assert found["remarks"][0]["name"] == "ray.nodes"


def test_a_missing_path_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    done = invoke(tmp_path / "no")
    assert (done.exit_code, "There is no file or directory" in str(done.exception)) == (1, True)


def test_a_file_that_changes_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    program = tmp_path / "a.py"
    program.write_text(THEIRS)
    migrated = files.migrate_file(program)
    program.write_text("other = 1\n")
    with pytest.raises(OSError, match="changed while"):
        files.write_file(migrated)
    assert (program.read_text(), os.listdir(tmp_path)) == ("other = 1\n", ["a.py"])


def test_a_failed_write_leaves_the_file_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "a.py"
    program.write_text(THEIRS)

    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("powertrain.cli.migrate.files.os.replace", refuse)
        done = invoke(program, "--write")
    assert (done.exit_code, program.read_text(), os.listdir(tmp_path)) == (1, THEIRS, ["a.py"])
    assert "it could not be written: No space left on device" in done.output


# --------------------------------------------------------------------------- notebooks


def notebook(*sources: str | list[str]) -> dict[str, Any]:
    cells: list[dict[str, Any]] = [{"cell_type": "markdown", "metadata": {}, "source": "import ray é"}]
    cells += [{"cell_type": "code", "metadata": {}, "outputs": [], "source": source} for source in sources]
    return {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}


@pytest.mark.parametrize(
    "form", [{"indent": 1, "ensure_ascii": False}, {"indent": None}], ids=["jupyter", "compact"]
)
def test_cells_are_one_program_and_the_rest_of_a_notebook_stays(tmp_path: Path, form: dict[str, Any]) -> None:
    before = notebook(
        "%pip install ray\nimport ray\nimport ray.train",
        ["!ls\n", "x = %time 1\n", "ray.train.report({})\n"],
        "%%bash\nimport ray",
        "ray.get?",
    )
    after = notebook(
        "%pip install ray\nimport powertrain\n",
        ["!ls\n", "x = %time 1\n", "powertrain.report({})\n"],
        "%%bash\nimport ray",
        "ray.get?",
    )
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(before, **form) + "\n", "utf-8")
    done = invoke(path, "--write")
    assert done.exit_code == 0, done.output
    assert path.read_text("utf-8") == json.dumps(after, **form) + "\n"
    assert "0 files rewritten" in invoke(path, "--write").output


def test_a_notebook_of_another_form_is_written_as_jupyter_does(tmp_path: Path) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(notebook("import ray"), indent=3), "utf-8")
    assert invoke(path, "--write").exit_code == 0
    assert (
        path.read_text("utf-8")
        == json.dumps(notebook("import powertrain"), indent=1, ensure_ascii=False) + "\n"
    )


@given(st.text(st.sampled_from("%!? \n=ax#"), max_size=30))
def test_masking_keeps_every_position(cell: str) -> None:
    masked = mask(cell)
    assert len(masked) == len(cell)
    assert [index for index, one in enumerate(masked) if one == "\n"] == [
        index for index, one in enumerate(cell) if one == "\n"
    ]
