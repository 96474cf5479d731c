"""``powertrain stop`` where there is nothing to stop; runs that are stopped are in ``tests/stories``."""

from __future__ import annotations

import os
import socket

import msgspec
import pytest
from tests.cli.test_logs import invoke, write

from powertrain.errors import StorageError
from powertrain.storage import Storage, open_storage


@pytest.fixture
def place() -> Storage:
    """The storage path that commands look at when none is given."""
    return open_storage(os.environ["POWERTRAIN_STORAGE"])


def hold(place: Storage, host: str) -> None:
    """A lease of a process that has not given it back."""
    holder = {"host": host, "pid": 4242, "user": "ada", "started": 1.0, "token": "t"}
    place.put("lease/0001", msgspec.json.encode(holder))


def test_a_run_that_is_over_cannot_be_stopped_and_says_how_it_ended(place: Storage) -> None:
    write(place.child("run"))
    stopped = invoke("stop", "run")
    assert stopped.exit_code == 1
    assert stopped.stderr == "The run 'run' has finished after 3.00 s: every rank's function returned.\n"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (
            "elsewhere",
            "It was started by process 4242 of user 'ada' on host 'elsewhere': run this command there, as that user.",
        ),
        (socket.gethostname(), "which has exited, or does not accept connections of this user."),
    ],
)
def test_a_run_that_is_out_of_reach_is_reported_with_its_owner(place: Storage, host: str, said: str) -> None:
    write(place.child("run"), ended="")
    hold(place.child("run"), host)
    for verb in (["stop", "run"], ["stacks", "run"]):
        refused = invoke(*verb)
        assert refused.exit_code == 1
        assert said in refused.stderr
    with pytest.raises(StorageError, match="is not running on this machine as this user"):
        invoke("resize", "run", "2")
