"""Stage 2: cuts modules by the plan, and sends importers to the new homes."""
import ast, re, sys, os, subprocess
from collections import defaultdict
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import plan
from mover import Edits, MARK, run, mod
from splitter import split, Module
from inner import rewrite_inner
import split_choices as choices
from split_docs import DOCS

ROOT = Path(sys.argv[1])
CHECK = "--check" in sys.argv

def path_of(module):
    p = ROOT / "src" / (module.replace(".", "/") + ".py")
    if p.exists() or not (p.parent / p.stem / "__init__.py").exists(): return p
    return p.with_suffix("") / "__init__.py"

for file, old, new, *count in choices.PRE:
    p = ROOT / file; t = p.read_text()
    assert t.count(old) >= 1, (file, old)
    p.write_text(t.replace(old, new))

results, homes, problems, sources = {}, {}, [], {}
reexported = set(); users = {}; imported = set()
order = []
for src, targets in plan.SPLITS.items():
    at = plan.MOVES.get(src, src); me = mod(at)
    names = {}
    for target, listed in targets.items():
        t = mod(choices.TARGETS.get(target, target))
        for n in listed: names[n] = t
    names.update({n: t for n, t in choices.HOMES.get(me, {}).items()})
    text = path_of(me).read_text()
    default = choices.DEFAULT.get(me, me)
    out, moved, trouble = split(text, me, names, default, DOCS, choices.RENAMES.get(me), choices.KEEP.get(me, ()), me.removeprefix('powertrain.') in choices.STAYS)
    problems += trouble
    for t, body in out.items(): results.setdefault(t, []).append((me, body))
    for n, (t, new) in moved.items(): homes[(me, n)] = (t, new)
    for local, (line, typed) in Module(text).imports.items():
        users[(me, local)] = [t for t, body in out.items() if re.search(rf'\b{local}\b', re.sub(r'(?m)^(from|import) .*$', '', body))]
        if local not in moved: imported.add((me, local))
        got = re.match(r"from (powertrain[\w.]*) import (\w+)$", line)
        if got and local not in moved: moved[local] = (got[1], got[2]); reexported.add((me, local))
    sources[me] = moved
for me, moved in sources.items():
    for n, (t, new) in list(moved.items()):
        if t in sources and t != me and new in sources[t]: moved[n] = sources[t][new]
problems = [p for p in dict.fromkeys(problems) if not ("unplaced" in p and p.split(":")[0].removeprefix("powertrain.") in choices.STAYS)]
for p in problems: print("PROBLEM", p)
missing = [t for t in results if t not in DOCS and t not in sources and not path_of(t).exists()]
if missing: print("no doc:", missing)
if CHECK: sys.exit(bool(problems or missing))

# write
def merge(bodies):
    """Two bodies for one module: imports and statements after one another."""
    heads = []; typed = []; rest = []
    doc = None
    for me, body in bodies:
        m = ast.parse(body); lines = body.split("\n")
        doc = doc or ast.get_docstring(m, clean=False)
        last = 0
        for n in m.body[1:] if ast.get_docstring(m) else m.body:
            seg = "\n".join(lines[min([n.lineno, *[d.lineno for d in getattr(n, "decorator_list", [])]])-1:n.end_lineno])
            if isinstance(n, (ast.Import, ast.ImportFrom)):
                if getattr(n, "module", "") != "__future__": heads.append(seg)
                last = n.end_lineno
            elif isinstance(n, ast.If) and "TYPE_CHECKING" in seg.split("\n")[0]:
                typed += seg.split("\n")[1:]; last = n.end_lineno
        rest.append("\n".join(lines[last:]))
    t = f'"""{doc}"""\n\nfrom __future__ import annotations\n\n' + "\n".join(dict.fromkeys(heads)) + "\n"
    if typed: t += "if TYPE_CHECKING:\n" + "\n".join(dict.fromkeys(typed)) + "\n"
    return t + "\n".join(rest)
emptied = [me for me in sources if me not in results]
for t, bodies in results.items():
    p = path_of(t); p.parent.mkdir(parents=True, exist_ok=True)
    if len(bodies) == 1 and (t in sources or not p.exists()): text = bodies[0][1]
    elif p.exists() and t not in sources: text = merge([("", p.read_text()), *bodies])
    else: text = merge(bodies)
    # what a module imports from itself
    text = re.sub(rf"^ *from {re.escape(t)} import [^\n(]*\n", "", text, flags=re.M)
    p.write_text(text)
for me in emptied:
    p = path_of(me); doc = ast.get_docstring(ast.parse(p.read_text()), clean=False)
    p.write_text(f'"""{doc}"""\n')

# importers
def where(full, name):
    found = users.get((full, name), [])
    if len(found) > 1: print('several users', full, name, found)
    return (found[0], name) if found else None

