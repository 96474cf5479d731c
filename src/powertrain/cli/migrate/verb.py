"""``powertrain migrate``: programs of Ray Train, Tune, Data and TraceML with the names of Powertrain."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from powertrain.cli.common.output import print_json, print_line, print_text
from powertrain.cli.migrate.files import MigratedFile, find_files, migrate_file, write_file
from powertrain.terminal.text import counted


def migrate(
    path: Annotated[Path, typer.Argument(help="A program, a notebook, or a directory of them.")],
    write: Annotated[
        bool, typer.Option("--write", help="Change the files; else only show the changes.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the changes and remarks as JSON.")] = False,
) -> None:
    """Rewrite imports of Ray Train, Tune, Data and TraceML. Exits with 1 if a file could not be read or written."""
    files = [migrate_file(file) for file in find_files(path)]
    if write:
        files = [_written(file) for file in files]
    if json:
        print_json(_as_json(files, write))
    else:
        _print(files, write)
    raise typer.Exit(1 if any(file.error for file in files) else 0)


def _written(file: MigratedFile) -> MigratedFile:
    """Write a file that has changes; return it with the reason where that failed."""
    if file.error or not file.has_changed:
        return file
    try:
        write_file(file)
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return MigratedFile(file.path, error=f"it could not be written: {reason}")
    return file


def _print(files: list[MigratedFile], write: bool) -> None:
    for file in files:
        if file.has_changed:
            print_text(file.diff, end="")
    remarks = [(file, remark) for file in files for remark in file.remarks]
    if remarks:
        print_line("For a person:")
    for file, remark in remarks:
        print_line(f"  {file.path}:{remark.line}: {remark.name}: {remark.reason}")
    failed = [file for file in files if file.error]
    if failed:
        print_line("Skipped:")
    for file in failed:
        print_line(f"  {file.path}: {file.error}")
    changed = counted(sum(file.has_changed for file in files), "file")
    done = f"{changed} rewritten" if write else f"{changed} to rewrite (--write does it)"
    print_line(
        f"{counted(len(files), 'file')} read, {done}, {counted(len(remarks), 'place')} for a person, "
        f"{len(failed)} skipped"
    )


def _as_json(files: list[MigratedFile], write: bool) -> dict[str, Any]:
    return {
        "written": write,
        "files": [
            {
                "path": str(file.path),
                "changed": file.has_changed,
                "error": file.error,
                "diff": file.diff,
                "remarks": [asdict(remark) for remark in file.remarks],
            }
            for file in files
        ],
    }
