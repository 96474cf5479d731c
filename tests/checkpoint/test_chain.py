from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)
from tests.support.examples import scaled

from powertrain.checkpoint import manifest as mf
from powertrain.checkpoint.chain import Chain, tag_for
from powertrain.checkpoint.commit import commit
from powertrain.checkpoint.committed import committed
from powertrain.checkpoint.manifest import Manifest
from powertrain.errors import CheckpointError, FencedError
from powertrain.storage import Entry


class Memory:
    """Storage in a dict, without real files, where put-if-absent is one step."""

    uri = "memory://run"

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def local_path(self, key: str) -> None:
        return None

    def put(self, key: str, data: bytes) -> None:
        self.values[key] = data

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.values.setdefault(key, data) is data

    def get(self, key: str, *, limit: int | None = None) -> bytes:
        if key not in self.values:
            raise FileNotFoundError(key)
        return self.values[key]

    def list(self, prefix: str = "") -> list[Entry]:
        return sorted(
            Entry(key, len(value)) for key, value in self.values.items() if key.startswith(prefix + "/")
        )

    def delete(self, key: str) -> None:
        self.values.pop(key, None)


def commit_one(storage: Any, chain: Chain, name: str) -> Manifest:
    return commit(
        storage, chain, name=name, row=1, attempt=0, files=[], metrics={}, world_size=1, metadata={"a": 1}
    )


def test_each_commit_takes_the_next_link_and_names_its_lease() -> None:
    memory: Any = Memory()
    chain = Chain.take_over(memory, 3)
    links = [commit_one(memory, chain, name).link for name in ("a", "b")]
    assert links == [2, 3]
    written = [json.loads(memory.get(entry.key)) for entry in memory.list("commits")]
    assert [(link["lease"], link["checkpoint"], link["parent"]) for link in written] == [
        (3, "", ""),
        (3, "a", ""),
        (3, "b", ""),
    ]


def test_after_a_takeover_the_earlier_controller_is_fenced_with_the_name_of_the_new_one() -> None:
    memory: Any = Memory()
    memory.put("lease/0002", json.dumps({"host": "node-7", "pid": 4711}).encode())
    first = Chain.take_over(memory, 1)
    commit_one(memory, first, "a")
    second = Chain.take_over(memory, 2)
    with pytest.raises(FencedError) as caught:
        commit_one(memory, first, "b")
    assert "process 4711 on host 'node-7' (lease 2)" in str(caught.value)
    assert "this controller (lease 1) cannot commit any more" in str(caught.value)
    assert commit_one(memory, second, "c").lease == 2
    with pytest.raises(FencedError, match="lease 2"):
        Chain.take_over(memory, 1)


def test_one_that_froze_between_its_link_and_its_manifest_finds_the_manifest_void() -> None:
    memory: Any = Memory()
    first = Chain.take_over(memory, 1)
    frozen = [True]

    def freeze(key: str, data: bytes) -> bool:
        if key.endswith(".powertrain-manifest.json") and frozen:
            frozen.clear()
            Chain.take_over(memory, 2)
        return Memory.put_if_absent(memory, key, data)

    memory.put_if_absent = freeze
    with pytest.raises(FencedError):
        commit_one(memory, first, "a")
    assert mf.is_void(memory.get("checkpoints/a/.powertrain-manifest.json"))
    assert committed(memory) == []


def test_a_checkpoint_that_was_voided_by_a_controller_that_never_took_over_is_lost_but_the_run_goes_on() -> (
    None
):
    memory: Any = Memory()
    chain = Chain.take_over(memory, 1)
    memory.put("checkpoints/a/.powertrain-manifest.json", mf.void(2))
    chain.unfinished, chain.head = "a", 2
    memory.put("commits/00000002", json.dumps({"lease": 1, "checkpoint": "a"}).encode())
    with pytest.raises(CheckpointError, match="given up before"):
        commit_one(memory, chain, "a")
    assert commit_one(memory, chain, "b").link == 3