def retarget(text, me):
    try: tree = ast.parse(text)
    except SyntaxError: return strings(text)
    ed = Edits(text)
    bound = set()
    for n in ast.walk(tree):
        if isinstance(n, ast.Name): bound.add(n.id)
        elif isinstance(n, ast.arg): bound.add(n.arg)
        elif isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)): bound.add(n.name)
        elif isinstance(n, (ast.Import, ast.ImportFrom)):
            for a in n.names: bound.add((a.asname or a.name).split(".")[0])
    renames, modules = {}, {}   # local name -> new local name ; local -> split module
    plans = []
    taken = {}
    def refer(home):
        pkg, base = home.rsplit(".", 1)
        if taken.get(base) == home: return base, f"from {pkg} import {base}"
        if base not in bound and base not in taken:
            taken[base] = home; return base, f"from {pkg} import {base}"
        alias = f"{pkg.rsplit('.', 1)[-1]}_{base}"
        taken[alias] = home
        return alias, f"from {pkg} import {base} as {alias}"
    for n in ast.walk(tree):
        if not isinstance(n, ast.ImportFrom) or n.level or not (n.module or "").startswith("powertrain"): continue
        direct = n.module in sources
        mods = [a for a in n.names if f"{n.module}.{a.name}" in sources]
        if not direct and not mods: continue
        out = defaultdict(list); extra = []
        for a in n.names:
            full = f"{n.module}.{a.name}"
            if direct and a.name in sources[n.module]:
                home, new = sources[n.module][a.name]
                if home == me: continue
                if a.asname: s = f"{new} as {a.asname}" if a.asname != new else new
                elif new == a.name: s = new
                elif new not in bound: s = new; renames[a.name] = new
                else: s = f"{new} as {a.name}"
                out[home].append(s)
            elif full in sources:
                modules[a.asname or a.name] = full
                plans.append(("module", n, a.asname or a.name, full))
                extra.append((a.asname or a.name, full))
            else: out[n.module].append(a.name + (f" as {a.asname}" if a.asname else ""))
        plans.append(("import", n, out, extra))
    needs = defaultdict(set)    # import-from node's line -> import lines
    left = set()
    parents = {}
    for p in ast.walk(tree):
        for c in ast.iter_child_nodes(p): parents[c] = p
    lines_for = defaultdict(set)
    for n in ast.walk(tree):
        if isinstance(n, ast.Name) and n.id in renames:
            ed.add(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, renames[n.id])
        if isinstance(n, ast.Name) and n.id in modules:
            p = parents[n]; full = modules[n.id]
            if isinstance(p, ast.Attribute):
                hit = sources[full].get(p.attr) if (full, p.attr) not in imported else where(full, p.attr)
                if not hit: left.add(n.id); continue
                home, new = hit
                if home == full:
                    left.add(n.id)
                    if new != p.attr: ed.add(p.end_lineno, p.end_col_offset - len(p.attr), p.end_lineno, p.end_col_offset, new)
                    continue
                if home == me: ed.add(n.lineno, n.col_offset, p.end_lineno, p.end_col_offset, new); continue
                if re.match(r"[A-Z][A-Za-z]*[a-z]", new) and (new not in bound or taken.get(new) == home):
                    taken[new] = home; bound.add(new)
                    lines_for[n.id].add(f"from {home} import {new}")
                    ed.add(n.lineno, n.col_offset, p.end_lineno, p.end_col_offset, new)
                else:
                    ref, line = refer(home); lines_for[n.id].add(line)
                    ed.add(n.lineno, n.col_offset, p.end_lineno, p.end_col_offset, f"{ref}.{new}")
            elif isinstance(p, ast.Call) and n in p.args and p.args.index(n) + 1 < len(p.args) and isinstance(p.args[p.args.index(n) + 1], ast.Constant):
                c = p.args[p.args.index(n) + 1]
                hit = sources[full].get(c.value) if (full, c.value) not in imported else where(full, c.value)
                if not hit: left.add(n.id); continue
                home, new = hit
                if new != c.value: ed.add(c.lineno, c.col_offset, c.end_lineno, c.end_col_offset, f'"{new}"')
                if home == full: left.add(n.id); continue
                ref, line = refer(home); lines_for[n.id].add(line)
                ed.add(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, ref)
            else: left.add(n.id); print("bare use", me or "?", n.id, n.lineno)
    for kind, n, *more in plans:
        if kind != "import": continue
        out, extra = more
        lines = [f"from {h} import {', '.join(v)}" for h, v in out.items()]
        for local, full in extra:
            lines += sorted(lines_for[local])
            if local in left:
                pkg, base = full.rsplit(".", 1)
                lines.append(f"from {pkg} import {base}" + (f" as {local}" if local != base else ""))
        if not lines: lines = ["pass"] if n.col_offset else [""]
        ed.add(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, ("\n" + " " * n.col_offset).join(l.replace("powertrain", MARK, 1) for l in lines))
    return strings(ed.done()).replace(MARK, "powertrain")

def strings(text):
    def one(m):
        full, sep, name = m[1], m[2], m[3]
        hit = sources.get(full, {}).get(name)
        if f"{full}.{name}" in results and sep == "." and re.search(r"(from|import) $", text[max(0, m.start() - 7):m.start()]): return m[0]
        return f"{hit[0]}{sep}{hit[1]}" if hit else m[0]
    names = "|".join(sorted((re.escape(s) for s in sources), key=len, reverse=True))
    def imports(m):
        out = defaultdict(list)
        for n in re.split(r",\s*", m[2].strip()):
            hit = sources[m[1]].get(n)
            out[hit[0] if hit else m[1]].append((hit[1] if hit else n) + (f" as {n}" if hit and hit[1] != n else ""))
        return "; ".join(f"from {h.replace('powertrain', MARK, 1)} import {', '.join(v)}" for h, v in out.items())
    text = re.sub(rf"from ({names}) import ([A-Za-z_]\w*(?:, ?[A-Za-z_]\w*)*)", imports, text)
    return re.sub(rf"(?<![\w./])({names})([.:])(\w+)\b", one, text)

tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\n")
for f in tracked:
    p = ROOT / f
    if not p.exists() or f == "CHANGELOG.md": continue
    if f.endswith(".py"):
        old = p.read_text(); new = rewrite_inner(old, lambda t: retarget(t, None).replace('powertrain', MARK)); new = retarget(new, mod(f) if f.startswith("src/") else None).replace(MARK, 'powertrain')
        if new != old: p.write_text(new)
    elif f.endswith((".md", ".toml")):
        old = p.read_text(); new = strings(old)
        if new != old: p.write_text(new)
