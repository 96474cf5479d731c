"""Import statements of Ray and TraceML as those of Powertrain."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from powertrain.cli.migrate.edits import Edit, SourceText
from powertrain.cli.migrate.resolving import resolve
from powertrain.cli.migrate.rules import CORE_NAMES, ROOTS, is_covered, remedy_for, target_of
from powertrain.cli.migrate.scopes import Imported, ProgramReader, Scope


class Usage(NamedTuple):
    """Whether some uses of a name change, and whether some stay as they are."""

    changes: bool
    stays: bool


def moved_target(imported: Imported) -> str | None:
    """Return the dotted name of Powertrain for an imported name; None where the import stays.

    Of ``import ray.train.torch``, which binds ``ray``, this is the module that is named.
    """
    statement, alias = imported.statement, imported.alias
    name = alias.name if isinstance(statement, ast.Import) else imported.target
    if isinstance(statement, ast.ImportFrom):
        if alias.name == "*":
            ours = target_of(statement.module or "")
        elif statement.module == "ray" and alias.name in CORE_NAMES:
            ours = f"powertrain.{alias.name}"
        else:
            above = target_of(statement.module or "")
            ours = target_of(name) if above is None else f"{above}.{alias.name}"
    else:
        ours = target_of(name)
    if ours is None or any(part.startswith("_") for part in name.split(".")):
        return None
    return None if resolve(ours).state == "missing" else ours


@dataclass(frozen=True)
class _Line:
    """One import as text: ``import module [as name]``, or ``from module import name [as name]``."""

    module: str
    name: str = ""
    asname: str = ""

    @property
    def words(self) -> str:
        return (self.name or self.module) + (f" as {self.asname}" if self.asname else "")


class ImportRewriter:
    """Collects the edits of all import statements, and remarks (line, name, reason) about names that stay."""

    def __init__(
        self,
        source: SourceText,
        tree: ast.Module,
        reader: ProgramReader,
        usage: Mapping[tuple[Scope, str], Usage],
    ) -> None:
        self.edits: list[Edit] = []
        self.remarks: list[tuple[int, str, str]] = []
        self._source, self._reader, self._usage = source, reader, usage
        #: Groups of uses that stay with Ray and for which an import of it remains.
        self._kept: set[tuple[Scope, str]] = {
            (reader.scope_of(one), one.name)
            for one in reader.imports
            if one.target in ROOTS
            and isinstance(one.statement, ast.Import)
            and (one.alias.name in ROOTS or moved_target(one) is None)
        }
        #: Groups for which an import becomes one of Powertrain.
        self._provided: set[tuple[Scope, str]] = {
            (reader.scope_of(one), one.name)
            for one in reader.imports
            if one.target in ROOTS
            and isinstance(one.statement, ast.Import)
            and (one.alias.name in ROOTS or moved_target(one) is not None)
        }
        by_statement: dict[ast.stmt, list[Imported]] = {}
        for imported in reader.imports:
            by_statement.setdefault(imported.statement, []).append(imported)
        for block in _blocks(tree):
            seen: set[str] = set()
            for statement in block:
                found = by_statement.get(statement, [])
                if any(is_covered(one.target) for one in found):
                    self._rewrite(statement, found, seen)
                elif isinstance(statement, ast.Import):
                    seen |= {
                        f"import {_Line(one.name, '', one.asname or '').words}" for one in statement.names
                    }

    def _rewrite(self, statement: ast.stmt, found: list[Imported], seen: set[str]) -> None:
        if isinstance(statement, ast.Import):
            self._rewrite_import(statement, found, seen)
        elif isinstance(statement, ast.ImportFrom):
            self._rewrite_from(statement, found)

    # ----------------------------------------------------------------------- import a, b

    def _rewrite_import(self, statement: ast.Import, found: list[Imported], seen: set[str]) -> None:
        alone = len(found) == 1
        for imported in found:
            if not is_covered(imported.target):
                continue
            lines = self._lines_of(imported)
            if lines is None:
                continue
            start, end = self._source.span(imported.alias)
            texts = [line.words for line in lines]
            indent = self._source.indent_before(self._source.span(statement)[0])
            if not alone or indent is None or not self._source.ends_line(end):
                self.edits.append(Edit(start, end, ", ".join(texts)))
                continue
            new = [text for text in texts if text not in seen]
            seen.update(new)
            if not new and self._drop_line(statement):
                continue
            joint = f"{self._source.newline_at(start)}{indent}import "
            self.edits.append(Edit(start, end, joint.join(new or texts)))

    def _lines_of(self, imported: Imported) -> list[_Line] | None:
        """Return the imports that take the place of one; None where it stays."""
        name, asname = imported.alias.name, imported.alias.asname or ""
        key = (self._reader.scope_of(imported), imported.name)
        usage = self._usage.get(key, Usage(False, False))
        if name in ROOTS:
            ours = str(target_of(name) or "powertrain")
            if not usage.stays:
                return [_Line(ours, "", asname)]
            return [_Line(ours), _Line(name, "", asname)] if usage.changes else None
        target = moved_target(imported)
        if target is None:
            self._stays(imported, name)
            if asname or not usage.changes or key in self._provided:
                return None
            self._provided.add(key)  # its uses that change need an import of Powertrain
            return [_Line(str(target_of(imported.target) or "powertrain")), _Line(name)]
        lines = [_Line(target, "", asname)]
        if not asname and usage.stays and key not in self._kept:
            self._kept.add(key)
            lines.append(_Line(imported.target))
        return lines

    def _stays(self, imported: Imported, name: str) -> None:
        reason = f"Powertrain has no counterpart: {remedy_for(name)}"
        self.remarks.append((imported.statement.lineno, name, reason))

    def _stays_of(self, statement: ast.ImportFrom, names: list[str]) -> None:
        """Remark upon names of one statement that stay, together; with Powertrain's own words where it has some."""
        module = statement.module or ""
        above = target_of(module)
        words = [resolve(f"{above}.{name}").remark for name in names if above is not None]
        remedies = [text for text in words if text] or [
            f"Powertrain has no counterpart: {remedy_for(f'{module}.{names[0]}')}"
        ]
        self.remarks.append((statement.lineno, f"{module}: {', '.join(names)}", remedies[0]))

    def _drop_line(self, statement: ast.Import) -> bool:
        """Remove a line that repeats an import of the same block; returns False where it has a comment."""
        start, end = self._source.span(statement)
        line = self._source.line_of(start)
        if self._source.text[line.start() : line.end()].strip() != self._source.text[start:end]:
            return False
        self.edits.append(Edit(line.start(), line.end(), ""))
        return True

    # ----------------------------------------------------------------------- from a import b, c

    def _rewrite_from(self, statement: ast.ImportFrom, found: list[Imported]) -> None:
        lines: list[_Line] = []
        stays: list[_Line] = []
        module = statement.module or ""
        for imported in found:
            ours, asname = moved_target(imported), imported.alias.asname or ""
            if ours is None:
                stays.append(_Line(module, imported.alias.name, asname))
            else:
                self._remark_lookup(imported, ours)
                lines.append(_new_line(imported, ours))
        if stays:
            self._stays_of(statement, [line.name for line in stays])
        if not lines:
            return
        start, end = self._source.span(statement)
        modules = {line.module for line in lines if line.name}
        same_names = [(line.name, line.asname) for line in lines] == [
            (one.name, one.asname or "") for one in statement.names
        ]
        match = re.compile(rf"from\s+({re.escape(module)})(?=\s)").match(self._source.text, start)
        if match and len(modules) == 1 and same_names and not stays:
            self.edits.append(Edit(*match.span(1), modules.pop()))
            return
        if "#" in self._source.text[start:end]:
            self.remarks.append(
                (
                    statement.lineno,
                    module,
                    "the statement has comments inside and must be divided: do that by hand",
                )
            )
            return
        self.edits.append(Edit(start, end, self._joined([*_grouped(lines), *_grouped(stays)], start, end)))

    def _remark_lookup(self, imported: Imported, ours: str) -> None:
        found = resolve(ours)
        if found.state == "unknown":
            reason = f"{ours} could not be looked up here ({found.remark})"
        elif found.remark:
            reason = f"{ours} is not supported: {found.remark}"
        else:
            return
        self.remarks.append((imported.statement.lineno, imported.target, reason))

    def _joined(self, statements: list[str], start: int, end: int) -> str:
        indent = self._source.indent_before(start)
        if indent is None or not self._source.ends_line(end):
            return "; ".join(statements)
        return f"{self._source.newline_at(start)}{indent}".join(statements)


def _new_line(imported: Imported, ours: str) -> _Line:
    """Return the import of one name. Whole modules are imported as such, as docs/migration.md has it."""
    alias = imported.alias
    asname = alias.asname or alias.name
    if imported.target == "ray.train":
        return _Line("powertrain", "", asname)
    if imported.target == "ray.data":
        return _Line("powertrain.data", "", asname)
    if alias.name == "*":
        return _Line(ours, "*")
    above, _, last = ours.rpartition(".")
    return _Line(above, last, asname if asname != last else "")


def _grouped(lines: list[_Line]) -> list[str]:
    """Return the statements for some imports, those of one module together, in the order of their first name."""
    modules = [line for line in lines if not line.name]
    texts = [f"import {', '.join(line.words for line in modules)}"] if modules else []
    for module in dict.fromkeys(line.module for line in lines if line.name):
        names = ", ".join(line.words for line in lines if line.name and line.module == module)
        texts.append(f"from {module} import {names}")
    return texts


def _blocks(tree: ast.AST) -> list[list[ast.stmt]]:
    """Return every list of statements of a program."""
    blocks = []
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                blocks.append(value)
    return blocks
