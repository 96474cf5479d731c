"""Who may open the dashboard: a token once, its own host, its own pages, and nothing inline."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from tests.recorded_run import points, write
from tests.ui.signing_in import sign_in

from powertrain.run.remote import protocol
from powertrain.ui import app as application
from powertrain.ui.app import make_app
from powertrain.ui.control import control
from powertrain.ui.places import Places
from powertrain.ui.queries import BadQuery
from powertrain.ui.security import (
    KEY_ARGUMENT,
    KEY_HEADER,
    MOST_SESSIONS,
    Access,
    BrowserSession,
    is_allowed_host,
)
from powertrain.views import static_files
from powertrain.wire.values import ProcessStack

PORT = 8000
BASE = f"http://127.0.0.1:{PORT}"
NAMES = frozenset({"localhost"})
ADDRESSES = [
    "/",
    "/runs/digits",
    "/static/app.js",
    "/api/runs",
    "/api/run?run=digits",
    "/api/events?run=digits",
    "/api/logs?run=digits",
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(tmp_path / "runs" / "digits", points(range(1, 4), lambda row, rank: {"loss": 1.0 / row}))
    return tmp_path / "runs"


def client_of(root: Path, access: Access, **options: Any) -> TestClient:
    app = make_app(Places(str(root)), access, port=PORT, names=NAMES, **options)
    return TestClient(app, base_url=BASE, follow_redirects=False, raise_server_exceptions=True)


@pytest.fixture
def access() -> Access:
    return Access()


@pytest.fixture
def client(root: Path, access: Access) -> Iterator[TestClient]:
    with client_of(root, access) as client:
        yield client


@pytest.fixture
def signed_in(client: TestClient, access: Access) -> TestClient:
    sign_in(client, access.token)
    return client


@pytest.mark.parametrize("address", ADDRESSES)
def test_without_the_token_nothing_is_served(client: TestClient, address: str) -> None:
    reply = client.get(address)
    assert reply.status_code == 401
    assert "digits" not in reply.text
    assert "set-cookie" not in reply.headers


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_cannot_use(
    client: TestClient, access: Access
) -> None:
    token = access.token
    reply = client.get(f"/runs/digits?token={token}&with=other")
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert token not in cookie, "the cookie is another secret"
    assert token not in reply.text
    assert "other" not in reply.text, "nothing of the request is written into the page"
    assert client.get("/").status_code == 200


def test_the_cookie_alone_reads_and_changes_nothing(root: Path) -> None:
    """Browsers send it to the servers of other users on this host, which can send it here themselves."""
    access = Access("a-token-of-my-own")
    with client_of(root, access, can_control=True) as browser:
        sign_in(browser, access.token)
        key = browser.headers.pop(KEY_HEADER)
        for address in ("/api/runs", "/api/run?run=digits", "/api/logs?run=digits"):
            assert browser.get(address).status_code == 401
            assert browser.get(address, headers={KEY_HEADER: "guess"}).status_code == 401
            assert "digits" not in browser.get(address).text
        for guess in ("1", "guess", key[:-1]):
            assert post(browser, {"origin": BASE, KEY_HEADER: guess}) == 401
        assert key not in browser.get("/").text, "pages do not hand the key out again"
        assert browser.get("/api/runs", params={KEY_ARGUMENT: key}).status_code == 200


def test_each_browser_has_secrets_of_its_own_and_signs_out_alone(root: Path) -> None:
    access = Access("a-token-of-my-own")
    with client_of(root, access) as one, client_of(root, access) as other:
        sign_in(one, access.token)
        sign_in(other, access.token)
        mixed = {KEY_HEADER: other.headers[KEY_HEADER]}
        assert one.get("/api/runs", headers=mixed).status_code == 401
        assert one.post("/api/sign-out", headers={"origin": BASE}).status_code == 200
        assert one.get("/").status_code == 401
        assert other.get("/api/runs").status_code == 200


def test_the_oldest_browser_is_signed_out_for_one_too_many() -> None:
    access = Access("a-token-of-my-own")
    made = [access.exchange(access.token) for _ in range(MOST_SESSIONS + 1)]
    assert access.session_of(made[0].cookie) is None  # type: ignore[union-attr]
    assert all(access.session_of(one.cookie) is one for one in made[1:] if one is not None)


def test_a_token_of_ours_is_used_once_and_the_next_one_is_announced(root: Path) -> None:
    told: list[str] = []
    access = Access(on_new_token=told.append)
    first = access.token
    with client_of(root, access) as one, client_of(root, access) as other:
        sign_in(one, first)
        assert other.get(f"/?token={first}").status_code == 401
        assert told == [access.token]
        assert told != [first]
        assert other.get(f"/?token={told[0]}").status_code == 200
        assert one.get("/api/runs").status_code == 200, "the first browser stays signed in"


def test_a_token_of_the_users_own_stays_valid(root: Path) -> None:
    access = Access("a-token-of-my-own")
    for _ in range(2):
        with client_of(root, access) as browser:
            assert browser.get("/?token=a-token-of-my-own").status_code == 200


@pytest.mark.parametrize("token", ["", "x", "a-token-of-my-owN", "a-token-of-my-own ", "%c3%a9"])
def test_a_wrong_token_is_refused(root: Path, token: str) -> None:
    with client_of(root, Access("a-token-of-my-own")) as browser:
        assert browser.get("/", params={"token": token}).status_code == 401
        assert (
            browser.get("/api/runs", headers={"cookie": f"powertrain-ui-{PORT}={token}"}).status_code == 401
        )


def test_secrets_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(given: bytes, expected: bytes) -> bool:
        compared.append((given, expected))
        return False

    monkeypatch.setattr("powertrain.ui.security.hmac.compare_digest", compare)
    access = Access("a-token-of-my-own")
    assert access.exchange("guess") is None
    assert compared.pop() == (b"guess", b"a-token-of-my-own")
    access._sessions = [BrowserSession("a-cookie", "a-key")]
    assert access.session_of("guess") is None
    assert compared == [(b"guess", b"a-cookie")]


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000",
        "127.0.0.1:8001",
        "127.0.0.1",
        "localhost.evil.example:8000",
        "",
        "localhost:8000:8000",
    ],
)
def test_a_request_to_another_host_is_refused_also_with_the_cookie(signed_in: TestClient, host: str) -> None:
    reply = signed_in.get("/api/runs", headers={"host": host})
    assert reply.status_code == 421
    assert "digits" not in reply.text


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000", "192.168.1.7:8000"]
)
def test_addresses_of_the_server_are_allowed(host: str) -> None:
    assert is_allowed_host(host, PORT, NAMES)


def test_a_server_of_the_loopback_interface_has_no_other_address() -> None:
    assert is_allowed_host("127.0.0.1:8000", PORT, NAMES, only_loopback=True)
    assert is_allowed_host("[::1]:8000", PORT, NAMES, only_loopback=True)
    assert not is_allowed_host("192.168.1.7:8000", PORT, NAMES, only_loopback=True)


@given(st.from_regex(r"[a-z0-9.-]{1,30}\.[a-z]{2,6}", fullmatch=True))
def test_no_foreign_name_is_an_address_of_the_server(name: str) -> None:
    assert not is_allowed_host(f"{name}:{PORT}", PORT, NAMES)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8001"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    ],
)
def test_requests_of_other_pages_are_refused(signed_in: TestClient, headers: dict[str, str]) -> None:
    assert signed_in.get("/api/runs", headers=headers).status_code == 403


def test_a_link_on_another_page_leads_here(signed_in: TestClient) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert signed_in.get("/", headers=headers).status_code == 200


OWN = {"origin": BASE}


def post(client: TestClient, headers: dict[str, str]) -> int:
    return client.post("/api/control?run=digits", json={"action": "stop"}, headers=headers).status_code


def test_it_is_read_only_unless_control_was_allowed(signed_in: TestClient) -> None:
    assert post(signed_in, OWN) == 403


def test_a_change_needs_the_origin_and_the_key_of_our_own_page(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    monkeypatch.setattr(application, "control", lambda found, wanted: sent.append(wanted) or {"ok": True})
    access = Access("a-token-of-my-own")
    with client_of(root, access, can_control=True) as browser:
        sign_in(browser, access.token)
        assert post(browser, {}) == 403
        assert post(browser, {**OWN, "origin": "http://evil.example"}) == 403
        assert post(browser, {**OWN, "sec-fetch-site": "cross-site"}) == 403
        key = browser.headers.pop(KEY_HEADER)
        assert post(browser, OWN) == 403
        assert not sent
        assert post(browser, {**OWN, KEY_HEADER: key}) == 200
        assert sent == [{"action": "stop"}]


@pytest.mark.parametrize("address", ["/", "/api/runs", "/static/app.js", "/nowhere", "/api/run?run=none"])
def test_every_reply_restricts_what_pages_may_do(signed_in: TestClient, address: str) -> None:
    headers = signed_in.get(address).headers
    policy = dict(
        part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";") if " " in part
    )
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"


STATIC = Path(static_files.__file__).with_name("static")


def test_pages_have_no_inline_script_or_style_and_load_nothing_from_elsewhere() -> None:
    page = (STATIC / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page)
    for file in STATIC.iterdir():
        text = file.read_text("utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import", text), file.name


def test_scripts_never_parse_text_as_html() -> None:
    for file in STATIC.glob("*.js"):
        text = file.read_text("utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text
        ), file.name


@pytest.mark.parametrize(
    "run",
    ["..", "../secret", "%2e%2e/secret", "a/../../b", "/etc", "digits/../..", "a/b/c", "", "%00", "x" * 5000],
)
def test_names_cannot_lead_out_of_the_directory(signed_in: TestClient, root: Path, run: str) -> None:
    (root.parent / "secret" / "journal").mkdir(parents=True)
    (root.parent / "secret" / "journal" / "0001-000001.jsonl").write_text("hidden fact")
    for address in ("/api/run", "/api/lines", "/api/logs", "/api/steps", "/api/sweep"):
        reply = signed_in.get(address, params={"run": run})
        assert reply.status_code in (400, 404), address
        assert "hidden fact" not in reply.text


@pytest.mark.parametrize("file", ["..%2fapp.py", "%2e%2e/security.py", "app.py", "../app.py"])
def test_only_files_of_the_page_are_served(signed_in: TestClient, file: str) -> None:
    assert signed_in.get(f"/static/{file}").status_code == 404


def test_stacks_are_text_of_all_ranks_and_another_request_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Places(str(root)).find("digits")
    answer = protocol.Answer(ok=True, message="rank 1 did not answer")
    seen = [protocol.RankSeen(rank=0, processes=[ProcessStack(pid=1, title="rank 0", state="S", threads=[])])]
    monkeypatch.setattr("powertrain.ui.control.ask_for_stacks", lambda run: (answer, None, seen))
    shown = control(found, {"action": "stacks"})
    assert (shown["ok"], shown["message"]) == (True, "rank 1 did not answer")
    assert "rank 0" in shown["text"]
    with pytest.raises(BadQuery, match="neither a stop"):
        control(found, {"action": "profile"})
