"""Folders that a store creates: private, and with names that survive a power loss."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cpkit.driver import create_folder


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that were synced, in order."""
    paths: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return paths


needs_proc = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"), reason="needs /proc"
)


@needs_proc
def test_each_new_folder_is_synced_into_its_parent(
    tmp_path: Path, synced: list[str]
) -> None:
    """And the last that existed; each new one is for its owner alone."""
    create_folder(str(tmp_path / "a" / "b"), parents=True)

    assert synced == [str(tmp_path.parent), str(tmp_path), str(tmp_path / "a")]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@needs_proc
def test_a_folder_that_exists_is_synced_too(tmp_path: Path, synced: list[str]) -> None:
    """The process that created it may not have synced its name yet."""
    (tmp_path / "a").mkdir(0o755)
    create_folder(str(tmp_path / "a"))

    assert synced == [str(tmp_path)]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o755


def test_a_missing_parent_is_created_only_where_that_is_asked(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        create_folder(str(tmp_path / "a" / "b"))

    assert not (tmp_path / "a").exists()


def test_a_failed_sync_leaves_no_new_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the next call creates and syncs it; a folder that existed stays."""
    (tmp_path / "old").mkdir()

    def fail(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)

    for name in ("new", "old"):
        with pytest.raises(OSError, match="Input/output"):
            create_folder(str(tmp_path / name))

    assert [path.name for path in tmp_path.iterdir()] == ["old"]
