"""Cuts a module into several: each top-level statement goes to the module that the plan names for it."""
import ast, builtins, re, sys
from collections import defaultdict
from pathlib import Path
from mover import Edits

BUILTINS = set(dir(builtins)) | {"__file__", "__name__", "__doc__"}

def is_type_checking(n): return isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test) and not n.orelse

def defined(node):
    """Names that a top-level statement binds."""
    out = []
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)): out.append(node.name)
    elif isinstance(node, ast.Assign):
        for t in node.targets:
            out += [x.id for x in ast.walk(t) if isinstance(x, ast.Name)]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name): out.append(node.target.id)
    elif isinstance(node, (ast.If, ast.Try, ast.With)):
        for x in ast.walk(node):
            if isinstance(x, ast.Assign): out += [y.id for t in x.targets for y in ast.walk(t) if isinstance(y, ast.Name)]
            elif isinstance(x, (ast.FunctionDef, ast.ClassDef)): out.append(x.name)
    elif hasattr(ast, "TypeAlias") and isinstance(node, getattr(ast, "TypeAlias")): out.append(node.name.id)
    return out

class Uses(ast.NodeVisitor):
    """Names used: at run time, and only in annotations."""
    def __init__(self): self.run, self.types = set(), set(); self.ann = False
    def visit_Name(self, n): (self.types if self.ann else self.run).add(n.id)
    def _ann(self, n):
        if n is None: return
        was, self.ann = self.ann, True; self.visit(n); self.ann = was
    def visit_Constant(self, n):
        if isinstance(n.value, str) and (self.ann or self.in_cast):
            try: t = ast.parse(n.value, mode="eval")
            except SyntaxError: return
            self._ann(t.body)
    in_cast = False
    def visit_Call(self, n):
        f = ast.unparse(n.func)
        if f in ("cast", "typing.cast") and n.args:
            self.visit(n.func)
            was, self.in_cast = self.in_cast, True
            self.visit(n.args[0]); self.in_cast = was
            for a in n.args[1:]: self.visit(a)
        else: self.generic_visit(n)
    def visit_FunctionDef(self, n):
        for d in n.decorator_list: self.visit(d)
        a = n.args
        for x in [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]:
            if x is not None: self._ann(x.annotation)
        for d in [*a.defaults, *a.kw_defaults]:
            if d is not None: self.visit(d)
        self._ann(n.returns)
        for s in n.body: self.visit(s)
    visit_AsyncFunctionDef = visit_FunctionDef
    def visit_AnnAssign(self, n):
        # class bodies of dataclasses, msgspec structs: annotations may be needed at run time
        if self.struct: self.visit(n.annotation)
        else: self._ann(n.annotation)
        self.visit(n.target)
        if n.value: self.visit(n.value)
    struct = False
    def visit_ClassDef(self, n):
        was = self.struct
        text = " ".join(ast.unparse(x) for x in [*n.bases, *n.keywords, *n.decorator_list])
        self.struct = bool(re.search(r"Struct|Message|NamedTuple|TypedDict|tag=|frozen=True, kw|Envelope", text)) and "dataclass" not in text
        for x in [*n.decorator_list, *n.bases, *[k.value for k in n.keywords], *n.body]: self.visit(x)
        self.struct = was

def uses(node):
    u = Uses(); u.visit(node)
    return u.run, u.types - u.run

class Module:
    def __init__(self, text):
        self.text = text; self.lines = text.split("\n"); self.tree = ast.parse(text)
        self.imports = {}       # local name -> (text of a one-name import, is type only)
        self.segments = []      # (first line, last line, node, names)
        body = self.tree.body
        self.doc = ast.get_docstring(self.tree, clean=False)
        end = 0
        for i, n in enumerate(body):
            first = min([n.lineno, *[d.lineno for d in getattr(n, "decorator_list", [])]])
            if i == 0 and isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant): end = n.end_lineno; continue
            if isinstance(n, (ast.Import, ast.ImportFrom)): self._import(n, False); end = n.end_lineno; continue
            if is_type_checking(n) and all(isinstance(x, (ast.Import, ast.ImportFrom, ast.Assign)) for x in n.body) and any(isinstance(x, (ast.Import, ast.ImportFrom)) for x in n.body):
                for x in n.body:
                    if isinstance(x, ast.Assign): self.segments.append((x.lineno, x.end_lineno, x, defined(x), True))
                    else: self._import(x, True)
                end = n.end_lineno; continue
            start = first
            while start - 2 >= end and self.lines[start - 2].strip().startswith("#"): start -= 1
            self.segments.append((start, n.end_lineno, n, defined(n), False)); end = n.end_lineno
    def _import(self, n, typed):
        if isinstance(n, ast.Import):
            for a in n.names:
                self.imports[(a.asname or a.name).split(".")[0]] = (f"import {a.name}" + (f" as {a.asname}" if a.asname else ""), typed)
        elif n.module == "__future__": pass
        else:
            for a in n.names:
                self.imports[a.asname or a.name] = (f"from {n.module} import {a.name}" + (f" as {a.asname}" if a.asname else ""), typed)
    def segment_text(self, s, e): return "\n".join(self.lines[s-1:e])

