"""Imports of a program, and every use of the imported names, by Python's rules of scopes. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, eq=False)
class Imported:
    """One name that an import statement binds: ``target`` is the dotted name that it stands for."""

    name: str
    target: str
    alias: ast.alias
    statement: ast.Import | ast.ImportFrom


@dataclass(eq=False)
class Scope:
    """A module, class, function or comprehension, and the names that it binds."""

    parent: Scope | None
    is_class: bool = False
    imports: dict[str, list[Imported]] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    outer: dict[str, Scope] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Use:
    """A name that is read, with the attributes after it: ``ray.train.report`` has two."""

    name: ast.Name
    attributes: tuple[ast.Attribute, ...]
    scope: Scope
    call: ast.Call | None = None
    in_text: ast.JoinedStr | None = None

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(one.attr for one in self.attributes)


class ProgramReader(ast.NodeVisitor):
    """Collects imports and uses. ``binding_of`` says afterwards what a use refers to."""

    def __init__(self, tree: ast.Module) -> None:
        self.top = Scope(None)
        self.imports: list[Imported] = []
        self.uses: list[Use] = []
        self.texts: list[ast.Constant] = []
        self.bound: set[str] = set()
        self._scopes: dict[Imported, Scope] = {}
        self._scope = self.top
        self._text: ast.JoinedStr | None = None
        self.visit(tree)

    def scope_of(self, imported: Imported) -> Scope:
        """Return the scope that an import binds its name in."""
        return self._scopes[imported]

    def binding_of(self, use: Use) -> tuple[Scope, list[Imported]]:
        """Return the imports that bind the used name, and their scope; none where it is bound in another way."""
        name = use.name.id
        scope: Scope | None = use.scope
        while scope is not None:
            owner = scope.outer.get(name, scope)
            visible = not owner.is_class or owner is use.scope
            if visible and name in owner.imports:
                return owner, owner.imports[name]
            if visible and name in owner.others:
                return owner, []
            scope = scope.parent
        return self.top, []

    # ----------------------------------------------------------------------- bindings

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            target = alias.name if alias.asname else top
            self._bind_import(Imported(alias.asname or top, target, alias, node))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            for alias in node.names:
                self._bind(alias.asname or alias.name)
            return
        for alias in node.names:
            self._bind_import(
                Imported(alias.asname or alias.name, f"{node.module}.{alias.name}", alias, node)
            )

    def _bind_import(self, imported: Imported) -> None:
        scope = self._scope.outer.get(imported.name, self._scope)
        scope.imports.setdefault(imported.name, []).append(imported)
        self._scopes[imported] = scope
        self.imports.append(imported)

    def _bind(self, name: str) -> None:
        self.bound.add(name)
        self._scope.outer.get(name, self._scope).others.add(name)

    def visit_Global(self, node: ast.Global) -> None:
        self._scope.outer.update(dict.fromkeys(node.names, self.top))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        if self._scope.parent is not None:
            self._scope.outer.update(dict.fromkeys(node.names, self._scope.parent))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self._bind(node.rest)
        self.generic_visit(node)

    # ----------------------------------------------------------------------- scopes

    def _visit_function(self, node: Function) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [one for one in (arguments.vararg, arguments.kwarg) if one is not None]
        outside: list[ast.AST] = [*arguments.defaults, *(one for one in arguments.kw_defaults if one)]
        outside += [one.annotation for one in every if one.annotation is not None]
        if not isinstance(node, ast.Lambda):
            self._bind(node.name)
            outside += node.decorator_list
            outside += [node.returns] if node.returns is not None else []
        self._visit_all(outside)
        with_arguments = Scope(self._scope)
        with_arguments.others.update(one.arg for one in every)
        self.bound.update(with_arguments.others)
        self._inside(with_arguments, [node.body] if isinstance(node, ast.Lambda) else node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._visit_function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._bind(node.name)
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords])
        self._inside(Scope(self._scope, is_class=True), node.body)

    def _visit_comprehension(self, node: ast.AST) -> None:
        self._inside(Scope(self._scope), ast.iter_child_nodes(node))

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _visit_comprehension

    def _inside(self, scope: Scope, nodes: Iterable[ast.AST]) -> None:
        before, self._scope = self._scope, scope
        self._visit_all(nodes)
        self._scope = before

    def _visit_all(self, nodes: Iterable[ast.AST]) -> None:
        for node in nodes:
            self.visit(node)

    # ----------------------------------------------------------------------- uses

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        before, self._text = self._text, self._text or node
        self.generic_visit(node)
        self._text = before

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and self._text is None:
            self.texts.append(node)

    def visit_Call(self, node: ast.Call) -> None:
        if not self._record(node.func, node):
            self.visit(node.func)
        self._visit_all([*node.args, *node.keywords])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not self._record(node, None):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self._record(node, None)

    def _record(self, node: ast.AST, call: ast.Call | None) -> bool:
        """Record a name with its attributes; returns False where the first is not a name."""
        *attributes, root = _chain(node)
        if not isinstance(root, ast.Name):
            return False
        if isinstance(root.ctx, ast.Load):
            ordered = tuple(one for one in reversed(attributes) if isinstance(one, ast.Attribute))
            self.uses.append(Use(root, ordered, self._scope, call, self._text))
        else:
            self._bind(root.id)
        return True


def _chain(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the attributes of a dotted name from the last to the first, then what they are attributes of."""
    while isinstance(node, ast.Attribute):
        yield node
        node = node.value
    yield node
