"""Renames modules in a tree: git mv, then imports, uses, dotted strings and paths."""
import ast, os, re, subprocess, sys
from pathlib import Path

def run(*a, cwd): return subprocess.run(a, cwd=cwd, check=True, capture_output=True, text=True).stdout

def mod(path):
    return path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")

MARK = "power\x01train"

class Edits:
    """Replacements at (line, col) ranges of one text; cols are utf8 byte offsets as ast gives them."""
    def __init__(self, text):
        self.lines = text.encode().split(b"\n"); self.items = []
        self.starts = [0]
        for l in self.lines: self.starts.append(self.starts[-1] + len(l) + 1)
        self.data = text.encode()
    def add(self, l1, c1, l2, c2, new): self.items.append((self.starts[l1-1]+c1, self.starts[l2-1]+c2, new.encode()))
    def done(self):
        data = self.data
        seen = None
        for a, b, new in sorted(set(self.items), reverse=True):
            assert seen is None or b <= seen, "overlap"
            data = data[:a] + new + data[b:]; seen = a
        return data.decode()

def rewrite_python(text, moved, packages, me_old=None, me_new=None):
    """moved: old module -> new module."""
    try: tree = ast.parse(text)
    except SyntaxError: return rewrite_dotted(text, moved)
    edits = Edits(text)
    bound = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    for n in ast.walk(tree):
        if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)): bound.add(n.name)
        if isinstance(n, (ast.Import, ast.ImportFrom)):
            for a in n.names: bound.add((a.asname or a.name).split(".")[0])
    renames = {}
    defs = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef))} | {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)} | {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("powertrain") and not n.level:
            hits = [a for a in n.names if f"{n.module}.{a.name}" in moved]
            if not hits: continue
            out = {}
            for a in n.names:
                full = f"{n.module}.{a.name}"
                if full in moved:
                    newmod = moved[full]; pkg, base = newmod.rsplit(".", 1)
                    local = a.asname or a.name
                    if a.asname: s = f"{base} as {a.asname}" if a.asname != base else base
                    elif base == a.name: s = base
                    elif base not in bound and base not in renames.values() and a.name not in defs:
                        s = base; renames[a.name] = base
                    elif renames.get(a.name) == base: s = base
                    else: s = f"{base} as {a.name}"
                else:
                    pkg = moved.get(n.module, n.module); s = a.name + (f" as {a.asname}" if a.asname else "")
                out.setdefault(pkg, []).append(s)
            indent = " " * n.col_offset
            new = ("\n" + indent).join(f"from {p.replace('powertrain', MARK, 1)} import {', '.join(v)}" for p, v in out.items())
            edits.add(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, new)
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id in renames:
            edits.add(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, renames[n.id])
    return rewrite_dotted(rewrite_import_strings(edits.done(), moved), moved).replace(MARK, "powertrain")

DOTTED = re.compile(r"(?<![\w./])powertrain(?:\.[A-Za-z_]\w*)+")
def rewrite_dotted(text, moved):
    def one(m):
        parts = m[0].split(".")
        for k in range(len(parts), 1, -1):
            name = ".".join(parts[:k])
            if name in moved and moved[name] != name: return ".".join([moved[name], *parts[k:]])
        return m[0]
    # lines that rewrite_python wrote already name new modules: protect by marking is not needed, new names never are old names of others,
    # except where they are (see PROTECT)
    return DOTTED.sub(one, text)

def rewrite_import_strings(text, moved):
    """Programs in strings: the local name stays."""
    def one(m):
        out = []
        for n in re.split(r",\s*", m[2]):
            full = f"{m[1]}.{n}"
            if full in moved:
                pkg, base = moved[full].rsplit(".", 1)
                out.append(f"from {pkg.replace('powertrain', MARK, 1)} import {base}" + (f" as {n}" if base != n else ""))
            else: out.append(f"from {m[1].replace('powertrain', MARK, 1)} import {n}")
        return "; ".join(out) if any(f"{m[1]}.{n}" in moved for n in re.split(r",\s*", m[2])) else m[0]
    return re.sub(r"from (powertrain[\w.]*) import (\w+(?:, ?\w+)*)(?! as)", one, text)

def rewrite_paths(text, files):
    def one(m): return files.get("src/" + m[1], "src/" + m[1]).removeprefix("src/")
    return re.sub(r"(?<![\w])(powertrain/[\w/]+\.py)", one, text)
