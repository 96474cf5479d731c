"""Rewrite a program: imports and uses of Ray and TraceML become those of Powertrain, where it has the name.

A name that Powertrain does not have keeps its import from Ray, so that the program still says what it needs; it is
listed as a remark for the user. Texts in quotes are left alone.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from powertrain.cli.migrate import imports
from powertrain.cli.migrate.edits import Edit, SourceText
from powertrain.cli.migrate.resolving import resolve, unknown_arguments
from powertrain.cli.migrate.rules import CORE_NAMES, ROOTS, is_covered, remedy_for, target_of
from powertrain.cli.migrate.scopes import ProgramReader, Scope, Use

_MODULE_IN_TEXT = re.compile(r"(ray\.(train|data|tune)|traceml_ai)(\.\w+)*")
#: Modules of Ray that one use spells out, with the number of attributes.
_SPELLED = (("ray.train.v2.jax", 3), ("ray.train", 1), ("ray.data", 1), ("ray.tune", 1), ("traceml_ai", 0))


@dataclass(frozen=True, order=True)
class MigrationRemark:
    """A name that needs a person: why, and the line of its first use."""

    line: int
    name: str
    reason: str


@dataclass(frozen=True)
class Rewriting:
    """The changes of one program, and what is left for a person."""

    edits: list[Edit]
    remarks: list[MigrationRemark]


def rewrite(text: str, parsed: str | None = None) -> Rewriting:
    """Return the changes of a program.

    Args:
        text: The program.
        parsed: The same text with parts masked that are not Python, such as commands of a notebook; equally long.

    Raises:
        SyntaxError: It is not a program of this version of Python.
    """
    rewriter = _Rewriter(SourceText(text), ast.parse(parsed if parsed is not None else text))
    first: dict[tuple[str, str], MigrationRemark] = {}
    for remark in sorted(set(rewriter.remarks)):
        first.setdefault((remark.name, remark.reason), remark)
    return Rewriting(sorted(set(rewriter.edits)), list(first.values()))


@dataclass(frozen=True)
class _Change:
    """What becomes of one use: the first attributes are replaced by ``prefix``."""

    use: Use
    prefix: str
    replaced: int


class _Rewriter:
    def __init__(self, source: SourceText, tree: ast.Module) -> None:
        self.source = source
        self.edits: list[Edit] = []
        self.remarks: list[MigrationRemark] = []
        self._reader = ProgramReader(tree)
        if "powertrain" in self._reader.bound and any(is_covered(one.target) for one in self._reader.imports):
            self._remark(
                1, "powertrain", "the program has a name of its own that is spelled so: rename it first"
            )
            return
        groups = self._grouped()
        stays = {key: self._rewrite_uses(key[1], uses) for key, uses in groups.items()}
        self._check_moved(groups)
        statements = imports.ImportRewriter(source, tree, self._reader, stays)
        self.edits += statements.edits
        for line, name, reason in statements.remarks:
            self._remark(line, name, reason)
        self._note_texts()

    def _remark(self, line: int, name: str, reason: str) -> None:
        self.remarks.append(MigrationRemark(line, name, reason))

    def _grouped(self) -> dict[tuple[Scope, str], list[Use]]:
        """Return the uses of each name that an import of ours binds; imports without a use have none."""
        groups: dict[tuple[Scope, str], list[Use]] = {}
        for imported in self._reader.imports:
            scope = self._reader.scope_of(imported)
            if is_covered(imported.target):
                groups.setdefault((scope, imported.name), [])
        for use in self._reader.uses:
            scope, found = self._reader.binding_of(use)
            if found and (scope, use.name.id) in groups:
                groups[scope, use.name.id].append(use)
        return groups

    # ----------------------------------------------------------------------- names of a package itself

    def _rewrite_uses(self, name: str, uses: list[Use]) -> imports.Usage:
        """Rewrite the uses of ``ray`` or ``traceml_ai``; return whether some change and whether some stay."""
        changes, staying = [], []
        root_of = {use: self._target_of(use) for use in uses}
        for use, root in root_of.items():
            if root not in ROOTS:
                continue
            change = self._change_of(use, root)
            if change is None or not self._can_edit(change):
                staying.append(use)
            else:
                changes.append(change)
        # An alias stays when every use of it moves: ``import ray as r`` is then ``import powertrain as r``.
        alias = name if name not in ROOTS and not staying else ""
        for change in changes:
            self._edit(change, alias, str(target_of(root_of[change.use]) or "powertrain"))
        return imports.Usage(bool(changes), bool(staying))

    def _target_of(self, use: Use) -> str:
        _, found = self._reader.binding_of(use)
        return found[0].target if found else ""

    def _change_of(self, use: Use, root: str) -> _Change | None:
        """Return the change of a use; None where it stays, which is remarked upon."""
        full = ".".join((root, *use.members))
        line = use.name.lineno
        if not use.members:
            self._remark(
                line, full, "the module itself is passed on or compared: check what the code does with it"
            )
            return None
        if any(member.startswith("_") for member in use.members):
            self._remark(line, full, "it is internal to the other library")
            return None
        if root == "ray" and use.members[0] in CORE_NAMES:
            change = _Change(use, "powertrain", 0)
        else:
            spelled = next(
                ((theirs, count) for theirs, count in _SPELLED if f"{full}.".startswith(f"{theirs}.")), None
            )
            ours = None if spelled is None else target_of(".".join((root, *use.members)))
            if spelled is None or ours is None:
                self._remark(line, full, f"Powertrain has no counterpart: {remedy_for(full)}")
                return None
            change = _Change(use, str(target_of(spelled[0])), spelled[1])
        name = ".".join((change.prefix, *use.members[change.replaced :]))
        return change if self._check(use, full, name) else None

    def _check(self, use: Use, theirs: str, ours: str) -> bool:
        """Return False where Powertrain does not have the name; remark upon it and on arguments it does not take."""
        found = resolve(ours)
        line = use.name.lineno
        if found.state == "missing":
            self._remark(line, theirs, found.remark or f"Powertrain has no {ours}: {remedy_for(theirs)}")
            return False
        if found.state == "unknown":
            self._remark(line, theirs, f"{ours} could not be looked up here ({found.remark})")
        elif found.remark:
            self._remark(line, theirs, f"{ours} is not supported: {found.remark}")
        elif use.call is not None:
            names = [one.arg for one in use.call.keywords if one.arg is not None]
            for name in unknown_arguments(found.value, names):
                self._remark(line, theirs, f"{ours} has no argument {name!r}")
        return True

    # ----------------------------------------------------------------------- names of modules below it

    def _check_moved(self, groups: dict[tuple[Scope, str], list[Use]]) -> None:
        """Check the uses of names whose text does not change, such as ``train.report`` after ``from ray import train``.

        Names whose import stays with Ray are remarked upon where they are imported.
        """
        for (scope, name), uses in groups.items():
            imported = scope.imports[name][0]
            ours = None if imported.target in ROOTS else imports.moved_target(imported)
            for use in uses:
                full = ".".join((imported.target, *use.members))
                if ours is None:
                    continue
                if use.members and (
                    use.members[0] == "v2" or any(one.startswith("_") for one in use.members)
                ):
                    self._remark(use.name.lineno, full, f"Powertrain has no counterpart: {remedy_for(full)}")
                else:
                    self._check(use, full, ".".join((ours, *use.members)))

    # ----------------------------------------------------------------------- texts

    def _can_edit(self, change: _Change) -> bool:
        spans = list(self._spans(change))
        if not spans:
            text = ".".join((change.use.name.id, *change.use.members))
            self._remark(
                change.use.name.lineno, text, "it is in an f-string whose parts cannot be told apart"
            )
        return bool(spans)

    def _edit(self, change: _Change, alias: str, ours: str) -> None:
        """Change the text of a use; an alias, where it stays, stands for ``ours``."""
        prefix = alias + change.prefix.removeprefix(ours) if alias else change.prefix
        self.edits += [Edit(start, end, prefix) for start, end in self._spans(change)]

    def _spans(self, change: _Change) -> Iterator[tuple[int, int]]:
        """Yield the position of the replaced words; none where they cannot be found."""
        use = change.use
        words = [use.name.id, *use.members[: change.replaced]]
        pattern = re.compile(r"\s*\.\s*".join(map(re.escape, words)))
        last = use.attributes[change.replaced - 1] if change.replaced else use.name
        if use.in_text is None or sys.version_info >= (3, 12):
            start, end = self.source.span(use.name, last)
            if pattern.fullmatch(self.source.text[start:end]):
                yield start, end
            return
        # Before Python 3.12 positions within f-strings are not reliable: there must be as many matches as uses.
        start, end = self.source.span(use.in_text)
        rest = "".join(rf"\s*\.\s*{re.escape(member)}" for member in use.members[change.replaced :])
        bounded = re.compile(rf"(?<![\w.])({pattern.pattern})(?={rest}(?![\w.]|\s*\.))")
        matches = list(bounded.finditer(self.source.text, start, end))
        alike = [
            one
            for one in self._reader.uses
            if one.in_text is use.in_text
            and (one.name.id, one.members) == (use.name.id, use.members)
            and self._target_of(one) == self._target_of(use)
        ]
        if len(matches) == len(alike):
            yield from (match.span(1) for match in matches)

    def _note_texts(self) -> None:
        for constant in self._reader.texts:
            if _MODULE_IN_TEXT.fullmatch(str(constant.value)):
                self._remark(
                    constant.lineno, repr(constant.value), "a name in quotes is left as it is: check its use"
                )