def test_a_commit_can_be_tried_again_after_storage_failed_at_any_step() -> None:
    for after in (False, True):  # the step took effect although it failed
        for failing in range(5):  # list, metadata, link, next link, manifest
            memory: Any = Memory()
            chain = Chain.take_over(memory, 1)
            _fail_once(memory, failing, after)
            try:
                commit_one(memory, chain, "a")
            except OSError:
                commit_one(memory, chain, "a")
            assert [manifest.name for manifest in committed(memory)] == ["a"]
            assert commit_one(memory, chain, "b").lease == 1


def _fail_once(memory: Any, failing: int, after: bool) -> None:
    count = iter(range(100))
    for name in ("list", "put", "put_if_absent", "get"):

        def step(*arguments: Any, name: str = name, **options: Any) -> Any:
            fails = next(count) == failing
            if fails and not after:
                raise OSError("no answer")
            result = getattr(Memory, name)(memory, *arguments, **options)
            if fails:
                raise OSError("the answer was lost")
            return result

        setattr(memory, name, step)


def test_a_link_cut_short_by_a_crash_claims_nothing() -> None:
    memory: Any = Memory()
    chain = Chain.take_over(memory, 1)
    memory.put("commits/00000002", b'{"lea')
    assert commit_one(memory, chain, "a").link == 3
    memory.put("commits/00000004", b"")
    assert commit_one(memory, Chain.take_over(memory, 2), "b").link == 6


def test_a_link_that_is_still_being_written_while_the_run_is_taken_over_is_closed_all_the_same() -> None:
    memory: Any = Memory()
    Chain.take_over(memory, 1)
    memory.put("commits/00000002", b"")

    def meanwhile(key: str, data: bytes) -> bool:
        memory.put("commits/00000002", json.dumps({"lease": 1, "checkpoint": "a"}).encode())
        return Memory.put_if_absent(memory, key, data)

    memory.put_if_absent = meanwhile
    Chain.take_over(memory, 2)
    assert mf.is_void(memory.get("checkpoints/a/.powertrain-manifest.json"))


def test_names_need_a_tag_as_soon_as_any_earlier_lease_was_not_given_back() -> None:
    memory: Any = Memory()
    assert tag_for(memory, 1) == ""
    for key in ("lease/0001", "lease/0001.released", "lease/lock", "lease/0002"):
        memory.put(key, b"")
    assert tag_for(memory, 2) == ""
    assert tag_for(memory, 3) == "3"
    memory.put("lease/0002.released", b"")
    assert tag_for(memory, 3) == ""


# --------------------------------------------------------------------------- controllers in any interleaving


class _Stopped(Exception):
    """The machine is over, and the controller's thread with it."""


class _Controller:
    """A controller that takes over and then commits one checkpoint after the other, one storage step at a time."""

    uri, local_path = Memory.uri, Memory.local_path

    def __init__(self, memory: Memory, lease: int) -> None:
        self.lease, self.ended = lease, False
        self.committed: list[str] = []
        self._memory, self._fault, self._again = memory, "", False
        self._go, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self._stopping = False
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        self._arrived.acquire()

    def step(self, fault: str = "", again: bool = False) -> None:
        """Let the next storage operation happen; ``fault`` makes it fail "before" or "after" its effect."""
        if not self.ended:
            self._fault, self._again = fault, again
            self._go.release()
            self._arrived.acquire()

    def stop(self) -> None:
        self._stopping = True
        self._go.release()
        self._thread.join()

    def _live(self) -> None:
        try:
            chain = self._persist(lambda: Chain.take_over(self, self.lease))
            number = 0
            while True:
                name = f"checkpoint-{number}-{self.lease}"
                try:
                    commit_one(self, chain, name)
                    self.committed.append(name)
                except CheckpointError:
                    pass  # another controller voided it and never took over
                except OSError:
                    number -= self._again
                number += 1
        except (FencedError, _Stopped):
            pass
        finally:
            self.ended = True
            self._arrived.release()

    def _persist(self, action: Any) -> Any:
        while True:
            try:
                return action()
            except OSError:
                continue

    def __getattr__(self, name: str) -> Any:
        if name not in ("list", "get", "put", "put_if_absent", "delete"):
            raise AttributeError(name)
        return lambda *arguments, **_: self._operate(name, *arguments)

    def _operate(self, name: str, *arguments: Any) -> Any:
        self._arrived.release()
        self._go.acquire()
        if self._stopping:
            raise _Stopped
        if self._fault == "before":
            raise OSError("no answer")
        result = getattr(self._memory, name)(*arguments)
        if self._fault == "after":
            raise OSError("the answer was lost")
        return result


