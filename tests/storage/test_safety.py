from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powertrain.storage import safety
from powertrain.storage.safety import Mount, mount_at, parse_mounts, remarks_about_mount, space_remark

TABLE = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw,relatime shared:1 - tmpfs tmpfs rw,size=24682740k
27 1 0:30 / / rw,relatime - overlay overlay rw,lowerdir=/l,upperdir=/u
31 27 8:1 / /data rw,relatime shared:5 master:1 - ext4 /dev/sda1 rw
32 27 0:40 /export /mnt/my\\040nfs rw - nfs4 server:/export rw,vers=4.2
33 31 0:41 / /data/fast rw - fuse.s3fs s3fs rw
this line is none
"""


def kind_at(path: str) -> str:
    mount = mount_at(path, parse_mounts(TABLE))
    assert mount is not None
    return mount.kind


def test_each_path_is_found_on_its_mount() -> None:
    assert kind_at("/") == "overlay"
    assert kind_at("/database") == "overlay"
    assert kind_at("/data") == "ext4"
    assert kind_at("/data/runs") == "ext4"
    assert kind_at("/data/fast/x") == "fuse.s3fs"
    assert kind_at("/mnt/my nfs/x") == "nfs4"
    assert kind_at("/dev/shm") == "tmpfs"
    assert len(parse_mounts(TABLE)) == 6


def test_a_later_mount_at_the_same_place_hides_the_earlier() -> None:
    mounts = [Mount("/", "ext4", "a"), Mount("/x", "ext4", "b"), Mount("/x", "tmpfs", "c")]
    assert mount_at("/x/y", mounts) == mounts[2]


_points = st.lists(
    st.text(
        st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=6
    ).filter(lambda part: part not in (".", "..")),
    max_size=3,
).map(lambda parts: "/" + "/".join(parts))
_kinds = st.sampled_from(["ext4", "tmpfs", "overlay", "nfs", "fuse.sshfs"])
_mounts = st.lists(st.builds(Mount, _points, _kinds, st.just("source")), max_size=8)


def escaped(point: str) -> str:
    """As the kernel writes it."""
    return "".join(rf"\{ord(c):03o}" if c in " \t\n\\" else c for c in point)


def line(mount: Mount, optional: list[str]) -> str:
    fields = ["1", "2", "0:3", "/", escaped(mount.point), "rw", *optional]
    return " ".join(fields) + f" - {mount.kind} {mount.source} rw"


@given(_mounts, st.lists(st.sampled_from(["shared:1", "master:2", "unbindable"]), max_size=2))
def test_any_table_reads_back(mounts: list[Mount], optional: list[str]) -> None:
    table = "".join(f"{line(mount, optional)}\n" for mount in mounts)
    assert parse_mounts(table) == mounts


@given(st.text(max_size=200))
def test_no_table_makes_it_stumble(table: str) -> None:
    for mount in parse_mounts(table):
        assert isinstance(mount, Mount)


@given(_mounts, _points)
def test_the_mount_found_is_the_deepest_above_the_path(mounts: list[Mount], path: str) -> None:
    found = mount_at(path, mounts)
    above = [m for m in mounts if m.point == "/" or (path + "/").startswith(m.point + "/")]
    assert (found is None) == (not above)
    if found is not None:
        assert found in above
        assert len(found.point) == max(len(mount.point) for mount in above)


@pytest.mark.parametrize(
    ("mount", "container", "says"),
    [
        (Mount("/dev/shm", "tmpfs", "tmpfs"), False, "in memory.*gone when the machine restarts"),
        (Mount("/run", "ramfs", "x"), True, "container or the machine restarts"),
        (Mount("/", "overlay", "overlay"), True, "container's own disk.*gone when the container is removed"),
        (Mount("/", "ext4", "/dev/vda"), True, "container's own disk"),
    ],
)
def test_places_that_do_not_last_are_reported(mount: Mount, container: bool, says: str) -> None:
    (remark,) = remarks_about_mount("/the/path", mount, container)
    assert "'/the/path'" in remark
    assert "Choose a storage path" in remark

    assert re.search(says, remark)


@pytest.mark.parametrize(
    ("mount", "container"),
    [
        (Mount("/", "ext4", "/dev/sda1"), False),
        (Mount("/data", "xfs", "/dev/sdb1"), True),
        (Mount("/mnt", "nfs4", "server:/x"), True),
    ],
)
def test_places_that_last_are_not_remarked_on(mount: Mount, container: bool) -> None:
    assert remarks_about_mount("/the/path", mount, container) == []


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "cifs", "lustre", "gpfs", "ceph", "fuse.sshfs", "fuse", "9p", "fuse.gcsfuse"]
)
def test_file_systems_of_other_machines_are_known(kind: str) -> None:
    assert safety.is_network_kind(kind)


@pytest.mark.parametrize(
    "kind", ["ext4", "xfs", "btrfs", "overlay", "tmpfs", "fuseblk", "zfs", "fuse.fuse-overlayfs"]
)
def test_file_systems_of_this_machine_are_known(kind: str) -> None:
    assert not safety.is_network_kind(kind)


def test_a_path_is_judged_by_its_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, network in (("nfs4", True), ("ext4", False)):
        mount = Mount("/x", kind, "source")
        monkeypatch.setattr(safety, "mount_of", lambda path, mount=mount: mount)
        assert safety.is_network_file_system("/x/run") is network
    monkeypatch.setattr(safety, "mount_of", lambda path: None)
    assert not safety.is_network_file_system("/x/run")
    assert safety.remarks_about("/x/run") == []


def test_a_path_that_is_not_there_yet_is_judged_by_what_is_above(tmp_path: Path) -> None:
    later = tmp_path / "not" / "there" / "yet"
    assert safety.mount_of(later) == safety.mount_of(tmp_path)
    now = os.statvfs(tmp_path)
    assert safety.free_bytes(later) == pytest.approx(now.f_bavail * now.f_frsize, rel=0.2)
    assert not later.parent.exists()


def test_memory_of_this_machine_is_reported() -> None:
    mount = safety.mount_of("/dev/shm")
    if mount is None or mount.kind != "tmpfs":
        pytest.skip("this machine has no file system in memory")
    assert "in memory" in safety.remarks_about("/dev/shm/run")[0]


GIB = 1 << 30


def test_room_for_what_is_kept_needs_no_remark() -> None:
    assert space_remark(3 * GIB, GIB, 3) == ""
    assert space_remark(2 * GIB, GIB, None) == ""
    assert space_remark(0, 0, 3) == ""


def test_too_little_room_is_reported_with_numbers_and_what_to_do() -> None:
    remark = space_remark(5 * GIB // 2, GIB, 3)
    for part in ("2.5 GiB free", "takes 1.0 GiB", "room for 2 more", "3 are kept", "smaller num_to_keep"):
        assert part in remark
    assert "num_to_keep=" in space_remark(GIB, GIB, None)
    assert "512.0 MiB" in space_remark(GIB // 2, GIB, 1)


@given(st.integers(0, 1 << 50), st.integers(1, 1 << 45), st.none() | st.integers(1, 100))
def test_more_room_never_brings_a_remark(free: int, size: int, kept: int | None) -> None:
    if space_remark(free, size, kept) == "":
        assert space_remark(free + size, size, kept) == ""
    else:
        assert free < (kept or 2) * size
