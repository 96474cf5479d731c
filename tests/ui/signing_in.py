"""Sign a test client in as a browser does: the cookie, and the key that the page keeps."""

from __future__ import annotations

import re

from starlette.testclient import TestClient

from powertrain.ui.security import KEY_HEADER


def sign_in(client: TestClient, token: str) -> None:
    """Show the token, and send the session's key from now on."""
    reply = client.get("/", params={"token": token})
    assert reply.status_code == 200
    found = re.search(r'data-key="([\w-]+)"', reply.text)
    assert found is not None
    client.headers[KEY_HEADER] = found[1]