def split(text, me, homes, default, docs, renames=None, keep_private=(), stays=False):
    """me: module name; homes: name -> module; default: module for the rest.
    Returns {module: text}, {name: (module, new name)}, problems."""
    m = Module(text)
    problems = []
    place = {}
    for idx, (s, e, n, names, typed) in enumerate(m.segments):
        where = {homes[x] for x in names if x in homes}
        if len(where) > 1: problems.append(f"{me}: {names} in {where}")
        place[idx] = where.pop() if where else None
    owner = {}
    for idx, seg in enumerate(m.segments):
        for x in seg[3]: owner[x] = idx
    used = [uses(seg[2]) for seg in m.segments]
    if stays:
        for idx, seg in enumerate(m.segments):
            if place[idx] is None and any(not x.startswith('_') for x in seg[3]): place[idx] = me
    # unplaced: with their only users
    for _ in range(6):
        for idx, seg in enumerate(m.segments):
            if place[idx] is None and seg[3]:
                users = {place[j] for j in range(len(m.segments)) if j != idx and (used[j][0] | used[j][1]) & set(seg[3])}
                if len(users) == 1 and None not in users: place[idx] = users.pop()
    for idx, seg in enumerate(m.segments):
        if place[idx] is None:
            if not seg[3]:   # a statement with effects: with what it uses
                about = [place[owner[x]] for x in used[idx][0] if x in owner and place[owner[x]]]
                place[idx] = max(set(about), key=about.count) if about else default
            else:
                problems.append(f"{me}: unplaced {seg[3]}")
                place[idx] = default
    # globals written by functions must live with them
    for idx, seg in enumerate(m.segments):
        for x in ast.walk(seg[2]):
            if isinstance(x, ast.Global):
                for g in x.names:
                    if g in owner and place[owner[g]] != place[idx]: problems.append(f"{me}: global {g} of {place[owner[g]]} written in {place[idx]}")
    # private names that cross modules lose the underscore
    rename = dict(renames or {})
    all_names = set(m.imports) | set(owner) | {x.id for x in ast.walk(m.tree) if isinstance(x, ast.Name)} | {x.arg for x in ast.walk(m.tree) if isinstance(x, ast.arg)}
    for idx, seg in enumerate(m.segments):
        for x in used[idx][0] | used[idx][1]:
            if x in owner and place[owner[x]] != place[idx] and x.startswith("_") and x not in rename and x not in keep_private:
                new = x.lstrip("_")
                if new in all_names or new in BUILTINS or new in m.imports or keyword(new):
                    problems.append(f"{me}: {x} crosses modules and {new} is taken"); continue
                rename[x] = new
    out, moved = {}, {}
    for x, idx in owner.items(): moved[x] = (place[idx], rename.get(x, x))
    groups = defaultdict(list)
    for idx in range(len(m.segments)): groups[place[idx]].append(idx)
    for target, members in groups.items():
        run, types = set(), set()
        for i in members:
            if m.segments[i][4]: types |= used[i][0] | used[i][1]
            else: run |= used[i][0]; types |= used[i][1]
        types -= run
        own = {x for i in members for x in m.segments[i][3]}
        imports, typed = [], []
        for x in sorted(run | types):
            if x in own: continue
            if x in m.imports:
                t, ty = m.imports[x]
                (typed if ty or (x in types and False) else imports).append(t)
            elif x in owner:
                home, new = moved[x]
                t = f"from {home} import {new}"
                (typed if x in types else imports).append(t)
        doc = docs.get(target, m.doc)
        parts = [f'"""{doc}"""', "", "from __future__ import annotations", ""]
        parts += sorted(set(imports), key=lambda t: (not t.startswith("import"), t)) + [""]
        typed = sorted(set(typed) - set(imports))
        early = [i for i in members if m.segments[i][4]]
        if typed or early:
            if "from typing import TYPE_CHECKING" not in imports: parts.insert(4, "from typing import TYPE_CHECKING")
            parts += ["if TYPE_CHECKING:"] + ["    " + t for t in typed]
            for i in early: parts += [m.segment_text(m.segments[i][0], m.segments[i][1])]
            parts += [""]
        for i in members:
            if m.segments[i][4]: continue
            s, e, n, names, _ = m.segments[i]
            # keep blank lines as the formatter wants them
            gap = 0
            if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)): gap = 2
            elif s >= 2 and m.lines[s-2].strip() == "": gap = 1
            parts += [""] * gap + [m.segment_text(s, e)]
        body = "\n".join(parts) + "\n"
        out[target] = apply_renames(body, rename)
    return out, moved, problems

def keyword(x):
    import keyword as k
    return k.iskeyword(x)

def apply_renames(text, rename):
    if not rename: return text
    tree = ast.parse(text); ed = Edits(text)
    lines = text.split("\n")
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id in rename: ed.add(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, rename[n.id])
        elif isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and n.name in rename and n.col_offset == 0:
            col = lines[n.lineno-1].index(n.name); ed.add(n.lineno, col, n.lineno, col+len(n.name), rename[n.name])
        elif isinstance(n, ast.Constant) and isinstance(n.value, str) and n.value in rename and n.lineno == n.end_lineno:
            pass
        elif isinstance(n, ast.Global):
            for g in n.names:
                if g in rename:
                    line = lines[n.lineno-1]; col = re.search(rf"\b{g}\b", line).start(); ed.add(n.lineno, col, n.lineno, col+len(g), rename[g])
    return ed.done()
