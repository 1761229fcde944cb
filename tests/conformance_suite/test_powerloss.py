"""Power losses: what the suite reads from a trace, and what it cannot read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from conformance import Harness, Status, URLHarness, all_clauses, run_clause
from conformance.case import Case
from conformance.clauses.powerloss import NAMES, STEPS
from conformance.failure import Skip
from conformance.operations import WRITES, Write
from conformance.powerloss.disk import Disk
from conformance.powerloss.files import Change, File, Names
from conformance.powerloss.recording import reports, tracer
from conformance.powerloss.script import (
    ABILITIES,
    Client,
    clients,
    continued,
    expected,
)
from conformance.powerloss.states import state
from conformance.powerloss.trace import Call, calls
from conformance.powerloss.trial import Trial

PROCESSES = """
import os, subprocess, sys, threading

log = os.open(sys.argv[1] + "/log", os.O_WRONLY | os.O_CREAT)
os.write(log, b"parent ")
child = os.fork()

if child == 0:
    os.write(log, b"child ")
    os.chdir(sys.argv[1])
    inherited = os.open("inherited", os.O_WRONLY | os.O_CREAT)
    subprocess.run(["sh", "-c", "echo program >&%d" % inherited], pass_fds=[inherited])
    os.rename("inherited", "renamed")
    os._exit(0)

os.waitpid(child, 0)
thread = threading.Thread(target=os.write, args=(log, b"thread "))
thread.start()
thread.join()
other = os.open(sys.argv[1] + "/other", os.O_WRONLY | os.O_CREAT)
os.write(other, b"other")
os.write(log, b"end")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_disk_follows_several_processes(tmp_path: Path) -> None:
    """Processes share positions and folders as they inherit them."""
    folder = tmp_path / "disk"
    folder.mkdir()
    trace = tmp_path / "trace"
    command = [*tracer(trace), sys.executable, "-c", PROCESSES, str(folder)]
    subprocess.run(command, check=True)
    disk = Disk(str(folder))

    with trace.open() as lines:
        for call in calls(lines.readlines(), os.getcwd()):
            disk.follow(call)

    kept = state(disk, "everything", Random(0)).contents
    assert kept == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert kept["log"] == b"parent child thread end"
    assert kept["renamed"] == b"program\n"


def test_a_recording_that_misses_changes_is_skipped(tmp_path: Path) -> None:
    """A server that another process starts is not recorded, and not certified."""
    (tmp_path / "data").write_bytes(b"1")
    trial = Trial(Case(Harness(), Random(0)), Harness(), tmp_path, [], is_served=True)

    with pytest.raises(Skip, match="data was changed by calls that were not recorded"):
        list(trial.moments([], 1))


def test_a_write_that_a_kill_cut_off_is_unclear(tmp_path: Path) -> None:
    """The server is killed in a checkpoint: the bytes may be in the file or not."""
    (tmp_path / "data").write_bytes(b"1")
    trial = Trial(Case(Harness(), Random(0)), Harness(), tmp_path, [], is_served=True)
    trial.contents = {"data": b"0"}
    path = "".join(f"\\x{byte:02x}" for byte in os.fsencode(tmp_path / "data"))
    trace = [
        f'7 pwrite64(3<{path}>, "\\x31", 1, 0 <unfinished ...>\n',
        "8 fdatasync(4) = 0\n",
        "7 <... pwrite64 resumed>) = ?\n",
        "7 +++ killed by SIGKILL +++\n",
    ]
    assert list(trial.moments([*calls(trace, "/")], 1)) == []


(POWERLOSS,) = [
    clause for clause in all_clauses() if clause.id == "powerloss.kill-at-every-call"
]


class NoFolder(URLHarness):
    """A store in files whose harness does not say in which folder."""

    async def in_folder(self, folder: str) -> Harness | None:
        return None


@pytest.mark.parametrize(
    ("kind", "advice"),
    [(NoFolder, "define in_folder"), (URLHarness, "install the package strace")],
)
def test_a_skip_says_what_to_add(
    kind: type[URLHarness],
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A person can act on the reason, without the documentation."""
    monkeypatch.setenv("PATH", str(tmp_path))  # without strace
    harness = kind(f"sqlite:///{tmp_path}/store.db")
    outcome = run_clause(POWERLOSS, harness)
    assert outcome.status is Status.SKIPPED
    assert advice in outcome.reason


@pytest.mark.parametrize(
    ("sent", "count"),
    [(b"[0, 1]\n[0, 2]\n", 2), (b"[\0\0\1" + b"x" * 91, 0)],
    ids=["two reports", "a packet of 91 bytes, as MariaDB writes its length"],
)
def test_a_packet_of_a_server_is_not_a_report(sent: bytes, count: int) -> None:
    place, text = (
        "".join(f"\\x{byte:02x}" for byte in one) for one in (b"socket:[5]", sent)
    )
    call = Call("sendto", f'1<{place}>, "{text}", {len(sent)}', len(sent), "", 0)
    assert len(reports(call)) == count


def test_appends_in_order_are_cut_without_holes() -> None:
    """A file loses only its last bytes, for an engine that needs that."""
    file = File("log")

    for number in range(4):
        file.change(Change(600 * number, bytes([65 + number]) * 600, number))

    whole, random = file.kept(), Random(0)
    assert all(whole.startswith(file.cut(random)) for _ in range(200))
    assert not all(whole.startswith(file.torn(random)) for _ in range(200))


def test_names_in_order_are_a_beginning() -> None:
    """Of the names that are not synced no later one is there without the earlier."""

    def some(*, in_order: bool) -> set[tuple[str, ...]]:
        disk, random = Disk("/store"), Random(0)

        for n, name in enumerate("abcd"):
            disk.names.append(Names(name, n, [(disk.root, name, File(name))]))

        states = (
            state(disk, "a mixture", random, names_in_order=in_order)
            for _ in range(100)
        )
        return {tuple(sorted(one.contents)) for one in states}

    beginnings = {tuple("abcd"[:count]) for count in range(5)}
    assert some(in_order=True) == beginnings
    assert some(in_order=False) > beginnings


ALL = [*ABILITIES.values()]


@pytest.mark.parametrize("seed", range(3))
def test_the_writers_do_every_kind_of_write(seed: int) -> None:
    """A new row of the table is written before the power fails."""
    steps = [step for one in clients(NAMES, STEPS, seed, ALL) for step in one.steps]
    found = {(step.method, frozenset(step.options)) for step in steps}
    assert found == {(row.method, row.options) for row in WRITES}
    erased = [one for one in steps if one.thread.startswith("gone-")]
    assert [step.method for step in erased][-1] == "record_result"


@pytest.mark.parametrize("write", WRITES, ids=lambda row: row.name)
async def test_a_step_leaves_another_state(write: Write) -> None:
    """Where a step is lost, the threads and keys of its client show that."""
    client = continued(Client("a", []), 0, write, "next")
    states = await expected(client, ALL)
    at = len(client.steps) - 3
    assert client.steps[at - 1].method == write.method
    assert states[at - 1] != states[at]
