"""Circles among modules of TREE, counting lazy and type-only imports; prints edges within each."""
import ast, sys
from pathlib import Path
ROOT = Path(sys.argv[1]) / "src"
mods = {}
for p in ROOT.rglob("*.py"):
    name = ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    mods[name] = p
edges = {}
for name, p in mods.items():
    tree = ast.parse(p.read_text()); out = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module and n.module.startswith("powertrain"):
            for a in n.names:
                full = f"{n.module}.{a.name}"
                t = full if full in mods else n.module
                if t in mods and t != name: out.setdefault(t, []).append(a.name + ("" if n.col_offset == 0 else "*"))
        elif isinstance(n, ast.Import):
            for a in n.names:
                if a.name in mods and a.name != name: out.setdefault(a.name, []).append("import")
    edges[name] = out
def sccs():
    index, low, stack, on, res, i = {}, {}, [], set(), [], [0]
    sys.setrecursionlimit(10000)
    def go(v):
        index[v] = low[v] = i[0]; i[0] += 1; stack.append(v); on.add(v)
        for w in edges[v]:
            if w not in index: go(w); low[v] = min(low[v], low[w])
            elif w in on: low[v] = min(low[v], index[w])
        if low[v] == index[v]:
            c = []
            while True:
                w = stack.pop(); on.discard(w); c.append(w)
                if w == v: break
            if len(c) > 1: res.append(c)
    for v in edges:
        if v not in index: go(v)
    return res
for c in sccs():
    if "powertrain" in c and len(c) > 40: print("big with face:", len(c))
    print("CIRCLE", len(c))
    for a in sorted(c):
        for b, names in edges[a].items():
            if b in c: print("   ", a.removeprefix("powertrain."), "->", b.removeprefix("powertrain."), names)