class Controllers(RuleBasedStateMachine):
    """Any number of controllers on one run, each frozen between any two of its steps for as long as it likes."""

    controllers = Bundle("controllers")

    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()
        self.all: list[_Controller] = []
        self.seen: dict[str, bytes] = {}

    @rule(target=controllers, count=st.integers(1, 2))
    def start(self, count: int) -> Any:
        new = [_Controller(self.memory, len(self.all) + 1 + number) for number in range(count)]
        self.all += new
        return multiple(*new)

    @rule(controller=controllers, steps=st.integers(1, 9))
    def run(self, controller: _Controller, steps: int) -> None:
        for _ in range(steps):
            controller.step()
            self.everything_holds()

    @rule(controller=controllers, fault=st.sampled_from(["before", "after"]), again=st.booleans())
    def fail(self, controller: _Controller, fault: str, again: bool) -> None:
        controller.step(fault, again)

    @rule(controller=consumes(controllers))
    def die(self, controller: _Controller) -> None:
        controller.stop()

    @invariant()
    def everything_holds(self) -> None:
        links = {
            key: json.loads(value) for key, value in self.memory.values.items() if key.startswith("commits/")
        }
        manifests = {
            key: value
            for key, value in self.memory.values.items()
            if key.endswith("/.powertrain-manifest.json")
        }
        for key, value in self.seen.items():
            assert manifests[key] == value, "a manifest, true or void, is for ever"
        found = [mf.decode(value) for value in manifests.values() if not mf.is_void(value)]
        assert len({manifest.link for manifest in found}) == len(found), "one manifest per link"
        for manifest in found:
            link = links[f"commits/{manifest.link:08d}"]
            assert (link["lease"], link["checkpoint"]) == (manifest.lease, manifest.name)
        fresh = [
            mf.decode(value)
            for key, value in manifests.items()
            if key not in self.seen and not mf.is_void(value)
        ]
        newest_lease = max((link["lease"] for link in links.values()), default=0)
        assert all(manifest.lease == newest_lease for manifest in fresh), "a fenced controller has committed"
        ordered = [link["lease"] for _, link in sorted(links.items())]
        assert ordered == sorted(ordered), "leases only grow along the chain"
        self.seen = manifests
        listed = {manifest.name for manifest in committed(self.memory)}  # type: ignore[arg-type]
        assert listed == {manifest.name for manifest in found}
        assert all(listed.issuperset(controller.committed) for controller in self.all)

    def teardown(self) -> None:
        for controller in self.all:
            controller.stop()
        last = Chain.take_over(self.memory, len(self.all) + 1)  # type: ignore[arg-type]
        commit_one(self.memory, last, "last")
        self.everything_holds()


TestControllers = Controllers.TestCase
TestControllers.settings = settings(max_examples=scaled(60), stateful_step_count=40, deadline=None)


# --------------------------------------------------------------------------- a directory that was removed


class Removed(Memory):
    """Storage in which something happens before a step of the controller that is being watched."""

    def __init__(self) -> None:
        super().__init__()
        self.before: dict[int, Any] = {}
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        self.before.pop(self._steps, lambda: None)()

    def watched(self) -> Any:
        """The storage as the watched controller sees it."""
        return _Watched(self)

    def start(self, token: str) -> Chain:
        """A start of the run: the next lease, with its token, and the chain."""
        numbers = [int(entry.key.removeprefix("lease/")) for entry in self.list("lease")]
        number = max(numbers, default=0) + 1
        self.put(f"lease/{number:04d}", json.dumps({"token": token, "pid": 1, "host": token}).encode())
        storage: Any = self
        return Chain.take_over(storage, number, token)


