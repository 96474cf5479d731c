"""Names in strings of tests, docs and benchmarks that no longer exist."""
import importlib, re, sys, os
from pathlib import Path
ROOT = Path(sys.argv[1]); bad = 0
def resolve(dotted):
    parts = dotted.split(".")
    for k in range(len(parts), 0, -1):
        try: obj = importlib.import_module(".".join(parts[:k]))
        except ImportError: continue
        except BaseException as e: return True
        for a in parts[k:]:
            try: obj = getattr(obj, a)
            except AttributeError: return False
            except BaseException: return True
        return True
    return False
seen = {}
def ok(d):
    if d not in seen: seen[d] = resolve(d)
    return seen[d]
files = [p for d in ("tests", "benchmarks", "examples", "docs", "src") for p in (ROOT / d).rglob("*") if p.suffix in (".py", ".md")] + [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
for p in files:
    if "migration/programs" in str(p) or "CHANGELOG" in str(p): continue
    t = p.read_text(errors="replace")
    for m in re.finditer(r"from (powertrain[\w.]*) import (?:\([\w, \n]+\)|[\w, ]+)", t):
        for n in re.findall(r"\w+", re.split(r";| as |from ", m[0].split(" import ", 1)[1])[0]):
            if n and n not in ("as", "import") and not ok(f"{m[1]}.{n}"):
                print(p.relative_to(ROOT), t[:m.start()].count("\n") + 1, m[1], n); bad += 1
    for m in re.finditer(r"(?<![\w./-])powertrain(?:\.[A-Za-z_]\w*)+", t):
        if not ok(m[0].rstrip(".")) and not re.search(r"\.(py|md|json|toml)$", m[0]):
            print(p.relative_to(ROOT), t[:m.start()].count("\n") + 1, m[0]); bad += 1
print("bad", bad)
