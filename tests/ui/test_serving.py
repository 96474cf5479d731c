"""``powertrain ui`` itself: its address, its options, and its errors."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.recorded_run import points, write

from powertrain.cli.ui import _root_of
from powertrain.errors import ConfigError
from powertrain.ui.live import ChangeFeed
from powertrain.ui.replies import Memo
from powertrain.ui.serving import ServerOptions, host_names, is_loopback, serve


@pytest.mark.parametrize("package", ["starlette", "uvicorn"])
def test_without_its_packages_the_error_is_one_sentence_with_the_line_to_install_them(
    tmp_path: Path, package: str
) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None; sys.argv = ['powertrain', 'ui', {str(tmp_path)!r}]; "
        "from powertrain.cli.main import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: The dashboard needs starlette and uvicorn, which are not installed. Install them with: "
        "pip install 'powertrain[ui]'."
    ]


def test_the_command_line_does_not_load_the_server() -> None:
    script = "import sys, powertrain.cli.main; print(*({'starlette', 'uvicorn'} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == []


def test_a_token_that_can_be_guessed_is_refused(tmp_path: Path) -> None:
    expected = "The token has 5 characters, which can be guessed. Give at least 16, or leave --token out."
    with pytest.raises(ConfigError, match=expected):
        serve(ServerOptions(str(tmp_path), token="short"), print)


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            serve(ServerOptions(str(tmp_path), port=port), print)


def test_only_a_server_that_others_reach_is_called_by_the_machines_name() -> None:
    assert host_names("127.0.0.1") == host_names("::1") == frozenset({"localhost"})
    assert socket.gethostname().lower() in host_names("0.0.0.0")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")


def test_the_path_of_a_run_shows_that_run_and_any_other_path_all_runs_in_it(tmp_path: Path) -> None:
    write(tmp_path / "run", points(range(1, 3), lambda row, rank: {"loss": 1.0}))
    assert _root_of(str(tmp_path)) == (str(tmp_path), "")
    assert _root_of(str(tmp_path / "run")) == (str(tmp_path), "run")
    assert _root_of(f"{tmp_path}/run/") == (str(tmp_path), "run")


def test_viewers_share_one_look_and_hear_of_each_change() -> None:
    looks = itertools.count()
    versions = [1, 1, 2]

    def version() -> int:
        return versions[min(next(looks), 2)]

    async def watch() -> list[list[bytes]]:
        feed = ChangeFeed(version, interval=0.01)

        async def two_changes() -> list[bytes]:
            events = feed.events()
            found = [event async for event in _first(events, 3)]
            await events.aclose()  # type: ignore[attr-defined]
            return found

        return await asyncio.gather(*(two_changes() for _ in range(10)))

    heard = asyncio.run(watch())
    assert len({tuple(events) for events in heard}) == 1
    retry, first, second = heard[0]
    assert retry.startswith(b"retry:")
    assert first.startswith(b"event: changed\ndata: ")
    assert second != first
    assert next(looks) < 10, "ten viewers do not look ten times"


async def _first(events, count):  # type: ignore[no-untyped-def]
    for _ in range(count):
        yield await anext(events)


def test_a_value_is_made_once_and_an_error_is_not_kept() -> None:
    memo: Memo[int] = Memo(2)
    made = itertools.count()
    assert [memo.get("a", lambda: next(made)) for _ in range(3)] == [0, 0, 0]
    with pytest.raises(ZeroDivisionError):
        memo.get("b", lambda: 1 // 0)
    assert memo.get("b", lambda: next(made)) == 1
    memo.get("c", lambda: next(made))
    assert memo.get("a", lambda: next(made)) == 3, "the oldest was dropped"
