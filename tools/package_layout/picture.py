"""Draws the tree of docs/architecture.md anew: words of moved files stay, those of new files come from their docstrings."""
import ast, re, sys, subprocess
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent))
import plan, stage3_texts
ROOT = Path(sys.argv[1]); SRC = ROOT / "src/powertrain"; BASE = sys.argv[2]
doc = subprocess.run(["git", "show", f"{BASE}:docs/architecture.md"], cwd=ROOT, capture_output=True, text=True).stdout
now = (ROOT / "docs/architecture.md").read_text()
LINE = re.compile(r"^(?P<indent>(?:  )*)(?P<name>[\w.]+/?)(?P<words>\s{2,}\S.*)?$")
def drawn(document):
    block = re.search(r"^## The house\n.*?^```\n(.*?)^```", document, re.S | re.M)
    out, folders = {}, []
    for text in block[1].splitlines()[1:]:
        l = LINE.match(text); depth = len(l["indent"]) // 2 - 1
        folders[depth:] = [l["name"].rstrip("/")]; out["/".join(folders)] = (l["words"] or "").strip()
    return out
old = drawn(doc)
move = {a.removeprefix("src/powertrain/"): b.removeprefix("src/powertrain/") for a, b in plan.MOVES.items()}
words, rank = {}, {}
for i, (path, w) in enumerate(old.items()):
    new = move.get(path, path); words[new] = w; rank[new] = i
    for target in plan.SPLITS.get("src/powertrain/" + path, {}):
        t = __import__("split_choices").TARGETS.get(target, target).removeprefix("src/powertrain/"); rank.setdefault(t, i + 0.5)
def sentence(p):
    d = (ast.get_docstring(ast.parse(p.read_text())) or "").split("\n\n")[0].replace("\n", " ")
    d = re.split(r"(?<=[a-z)`])\. ", d)[0].rstrip(".").replace("``", "")
    return d[:1].lower() + d[1:] if not re.match(r"[A-Z]\w*[A-Z]", d) else d
TOP = ["__init__.py", "version.py", "errors.py", "functions.py", "backend.py", "trainer.py", "tasks.py", "collective.py", "text", "values", "config", "wire", "storage"]
def key(path):
    if "/" not in path and path in TOP: return (0, TOP.index(path), path)
    r = rank.get(path)
    if r is None: r = min([v for k, v in rank.items() if k.startswith(path + "/")], default=999)
    return (1, r, path)
def show(folder, depth, out):
    items = [p for p in folder.iterdir() if (p.is_dir() and any(p.rglob("*.py"))) or (p.suffix == ".py" and (p.name != "__init__.py" or folder == SRC))]
    rel = lambda p: str(p.relative_to(SRC))
    for p in sorted(items, key=lambda p: key(rel(p))):
        r = rel(p)
        if p.is_dir():
            w = words.get(r) or sentence(p / "__init__.py")
            out.append(("  " * depth + p.name + "/", w)); show(p, depth + 1, out)
        else:
            w = words.get(r) if r in words and not words[r].isupper() else sentence(p)
            out.append(("  " * depth + p.name, w))
out = []; show(SRC, 1, out)
width = max(len(a) for a, _ in out) + 2
text = "src/powertrain/\n" + "".join(f"{a:<{width}}{w}\n" for a, w in out)
now = re.sub(r"(^## The house\n.*?^```\n).*?(^```)", lambda m: m[1] + text + m[2], now, count=1, flags=re.S | re.M)
(ROOT / "docs/architecture.md").write_text(now)
