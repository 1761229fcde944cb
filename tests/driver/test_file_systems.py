"""File systems that are mounted, and what stores in files promise there."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from cpkit import BackendUnavailable, Survives, open_checkpointer
from cpkit.driver import file_system, warn_once
from tests.mounts import mounted

pytestmark = pytest.mark.skipif(not hasattr(os, "O_PATH"), reason="Linux tells")
needs_bindfs = pytest.mark.skipif(not shutil.which("bindfs"), reason="needs bindfs")

URLS = ["sqlite:///{}/agent.db", "file://{}/store"]
MEMORY = "mount", "-t", "tmpfs", "tmpfs"


@pytest.fixture
def mount() -> Iterator[Any]:
    """Mount file systems, which are unmounted at the end."""
    with ExitStack() as stack:
        yield lambda *args: stack.enter_context(mounted(*args))


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in log.records if one.levelno == logging.WARNING]


@pytest.fixture(autouse=True)
def _no_warning_yet() -> None:
    warn_once.cache_clear()


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("type_", ["tmpfs", "ramfs"])
async def test_what_is_in_memory_does_not_survive_the_machine(
    mount: Any, tmp_path: Path, url: str, type_: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The durability says so, and one warning, however many handles are opened."""
    place = mount(tmp_path / "in memory", "mount", "-t", type_, type_)

    for _ in range(2):
        store: Any = open_checkpointer(url.format(str(place).replace(" ", "%20")))

        async with store as cp:
            assert await cp.append("t", [{}]) > 0
            durability = cp.durability

    assert durability.survives is Survives.PROCESS
    assert durability.settings["file_system"] == type_
    [warning] = warnings(caplog)
    assert warning in durability.advice
    assert f"{place} is in memory ({type_})" in warning


