"""For stores in files: what a file system survives, and folders that survive it."""

from __future__ import annotations

import logging
import os
import re
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cpkit.records import Survives

__all__ = ["FileSystem", "create_folder", "file_system", "sync_folder", "warn_once"]

_IN_MEMORY = {"devtmpfs", "hugetlbfs", "ramfs", "rootfs", "tmpfs"}
# Any other type is not known to be a local disk: NFS, SMB, 9p, virtiofs, FUSE, …
_ON_DISKS = set(
    "apfs bcachefs btrfs ecryptfs erofs exfat ext2 ext3 ext4 f2fs iso9660 jfs nilfs2 "
    "ntfs ntfs3 overlay reiserfs squashfs ubifs udf unknown vfat xfs zfs".split()
)
# Mount options with which a sync returns before the bytes are on the disk.
_WITHOUT_SYNCS = {"fsync=volatile", "nobarrier", "volatile"}

_logger = logging.getLogger(__name__)


class FileSystem(NamedTuple):
    """``mount`` is the number of the mount; 0 and "unknown" where Linux is not.

    ``survives`` is the most that a store there can promise, and ``advice`` says why.
    """

    mount: int = 0
    type: str = "unknown"
    survives: Survives = Survives.MACHINE
    advice: tuple[str, ...] = ()

    def warn(self) -> None:
        """Log why a store promises less there, once in the life of the process."""
        if self.survives is not Survives.MACHINE:
            warn_once(self.advice[0])


def file_system(path: str) -> FileSystem:
    """Return the file system of a file or folder, as it is mounted there."""
    try:
        # Such a descriptor does not release the POSIX locks of the file when it closes.
        fd = os.open(path, os.O_PATH)

        try:
            facts = Path(f"/proc/self/fdinfo/{fd}").read_text()
        finally:
            os.close(fd)

        mount = int(facts.partition("mnt_id:")[2].split()[0])
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    except (AttributeError, IndexError, OSError):  # macOS, or without /proc
        return FileSystem()

    line = re.search(rf"^{mount} \S+ \S+ \S+ (\S+) .*- (\S+) \S* ?(.*)$", mounts, re.M)
    place, type_, options = line.groups() if line else (path, "unknown", "")
    place = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), place)
    upper = re.search(r"(?:^|,)upperdir=([^,]+)", options)
    lost = _WITHOUT_SYNCS & set(options.split(","))

    if type_ == "overlay" and upper and os.path.isdir(upper[1]):
        if file_system(upper[1]).type in _IN_MEMORY:  # a system that forgets
            type_ = "tmpfs"

    if type_ in _IN_MEMORY:
        advice = (
            f"{place} is in memory ({type_}): all is lost when the machine stops or "
            "the file system is unmounted; put the store on a disk"
        )
    elif type_ not in _ON_DISKS:
        advice = (
            f"{place} is not known to be a local disk ({type_}): locks may not hold "
            "between two machines or mounts, so a key can have two holders, and a sync "
            "may not reach a disk; use a local disk, or postgresql://"
        )
    elif lost:
        advice = (
            f"{place} is mounted with the option {min(lost)}, so that a sync does not "
            "reach the disk; mount it without"
        )
    elif type_ == "overlay":
        advice = (
            f"{place} is an overlay file system: a container's own is deleted with the "
            "container; mount a volume there"
        )
        return FileSystem(mount, type_, advice=(advice,))
    else:
        return FileSystem(mount, type_)

    return FileSystem(mount, type_, Survives.PROCESS, (advice,))


@cache
def warn_once(message: str) -> None:
    """Log this warning, unless the process has logged it already."""
    _logger.warning(message)


def create_folder(path: str, *, parents: bool = False) -> None:
    """Create a folder for its owner alone, unless it exists, and sync its name.

    The name of a folder that exists is synced too, because the process that created it
    may not have done so yet. A new folder is removed again where the sync fails. With
    ``parents`` the folder above a new one is created or synced in the same way.
    """
    parent = os.path.dirname(os.path.abspath(path))
    is_new = False

    if not os.path.isdir(path):
        if parents:
            create_folder(parent, parents=True)

        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
            is_new = True

    try:
        sync_folder(parent)
    except OSError as exc:
        if is_new:
            with suppress(OSError):
                os.rmdir(path)
        elif isinstance(exc, PermissionError):
            return  # of another user, who created the folder

        raise


def sync_folder(path: str) -> None:
    """Make the names in a folder survive a power loss; Windows has no way to."""
    if os.name == "nt":
        return

    descriptor = os.open(path, os.O_RDONLY)

    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
