"""A machine that has no inotify left: many editors and containers use it up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import asyncio, logging, sys

from cpkit.driver import StoreFailure
from cpkit_file import FileCheckpointer

logging.basicConfig(format="%(levelname)s %(message)s")

async def main():
    async with FileCheckpointer(sys.argv[1], poll=0.05) as cp:
        async with FileCheckpointer(sys.argv[1]) as other:
            for _ in range(3):
                try:
                    await cp.store.listen(print)
                except StoreFailure as exc:
                    assert "a watch polls" in str(exc)
                else:
                    raise AssertionError

            async with cp.watch("t") as changes:
                await other.append("t", [{}])
                print(await anext(changes))

asyncio.run(main())
"""


@pytest.mark.parametrize("limit", ["instances", "watches"])
def test_a_watch_polls_where_inotify_is_exhausted(tmp_path: Path, limit: str) -> None:
    """It is told once, with the cure and without a traceback."""
    setting = f"/proc/sys/user/max_inotify_{limit}"
    inside = f'echo 0 > {setting} && exec "$@"'
    enter = ["unshare", "--user", "--map-root-user", "sh", "-c"]

    if subprocess.run([*enter, inside, "sh", "true"], capture_output=True).returncode:
        pytest.skip("this user may not lower the limits of inotify")

    done = subprocess.run(
        [*enter, inside, "sh", sys.executable, "-c", SCRIPT, tmp_path / "store"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert (done.returncode, done.stdout) == (0, "t\n"), done.stderr
    assert "Traceback" not in done.stderr
    [warning] = [one for one in done.stderr.splitlines() if "watch polls" in one]
    assert warning.startswith(f"WARNING file://{tmp_path}/store: the system does not")
    assert "raise the sysctls fs.inotify.max_user_instances" in warning