@needs_bindfs
@pytest.mark.parametrize("url", URLS)
async def test_what_is_not_a_local_disk_is_named(
    mount: Any, tmp_path: Path, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither its locks nor its syncs are certain."""
    (tmp_path / "real").mkdir()
    place = mount(tmp_path / "seen", "bindfs", tmp_path / "real")
    store: Any = open_checkpointer(url.format(place))

    async with store as cp:
        assert await cp.append("t", [{}]) == 1
        durability = cp.durability

    assert durability.survives is Survives.PROCESS
    assert durability.settings["file_system"] == "fuse"
    assert "postgresql://" in durability.advice[0]
    assert warnings(caplog) == [durability.advice[0]]


def layers(folder: Path) -> str:
    for name in ("lower", "upper", "work"):
        (folder / name).mkdir()

    names = "lower", "upper", "work"
    return ",".join(f"{name}dir={folder / name}" for name in names)


@pytest.mark.parametrize("url", URLS)
async def test_an_overlay_promises_what_its_upper_layer_does(
    mount: Any, tmp_path: Path, url: str
) -> None:
    """That of a live system is in memory; a container's own goes with it."""
    memory = mount(tmp_path / "memory", *MEMORY)
    options = layers(memory)
    place = mount(tmp_path / "all", "mount", "-t", "overlay", "x", "-o", options)
    store: Any = open_checkpointer(url.format(place))

    async with store as cp:
        assert cp.durability.survives is Survives.PROCESS
        assert "is in memory" in cp.durability.advice[0]

    if (await asyncio.to_thread(file_system, str(tmp_path))).type in (
        "overlay",
        "tmpfs",
    ):
        pytest.skip("an overlay has no layer on such a file system")

    options = layers(tmp_path)
    disk = mount(tmp_path / "disk", "mount", "-t", "overlay", "x", "-o", options)
    kept: Any = open_checkpointer(url.format(disk))

    async with kept as cp:
        assert cp.durability.survives is Survives.MACHINE
        assert "deleted with the container" in cp.durability.advice[0]

    (tmp_path / "more").mkdir()
    options = layers(tmp_path / "more") + ",volatile"
    quick = mount(tmp_path / "quick", "mount", "-t", "overlay", "x", "-o", options)
    found = await asyncio.to_thread(file_system, str(quick))
    assert found.survives is Survives.PROCESS
    assert "volatile, so that a sync" in found.advice[0]


def test_the_mount_that_is_seen_counts(mount: Any, tmp_path: Path) -> None:
    """Not one that another mount hides, nor the one that holds a symbolic link."""
    outer = mount(tmp_path / "outer", *MEMORY)
    (outer / "inner").mkdir()
    mount(outer / "inner", "mount", "-t", "ramfs", "ramfs")
    assert file_system(str(outer / "inner")).type == "ramfs"
    (tmp_path / "link").symlink_to(outer / "inner")
    assert file_system(str(tmp_path / "link")).type == "ramfs"
    mount(tmp_path / "outer", *MEMORY)
    (outer / "inner").mkdir()
    assert file_system(str(outer / "inner")).type == "tmpfs"
    assert file_system(str(outer / "missing")).type == "unknown"


# Files that are mounted alone


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("options", ["rw", "ro"])
async def test_a_file_that_is_mounted_alone_is_refused(
    mount: Any, tmp_path: Path, is_new: bool, options: str
) -> None:
    """Its -wal file would be in another folder; nothing is written."""
    path, place = tmp_path / "agent.db", tmp_path / "container" / "agent.db"
    place.parent.mkdir()
    place.touch()

    if is_new:
        path.touch()
    else:
        async with open_checkpointer(f"sqlite:///{path}") as cp:
            await cp.append("t", [{}])

    before = path.read_bytes()
    mount(place, "mount", "--bind", "-o", options, path)

    for name in (place, tmp_path / "link"):
        if name != place:
            name.symlink_to(place)

        with pytest.raises(BackendUnavailable, match="mount its folder") as raised:
            await open_checkpointer(f"sqlite:///{name}").__aenter__()

        assert raised.value.maybe_applied is False

    assert list(place.parent.iterdir()) == [place]
    assert path.read_bytes() == before


async def test_a_folder_that_is_mounted_may_be_used_under_both_names(
    mount: Any, tmp_path: Path
) -> None:
    """The log is in it."""
    (tmp_path / "data").mkdir()
    place = mount(tmp_path / "container", "mount", "--bind", tmp_path / "data")

    async with (
        open_checkpointer(f"sqlite:///{tmp_path}/data/agent.db") as cp,
        open_checkpointer(f"sqlite:///{place}/agent.db") as other,
    ):
        assert await cp.append("t", [{}]) == 1
        assert await other.append("t", [{}]) == 2


async def test_a_file_with_two_names_is_refused(tmp_path: Path) -> None:
    """Each name would have its own -wal file; one name is enough again."""
    path = tmp_path / "agent.db"

    async with open_checkpointer(f"sqlite:///{path}") as cp:
        await cp.append("t", [{}])

    other = tmp_path / "other.db"
    other.hardlink_to(path)
    before = path.read_bytes()

    for name in (path, other):
        with pytest.raises(BackendUnavailable, match="2 names .* copy the file"):
            await open_checkpointer(f"sqlite:///{name}").__aenter__()

    assert path.read_bytes() == before
    assert {one.name for one in tmp_path.iterdir()} == {"agent.db", "other.db"}
    path.unlink()

    async with open_checkpointer(f"sqlite:///{other}") as cp:
        assert await cp.append("t", [{}]) == 2


@pytest.mark.parametrize("name", ["threads", "used-keys"])
async def test_a_part_of_a_folder_of_logs_that_is_mounted_alone_is_refused(
    mount: Any, tmp_path: Path, name: str
) -> None:
    """The other part would end with the container, and with it the keys."""
    place = tmp_path / "store"

    async with open_checkpointer(f"file://{place}") as cp:
        await cp.append("t", [{}])

    (tmp_path / name).mkdir()
    mount(place / name, "mount", "--bind", tmp_path / name)

    with pytest.raises(BackendUnavailable, match="mount the folder above"):
        await open_checkpointer(f"file://{place}").__aenter__()

    assert list((tmp_path / name).iterdir()) == []
