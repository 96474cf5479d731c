"""Rewrites programs that are written as triple-quoted strings of a file."""
import ast, re, textwrap
from mover import Edits
def rewrite_inner(text, rewrite):
    try: tree = ast.parse(text)
    except SyntaxError: return text
    ed = Edits(text); data = text.encode(); starts = ed.starts
    done = 0
    joined = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for n in ast.walk(tree):
        if not (isinstance(n, ast.Constant) and isinstance(n.value, str) and "powertrain" in n.value and "import" in n.value): continue
        if id(n) in joined: continue
        src = data[starts[n.lineno-1]+n.col_offset:starts[n.end_lineno-1]+n.end_col_offset].decode()
        m = re.fullmatch(r'([rR]?)("""|\'\'\')(.*)\2', src, re.S)
        if not m: continue
        inner = m[3]
        body = inner.replace("\\\n", "", 1) if inner.startswith("\\\n") else inner
        lead = inner[:len(inner)-len(body)]
        flat = textwrap.dedent(body)
        try: ast.parse(flat)
        except SyntaxError: continue
        new = rewrite(flat)
        if new == flat: continue
        pad = re.match(r"\n*( *)", body)[1] if flat != body else ""
        out = textwrap.indent(new, pad) if pad else new
        if pad and body.endswith(" ") : out = out.rstrip(" ") + body[len(body.rstrip(" ")):]
        ed.add(n.lineno, n.col_offset, n.end_lineno, n.end_col_offset, f"{m[1]}{m[2]}{lead}{out}{m[2]}"); done += 1
    return ed.done() if done else text
