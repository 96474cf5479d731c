"""``powertrain ui`` itself: its address, its options, and its errors."""

from __future__ import annotations

import asyncio
import itertools
import queue
import re
import socket
import subprocess
import sys
import webbrowser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.recorded_run import points, write

from powertrain.cli.pages.ui import _parent_of, _root_of
from powertrain.errors import ConfigError
from powertrain.ui.live import ChangeFeed, ChangeFeeds, events_while
from powertrain.ui.places import _Recent
from powertrain.ui.replies import Memo
from powertrain.ui.security import Access
from powertrain.ui.serving import (
    ServerOptions,
    host_names,
    is_loopback,
    listening_sockets,
    opened_browser,
    own_host_name,
    serve,
)


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


def test_each_server_has_a_host_name_that_no_one_guesses() -> None:
    names = {own_host_name() for _ in range(20)}
    assert len(names) == 20
    assert all(re.fullmatch(r"powertrain-[0-9a-f]{16}\.localhost", name) for name in names)


def test_a_name_below_localhost_is_used_only_where_no_one_else_can_answer_for_it() -> None:
    listeners, is_own = listening_sockets("127.0.0.1", 0)
    port = listeners[0].getsockname()[1]
    for listener in listeners:
        listener.close()
    assert is_own
    if len(listeners) == 1:
        pytest.skip("this machine has no IPv6")
    with socket.create_server(("::1", port), family=socket.AF_INET6):
        (listener,), is_own = listening_sockets("127.0.0.1", port)
        listener.close()
        assert not is_own, "another server has the other address"
    (listener,), is_own = listening_sockets("127.0.0.2", 0)
    listener.close()
    assert not is_own


def test_the_path_of_a_run_shows_that_run_and_any_other_path_all_runs_in_it(tmp_path: Path) -> None:
    write(tmp_path / "run", points(range(1, 3), lambda row, rank: {"loss": 1.0}))
    assert _root_of(str(tmp_path)) == (str(tmp_path), "")
    assert _root_of(str(tmp_path / "run")) == (str(tmp_path), "run")
    assert _root_of(f"{tmp_path}/run/") == (str(tmp_path), "run")


def test_viewers_share_one_look_and_are_notified_of_each_change() -> None:
    looks = itertools.count()
    versions = [1, 1, 2]

    def version() -> int:
        return versions[min(next(looks), 2)]

    async def watch() -> list[list[bytes]]:
        feed = ChangeFeed(version, interval=0.01)

        async def two_changes() -> list[bytes]:
            events = feed.events()
            found = [event async for event in _first(events, 3)]
            await events.aclose()
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
    assert [memo.get("a", 1, lambda _: next(made)) for _ in range(3)] == [0, 0, 0]
    with pytest.raises(ZeroDivisionError):
        memo.get("b", 1, lambda _: 1 // 0)
    assert memo.get("b", 1, lambda _: next(made)) == 1
    memo.get("c", 1, lambda _: next(made))
    assert memo.get("a", 1, lambda _: next(made)) == 3, "the oldest was dropped"
    assert not memo._making


def test_a_new_version_replaces_the_old_one_and_is_made_from_it() -> None:
    memo: Memo[list[int]] = Memo(2)
    memo.get("other", 1, lambda _: [])
    for version in range(1, 100):
        grown = memo.get("a", version, lambda before: [*(before or []), version])  # noqa: B023
        assert len(grown) == version
    assert memo.get("other", 1, lambda _: [1]) == [], "versions of one run drop no other run"


def test_the_events_of_a_browser_that_was_signed_out_end() -> None:
    access, versions = Access("a-token-of-my-own"), itertools.count()
    session = access.exchange(access.token)
    assert session is not None
    feed = ChangeFeed(lambda: next(versions), interval=0.001)

    async def watch() -> int:
        heard = 0
        async for _ in events_while(feed, lambda: access.is_valid(session)):
            heard += 1
            if heard == 3:
                access.revoke(session)
        return heard

    assert asyncio.run(asyncio.wait_for(watch(), 60)) == 3
    assert feed.is_idle


def test_feeds_without_viewers_are_dropped() -> None:
    feeds = ChangeFeeds()

    async def watch() -> None:
        events = feeds.of("watched", lambda: 1).events()
        await anext(events)
        for number in range(50):
            feeds.of(f"left-{number}", lambda: 1)
        assert set(feeds._feeds) == {"watched", "left-49"}
        await events.aclose()

    asyncio.run(watch())


def test_listings_are_made_again_after_their_age_and_the_oldest_are_dropped() -> None:
    recent, made = _Recent(most=2), itertools.count()
    assert [recent.get("a", 1e9, lambda: next(made)) for _ in range(3)] == [0, 0, 0]
    assert recent.get("a", 0.0, lambda: next(made)) == 1
    for key in "bcd":
        recent.get(key, 1e9, lambda: next(made))
    assert (set(recent._made), recent._making) == ({"c", "d"}, {})


def test_a_viewer_that_comes_while_the_last_one_leaves_is_notified_of_changes() -> None:
    versions = itertools.count()

    async def watch() -> bytes:
        feed = ChangeFeed(lambda: next(versions), interval=0.001)
        leaving, coming = feed.events(), feed.events()
        await anext(leaving)
        await anext(leaving)
        task = asyncio.ensure_future(leaving.aclose())
        await anext(coming)
        await task
        return [await anext(coming) for _ in range(5)][-1]

    heard = asyncio.run(asyncio.wait_for(watch(), 60))
    assert heard.startswith(b"event: changed")


def test_a_bug_in_one_look_does_not_end_the_feed() -> None:
    looks = itertools.count()

    def version() -> int:
        look = next(looks)
        if look == 1:
            raise ZeroDivisionError
        return look

    async def watch() -> list[bytes]:
        events = ChangeFeed(version, interval=0.001).events()
        return [await anext(events) for _ in range(4)]

    heard = asyncio.run(asyncio.wait_for(watch(), 60))
    assert all(event.startswith(b"event: changed") for event in heard[1:])


@pytest.mark.parametrize(
    ("address", "root"),
    [
        ("s3://bucket/runs/digits", "s3://bucket/runs"),
        ("s3://bucket/digits", "s3://bucket"),
        (
            "s3://bucket/runs/digits?endpoint_override=http://h:9000&secret_key=S",
            "s3://bucket/runs?endpoint_override=http://h:9000&secret_key=S",
        ),
    ],
)
def test_the_address_of_a_run_in_a_bucket_is_cut_with_its_options(address: str, root: str) -> None:
    found, name = _parent_of(address)
    assert (found.rstrip("/"), name) == (root, "digits")


def test_the_token_is_not_in_the_command_line_of_the_browser(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    with opened_browser("http://127.0.0.1:1/?token=a%2Bb"):
        address = opened.get(timeout=60)
        assert "token" not in address
        page = Path(urlsplit(address).path)
        assert (page.stat().st_mode & 0o777, page.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert 'content="0; url=http://127.0.0.1:1/?token=a%2Bb"' in page.read_text()
    assert not page.parent.exists()


def test_a_token_that_no_address_can_carry_is_refused() -> None:
    with pytest.raises(ConfigError, match="characters that an address cannot carry"):
        serve(ServerOptions(root="/tmp", token="schlüssel-" * 4), print)
