"""Names that tests patch on a module although other modules have imported them by name."""
import ast, sys
from pathlib import Path
ROOT = Path(".")
mods = {}
for p in (ROOT/"src").rglob("*.py"):
    name = ".".join(p.relative_to(ROOT/"src").with_suffix("").parts).removesuffix(".__init__"); mods[name] = ast.parse(p.read_text())
importers = {}
for m, tree in mods.items():
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module in mods and n.col_offset == 0:
            for a in n.names: importers.setdefault((n.module, a.name), []).append(m)
for p in [*(ROOT/"tests").rglob("*.py"), *(ROOT/"benchmarks").rglob("*.py")]:
    tree = ast.parse(p.read_text()); local = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.ImportFrom) and n.module:
            for a in n.names:
                if f"{n.module}.{a.name}" in mods: local[a.asname or a.name] = f"{n.module}.{a.name}"
    for n in ast.walk(tree):
        hit = None
        if isinstance(n, ast.Call) and len(n.args) >= 2 and isinstance(n.args[0], ast.Name) and n.args[0].id in local and isinstance(n.args[1], ast.Constant): hit = (local[n.args[0].id], n.args[1].value)
        if isinstance(n, ast.Call) and n.args and isinstance(n.args[0], ast.Constant) and isinstance(n.args[0].value, str) and n.args[0].value.startswith("powertrain.") and "." in n.args[0].value:
            m, _, a = n.args[0].value.rpartition("."); hit = (m, a) if m in mods else None
        if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Attribute) and isinstance(n.targets[0].value, ast.Name) and n.targets[0].value.id in local: hit = (local[n.targets[0].value.id], n.targets[0].attr)
        if hit and hit in importers: print(p, n.lineno, hit[0].removeprefix("powertrain."), hit[1], "->", [x.removeprefix("powertrain.") for x in importers[hit]])
        if hit and hit[0] in mods:
            names = {t for s in ast.walk(mods[hit[0]]) for t in ([s.name] if isinstance(s, (ast.FunctionDef, ast.ClassDef)) else [s.id] if isinstance(s, ast.Name) else [(a.asname or a.name).split(".")[0] for a in s.names] if isinstance(s, (ast.Import, ast.ImportFrom)) else [])}
            if hit[1].split(".")[0] not in names: print("ABSENT", p, n.lineno, hit)
