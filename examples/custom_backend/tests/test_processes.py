"""Processes that are killed while they read, and processes that are forked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from cpkit.errors import BackendUnavailable
from cpkit.sync import SyncCheckpointer

KILLED = """
import lmdb, os, signal, sys
environment = lmdb.open(sys.argv[1])
reads = [environment.begin() for _ in range(100)]
os.kill(os.getpid(), signal.SIGKILL)
"""

APPENDING = """
import sys
from cpkit.sync import SyncCheckpointer

with SyncCheckpointer(sys.argv[1]) as cp:
    version = cp.append("t", [{}])
    assert len(cp.load("t").messages) == version

sys.exit(version)
"""

FORKED = """
import os, sys, warnings
from cpkit.errors import BackendUnavailable
from cpkit.sync import SyncCheckpointer

warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forks
parent = SyncCheckpointer(sys.argv[1]).__enter__()
parent.append("t", [{}])
child = os.fork()

if child == 0:
    try:
        with SyncCheckpointer(sys.argv[1]):
            os._exit(1)
    except BackendUnavailable:
        os._exit(0)
    finally:
        os._exit(2)

assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert parent.append("t", [{}]) == 2
parent.close()
"""


GROWING = """
import sys
from cpkit.sync import SyncCheckpointer

with SyncCheckpointer(sys.argv[1]) as cp:
    for _ in range(20):
        cp.append("large", [{"text": "x" * 100_000}])
"""


def run(program: str, argument: str) -> int:
    return subprocess.run([sys.executable, "-c", program, argument]).returncode


def test_readers_that_were_killed_keep_no_places(tmp_path: Path) -> None:
    """The next opening clears their places; an environment has 126."""
    # The first process to open a folder clears all places, so one stays open.
    with lmdb.open(str(tmp_path), map_size=2**34):
        for version in (1, 2):
            assert run(KILLED, str(tmp_path)) == -signal.SIGKILL
            assert run(APPENDING, f"lmdb://{tmp_path}") == version


def test_a_store_that_another_process_grew_is_still_read_and_refused(
    tmp_path: Path,
) -> None:
    """An open store follows the growth; only its own ``map_size`` bounds its writes."""
    url = f"lmdb://{tmp_path}"

    with SyncCheckpointer(f"{url}?map_size=1000000") as cp:
        cp.append("t", [{}])
        assert run(GROWING, url) == 0
        data = cp.load("large")
        assert data is not None
        assert data.version == 20

        with pytest.raises(BackendUnavailable, match="raise map_size") as refused:
            cp.append("large", [{"text": "x" * 100_000}])

        assert not refused.value.maybe_applied

    with SyncCheckpointer(url) as cp:
        assert cp.append("large", [{}], expected_version=20) == 21


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_does_not_use_the_environment_of_its_parent(
    tmp_path: Path,
) -> None:
    """LMDB would have its readers and locks under the process id of the parent."""
    assert run(FORKED, f"lmdb://{tmp_path}") == 0
