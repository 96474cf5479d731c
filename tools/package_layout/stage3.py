"""Stage 3: faces, documents of packages, uses that the other stages cannot see."""
import ast, re, sys, subprocess
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
ROOT = Path(sys.argv[1]); SRC = ROOT / "src/powertrain"
# --- lazy tables follow the imports for type checkers beside them
for p in SRC.rglob("__init__.py"):
    text = p.read_text()
    if '": "powertrain.' not in text and '_HOMES = {' not in text: continue
    tree = ast.parse(text); typed = {}
    for n in ast.walk(tree):
        if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test):
            for x in n.body:
                if isinstance(x, ast.ImportFrom):
                    for a in x.names: typed[a.asname or a.name] = x.module
    for n in tree.body:
        value = getattr(n, "value", None); target = n.targets[0] if isinstance(n, ast.Assign) else getattr(n, "target", None)
        if isinstance(value, ast.Dict) and isinstance(target, ast.Name):
            try: old = ast.literal_eval(value); new = {}
            except ValueError: continue
            if not all(isinstance(v, (str, tuple)) for v in old.values()): continue
            if not old or not all(isinstance(x, str) and x.startswith('powertrain.') for k, v in old.items() for x in ([k] if isinstance(v, tuple) else [v])): continue
            if all(isinstance(v, tuple) for v in old.values()):
                for module, names in old.items():
                    for name in names: new.setdefault(typed.get(name, module), []).append(name)
                new = {k: tuple(v) for k, v in sorted(new.items())}
            else: new = {name: typed.get(name, module.split(':')[0]) + (':' + module.split(':')[1] if ':' in module else '') for name, module in old.items()}
            if new != old:
                lines = text.split("\n")
                lines[value.lineno-1:n.end_lineno] = [lines[value.lineno-1][:value.col_offset] + repr(new)]
                p.write_text("\n".join(lines))
# --- the face of the configs
p = SRC / "config/__init__.py"; text = p.read_text()
homes = {"BackendConfig": "backend"}
for q in sorted((SRC / "config").glob("*.py")) + [SRC / "torch/config.py", SRC / "backend.py"]:
    if q.name == "__init__.py": continue
    for n in ast.parse(q.read_text()).body:
        for name in ([n.name] if isinstance(n, (ast.ClassDef, ast.FunctionDef)) else [t.id for t in getattr(n, "targets", []) if isinstance(t, ast.Name)]):
            homes.setdefault(name, ".".join(q.relative_to(SRC).with_suffix("").parts))
names = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", text, re.S)[1])
text = text[:text.index("from __future__")]
by = {}
for n in names: by.setdefault(homes[n], []).append(n)
text += "from __future__ import annotations\n\nfrom importlib import import_module\nfrom typing import TYPE_CHECKING, Any\n\nif TYPE_CHECKING:\n"
text += "".join(f"    from powertrain.{m} import {n} as {n}\n" for m, ns in by.items() for n in ns)
text += "\n#: Where each public name is; each is loaded when it is first used.\n_HOMES = " + repr({n: "powertrain." + homes[n] for n in names})
text += "\n\n__all__ = " + repr(names) + '''


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
'''
p.write_text(text)
# --- packages
import stage3_texts as t
for name, doc in t.PACKAGES.items():
    p = SRC / name / "__init__.py"
    assert p.read_text().strip() in ('"""."""', ""), (name, p.read_text()[:80])
    p.write_text(f'"""{doc}"""\n')
for q in SRC.rglob("__init__.py"):
    s = q.read_text()
    if s.strip() == '"""."""': print("no text for package", q.parent.relative_to(SRC))
    if re.fullmatch(r'(""".*""")\s+from __future__ import annotations\s+(__all__ = \[[^\]]*\]\s*)?', s, re.S):
        q.write_text(re.match(r'(""".*?""")', s, re.S)[1] + "\n")
for file, old, new in t.EDITS:
    p = ROOT / file; s = p.read_text()
    if old not in s: print("NO EDIT", file, repr(old[:70])); continue
    p.write_text(s.replace(old, new))
