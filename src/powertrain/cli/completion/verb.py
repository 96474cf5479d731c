"""``powertrain completion``: scripts for bash, zsh and fish, and the words that they ask for."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from powertrain.cli.common.output import print_line, print_text
from powertrain.cli.completion.candidates import complete
from powertrain.lookup.finding import default_storage, run_names
from powertrain.storage import open_storage

_SCRIPTS = {
    "bash": """\
_powertrain() {
    local IFS=$'\\n'
    COMPREPLY=($(powertrain completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _powertrain powertrain
""",
    "zsh": """\
#compdef powertrain
_powertrain() {
    local -a found
    found=(${(f)"$(powertrain completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _powertrain powertrain
""",
    "fish": """\
complete -c powertrain -a '(powertrain completion words -- (commandline -opc)[2..-1] (commandline -ct) 2>/dev/null)'
""",
}


def completion(
    context: typer.Context,
    shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Print a script that lets a shell complete verbs, options and runs: source <(powertrain completion bash)."""
    if shell == "words":
        root = context.find_root().command
        for word in complete(root, words or [""], _runs):
            print_line(word)
        return
    if shell not in _SCRIPTS:
        raise typer.BadParameter(f"{shell!r} is not supported. Choose one of {', '.join(_SCRIPTS)}.")
    print_text(_SCRIPTS[shell], end="")


def _runs() -> list[str]:
    """Return the runs of the default storage path; none where it cannot be read."""
    with contextlib.suppress(Exception):  # a shell shows no message
        return run_names(open_storage(default_storage()))
    return []