class _Watched(Removed):
    def __init__(self, storage: Removed) -> None:
        self._storage = storage

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, "_storage")
        if name in ("put_if_absent", "get", "list", "delete"):
            found.step()
        return getattr(found, name)


@pytest.mark.parametrize("step", range(1, 9))
@pytest.mark.parametrize("before", [0, 1, 3])
def test_of_two_controllers_with_one_lease_number_only_the_holder_commits(step: int, before: int) -> None:
    """The directory is removed, and the run started again, before any step of a commit."""
    memory = Removed()
    memory.put("lease/0001", json.dumps({"token": "first"}).encode())
    first = Chain.take_over(memory.watched(), 1, "first")
    for number in range(before):
        commit_one(memory.watched(), first, f"c{number}")
    second: list[Chain] = []

    def start_again() -> None:
        memory.values.clear()
        second.append(memory.start("second"))
        commit_one(memory, second[0], "second-0")

    memory.before[memory._steps + step] = start_again
    late = True
    with contextlib.suppress(FencedError):
        commit_one(memory.watched(), first, "late")
        late = False
    if not second:
        return  # the commit took fewer steps than that
    with pytest.raises(FencedError, match="on host 'second'"):
        commit_one(memory.watched(), first, "later")
    storage: Any = memory
    commit_one(storage, second[0], "second-1")
    commit_one(storage, second[0], "late")  # names of the first are not used up
    names = {manifest.name for manifest in committed(storage)}
    assert names == {"second-0", "second-1", "late"}, "nothing of the first is committed"
    tokens = [json.loads(memory.get(f"commits/{m.link:08d}"))["token"] for m in committed(storage)]
    assert set(tokens) == {"second"}
    assert late, "and the first was told so"


def test_a_controller_whose_directory_is_removed_is_fenced_in_one_sentence() -> None:
    memory = Removed()
    chain = memory.start("only")
    commit_one(memory, chain, "a")
    memory.values.clear()
    with pytest.raises(FencedError, match=r"'memory://run', was removed while the run was going on"):
        commit_one(memory, chain, "b")
    assert not committed(memory)  # type: ignore[arg-type]


def test_links_without_a_token_are_those_of_their_lease() -> None:
    """As versions before this one wrote them."""
    memory: Any = Removed()
    old = Chain.take_over(memory, 1)
    commit_one(memory, old, "a")
    assert "token" not in json.loads(memory.get("commits/00000002"))
    memory.put("lease/0001", b'{"token": "old"}')
    new = memory.start("new")
    assert new.lease == 2
    assert commit_one(memory, new, "b").link == 4
    assert [m.name for m in committed(memory)] == ["a", "b"]
    with pytest.raises(FencedError, match="was taken over by process 1 on host 'new'"):
        commit_one(memory, old, "c")


@pytest.mark.parametrize("number", [10**15 + 1, 999_999_999_999_999_999])
def test_a_file_with_a_number_that_no_chain_reaches_is_passed_over(number: int) -> None:
    storage: Any = Memory()
    storage.put(f"commits/{number}", b"stray")
    for lease in (1, 2, 3):
        chain = Chain.take_over(storage, lease)
        assert chain.head < 100
        commit_one(storage, chain, f"c{lease}")
    assert [manifest.name for manifest in committed(storage)] == ["c1", "c2", "c3"]


def test_a_chain_that_a_stray_file_has_brought_to_its_last_number_is_an_error_and_no_endless_loop() -> None:
    storage: Any = Memory()
    storage.put(f"commits/{10**15}", b"stray")
    with pytest.raises(CheckpointError, match=r"commits/1000000000000000.*Remove that file"):
        Chain.take_over(storage, 1)
