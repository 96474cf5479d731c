"""Every verb on a run directory that an enemy wrote, at a real terminal: its strings are shown, and never obeyed."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.hostile_run import HOSTILE, HOSTILE_NAME, is_harmless, write_hostile_run
from tests.stories.at_terminal import AtTerminal

import powertrain.cli
from powertrain.cli.main import app
from powertrain.run.remote import protocol
from powertrain.storage import Storage, open_storage
from powertrain.storage.files.private_roots import runtime_root
from powertrain.wire.values import Frame, ProcessStack, ThreadStack, Where

#: What a verb may send to a terminal besides text: colours, and the line that ``stop`` writes again and again.
_OURS = re.compile(r"\x1b\[[0-9;]*m|\r\x1b\[K|\r\n")
_POWERTRAIN = (sys.executable, "-c", "from powertrain.cli.main import main; main()")
_FORGED = re.compile(r"^\W?FORGED", re.MULTILINE)


@pytest.fixture
def place() -> Storage:
    return open_storage(os.environ["POWERTRAIN_STORAGE"])


@pytest.fixture
def ended(place: Storage) -> Storage:
    run = place.child(HOSTILE_NAME)
    write_hostile_run(run, ended=True)
    return run


@pytest.fixture
def going(place: Storage) -> Storage:
    run = place.child("going" + HOSTILE_NAME)
    write_hostile_run(run, ended=False)
    return run


@pytest.fixture
def live(place: Storage) -> Iterator[Storage]:
    """A run that answers questions on this machine, with hostile texts."""
    name = HOSTILE_NAME.removesuffix("\udcff")
    going = place.child(name)
    write_hostile_run(going, ended=False)
    directory = runtime_root() / "hostile"
    directory.mkdir(parents=True, mode=0o700)
    card = protocol.Card(name=name, path=_path(going), pid=os.getpid(), files=_path(going), lease=2)

    def answer(question: protocol.Request, client: protocol.ControlClient) -> None:
        frame = Frame(file=HOSTILE, line=3, function=HOSTILE, source=HOSTILE)
        thread = ThreadStack(name=HOSTILE, main=True, frames=[frame])
        process = ProcessStack(pid=1, title=HOSTILE, state=HOSTILE, threads=[thread], remark=HOSTILE)
        where = Where(frame=frame, inside="collective", call=HOSTILE)
        if not isinstance(question, (protocol.StopRequest, protocol.ResizeRequest)):
            client.send_part(
                protocol.Description(state=HOSTILE, reason=HOSTILE, workers=1, checkpoint=HOSTILE)
            )
        if isinstance(question, protocol.LookAround):
            client.send_part(protocol.RankSeen(rank=0, processes=[process], where=where, awaits=HOSTILE))
        if isinstance(question, protocol.ProfileSteps):
            client.send_part(protocol.RankProfiled(rank=0, error=HOSTILE))
        client.answer(HOSTILE)

    with protocol.listening(directory, card, answer):
        yield going
    directory.rmdir()


def shown_by(tmp_path: Path, *arguments: str | Path) -> str:
    """What a verb sends to its terminal, without what is ours; whatever it is, it does as it should."""
    command = [*_POWERTRAIN, *(os.fspath(one) for one in arguments)]
    with AtTerminal(command, dict(os.environ), tmp_path) as terminal:
        terminal.ended()
    assert terminal.process.returncode in (0, 1, 3, 4), terminal.raw
    text = _OURS.sub(
        lambda own: "\n" if own[0] == "\r\n" else "", terminal.raw.decode("utf-8", "surrogateescape")
    )
    assert is_harmless(text), [line for line in text.split("\n") if not is_harmless(line)]
    assert "Traceback" not in text, text
    return text


def check_no_line_is_forged(text: str) -> None:
    assert _FORGED.search(text) is None, text


def test_ls_shows_hostile_names_literally(ended: Storage, going: Storage, tmp_path: Path) -> None:
    text = shown_by(tmp_path, "ls")
    check_no_line_is_forged(text.replace("\n", " ").replace("run ", "\nrun ", 1))
    whole = re.sub(r"\s+", "", text)
    assert "[red]markup[red][link=http:x]l[link]:smile:" in whole.replace("[/", "["), text
    assert "\\x1b[2J" in whole


@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("show", "--json"),
        ("metrics",),
        ("metrics", "--plot"),
        ("metrics", "--csv"),
        ("metrics", "--json"),
        ("stacks",),
        ("stacks", "--json"),
        ("profile",),
        ("profile", "--json"),
        ("stop",),
        ("diagnose",),
        ("track",),
        ("track", "--json"),
        ("stop", "--json"),
        ("diagnose", "--json"),
    ],
    ids=" ".join,
)
def test_verbs_on_a_hostile_run(ended: Storage, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    verb, *options = arguments
    text = shown_by(tmp_path, verb, _path(ended), *options)
    assert "evil" in text
    if arguments != ("stacks",):  # it prints a whole file of the run, whose lines are the enemy's
        check_no_line_is_forged(text)


def test_logs_of_a_hostile_run_keep_colours_and_nothing_else(ended: Storage, tmp_path: Path) -> None:
    with AtTerminal([*_POWERTRAIN, "logs", _path(ended)], dict(os.environ), tmp_path) as terminal:
        assert terminal.ended() == 0
    assert b"[rank 0] \x1b[32mgreen\x1b[0m\r\n" in terminal.raw
    text = shown_by(tmp_path, "logs", _path(ended), "--follow")
    assert all(line.startswith("[rank 0] ") for line in text.split("\n")[:-2])
    check_no_line_is_forged(text)


def test_compare_of_hostile_runs(ended: Storage, going: Storage, tmp_path: Path) -> None:
    check_no_line_is_forged(shown_by(tmp_path, "compare", _path(ended), _path(going)))
    check_no_line_is_forged(shown_by(tmp_path, "compare", _path(ended), _path(going), "--json"))


def test_a_report_of_a_hostile_run(ended: Storage, tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.mkdir()
    check_no_line_is_forged(shown_by(tmp_path, "report", _path(ended), "-o", target))
    check_no_line_is_forged(shown_by(tmp_path, "report", _path(ended), "-o", target, "--json"))
    (made,) = target.iterdir()
    page = made.read_text("utf-8", "surrogateescape")
    _, _, rest = page.partition('<script type="application/json" id="replies">')
    replies = rest.partition("</script>")[0]
    assert is_harmless(replies)
    assert "evil" in replies
    assert "<" not in replies


def test_trace_export_of_a_hostile_run(ended: Storage, tmp_path: Path) -> None:
    check_no_line_is_forged(shown_by(tmp_path, "trace", "export", _path(ended)))
    target = tmp_path / HOSTILE_NAME
    target.mkdir()
    check_no_line_is_forged(shown_by(tmp_path, "trace", "export", _path(ended), "-o", target))


@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("stacks",),
        ("stacks", "--json"),
        ("profile",),
        ("stop", "--no-wait"),
        ("stop", "--no-wait", "--json"),
        ("resize", "2"),
        ("resize", "2", "--json"),
        ("logs",),
        ("ls",),
    ],
    ids=" ".join,
)
def test_verbs_on_a_live_run_with_hostile_answers(
    live: Storage, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    verb, *options = arguments
    name = [HOSTILE_NAME.removesuffix("\udcff")] if verb != "ls" else []
    check_no_line_is_forged(shown_by(tmp_path, verb, *name, *options))


@pytest.mark.parametrize(
    "verb", ["show", "metrics", "report", "stop", "stacks", "profile", "logs", "diagnose", "track"]
)
def test_errors_about_hostile_names(ended: Storage, tmp_path: Path, verb: str) -> None:
    for run in ("evil-unknown", f"no{HOSTILE_NAME}", f"./{HOSTILE_NAME}"):
        text = shown_by(tmp_path, verb, run)
        assert text.startswith("Error: "), text
        check_no_line_is_forged(text)


def test_kubernetes_manifests_and_errors_with_hostile_names(tmp_path: Path) -> None:
    script = tmp_path / (HOSTILE_NAME[:40] + ".py")
    script.write_text("print(1)")
    for storage in ("pvc:1Gi", HOSTILE.replace("\0", "")):
        check_no_line_is_forged(
            shown_by(tmp_path, "k8s", "render", script, "--image", "i", "--storage", storage, "--name", "n")
        )


def test_the_doctor_on_a_storage_with_a_hostile_name(place: Storage, tmp_path: Path) -> None:
    storage = Path(_path(place)) / HOSTILE_NAME
    storage.mkdir(parents=True)
    text = shown_by(tmp_path, "doctor", "--storage", storage)
    assert "evil" in text
    check_no_line_is_forged(text)


def test_ls_as_json_shows_hostile_names_literally(ended: Storage, going: Storage, tmp_path: Path) -> None:
    check_no_line_is_forged(shown_by(tmp_path, "ls", "--json"))


def test_gc_of_hostile_runs(ended: Storage, going: Storage, place: Storage, tmp_path: Path) -> None:
    for options in ((), ("--json",)):
        text = shown_by(tmp_path, "gc", _path(place), *options)
        assert "evil" in text
        check_no_line_is_forged(text)


def test_migrate_of_programs_with_hostile_names(tmp_path: Path) -> None:
    folder = tmp_path / HOSTILE_NAME
    folder.mkdir()
    (folder / f"a{HOSTILE_NAME[:40]}.py").write_bytes(
        b"from ray import train \x0c# \x1b[2Jevil\nimport ray.x\n"
    )
    (folder / f"b{HOSTILE_NAME[:40]}.py").write_text("evil code")
    for options in ((), ("--json",)):
        text = shown_by(tmp_path, "migrate", folder, *options)
        assert "evil" in text
        check_no_line_is_forged(text)


def _path(run: Storage) -> str:
    path = run.local_path("x")
    assert path is not None
    return str(path.parent)


# --------------------------------------------------------------------------- nothing goes past the one way


def test_every_verb_is_tried_here() -> None:
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback}
    verbs |= {group.name for group in app.registered_groups if group.name}
    # "run" opens no run directory that it was given: all that it shows is of the run that it makes.
    # "ui" prints nothing of a run; tests/ui look at its replies.
    # "completion" prints only names of plain characters; its own tests look at them.
    assert verbs - {"run", "ui", "completion"} == {
        "ls", "show", "logs", "stop", "stacks", "profile", "resize", "diagnose", "compare", "track", "doctor", "gc",
        "metrics", "migrate", "report", "trace", "k8s",
    }  # fmt: skip


def test_only_one_module_of_the_command_line_prints() -> None:
    folder = Path(powertrain.cli.__path__[0])
    past = [
        f"{path.name}:{node.lineno}: {ast.unparse(node.func)}"
        for path in folder.rglob("*.py")
        if path.name != "output.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func)
        in ("print", "typer.echo", "typer.secho", "click.echo", "Console", "rich.print")
    ]
    assert not past, "these print without cli/output.py:\n" + "\n".join(past)


def test_an_unreadable_run_with_a_hostile_name_is_listed_in_words(place: Storage, tmp_path: Path) -> None:
    place.child(HOSTILE_NAME).put("journal/0001-000001.jsonl", b"\xff\xff\n")
    shown = shown_by(tmp_path, "ls")
    assert "unreadable" in shown
    check_no_line_is_forged(shown)
