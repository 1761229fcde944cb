"""The commands on an encrypted store: keyring, rewrap, erase, export, copy, doctor."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpkit.cli.stores import Store
from tests.cli.command import in_store, invoke
from tests.privacy.raw import fill

CANARY = "a canary of a secret"


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An encrypted store with two threads, and CPKIT_KEYRING."""
    place = tmp_path / "ring.json"
    assert invoke("keyring", str(place), "--name", "agents").code == 0
    monkeypatch.setenv("CPKIT_KEYRING", str(place))
    made = f"sqlite:///{tmp_path}/a.db"

    async def stock(cp: Store) -> None:
        await fill(cp, "user-7/a", CANARY)
        await fill(cp, "user-8/a", CANARY)

    in_store(made, stock)
    return made


async def dumps(cp: Store) -> list[Any]:
    return [await cp.dump_thread(one) for one in ("user-7/a", "user-8/a")]


def test_an_export_is_encrypted_and_can_be_copied(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not readable without the ring; a moved line is found; ``--open`` is readable."""
    file = tmp_path / "all.jsonl"
    assert invoke("export", url, "--output", str(file)).code == 0
    assert "canary" not in file.read_text()
    copied = f"sqlite:///{tmp_path}/b.db"
    assert invoke("copy", str(file), copied).code == 0
    assert in_store(copied, dumps) == in_store(url, dumps)
    assert b"canary" not in (tmp_path / "b.db").read_bytes()

    lines = file.read_text().splitlines(keepends=True)
    (tmp_path / "moved.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    ended = invoke("copy", str(tmp_path / "moved.jsonl"), f"sqlite:///{tmp_path}/c.db")
    assert (ended.code, "line 1" in ended.err) == (2, True)

    in_the_clear = invoke("export", url, "--open")
    assert in_the_clear.out.count(CANARY) >= 10
    monkeypatch.delenv("CPKIT_KEYRING")
    ended = invoke("copy", str(file), f"sqlite:///{tmp_path}/d.db")
    assert (ended.code, "CPKIT_KEYRING" in ended.err) == (2, True)


def test_a_store_is_rewrapped(url: str, tmp_path: Path) -> None:
    """After it, the keyring needs the newest key only."""
    place = tmp_path / "ring.json"
    before = in_store(url, dumps)
    assert invoke("keyring", str(place)).code == 0
    assert invoke("keyring", str(place), "--name", "x").code == 2
    assert invoke("rewrap", url).out == "2 of 2 threads rewrapped\n"
    assert invoke("rewrap", url, "--json").json["rewrapped"] == 0
    ring = json.loads(place.read_text())
    newest = list(ring["keys"])[-1]
    place.write_text(json.dumps({**ring, "keys": {newest: ring["keys"][newest]}}))
    after = in_store(url, dumps)  # the rewrap was the last change
    assert [replace(one, updated_at=None) for one in after] == [
        replace(one, updated_at=None) for one in before
    ]
    ended = invoke("rewrap", url, env={"CPKIT_KEYRING": None})
    assert (ended.code, "CPKIT_KEYRING" in ended.err) == (2, True)


def test_a_missing_key_ends_a_command(url: str, tmp_path: Path) -> None:
    """The message names the key's id, and the exit code is that of a wrong setting."""
    other = tmp_path / "other.json"
    assert invoke("keyring", str(other)).code == 0
    key_id = list(json.loads((tmp_path / "ring.json").read_text())["keys"])[0]
    ended = invoke("show", url, "user-7/a", env={"CPKIT_KEYRING": str(other)})
    assert (ended.code, key_id in ended.err) == (2, True)


def test_a_person_is_erased(url: str) -> None:
    """The receipt is JSON; without --yes nothing is deleted."""
    assert invoke("erase", url, "--prefix", "user-7/").code == 2
    assert invoke("erase", url, "--prefix", "", "--yes").code == 2
    receipt = invoke("erase", url, "--prefix", "user-7/", "--yes").json
    assert (receipt["threads"], receipt["messages"]) == (["user-7/a"], 3)
    assert {one["key"] for one in receipt["kept"]} == {"user-7/a c1", "user-7/a c2"}
    assert CANARY not in str(receipt)
    gone, there = in_store(url, dumps)
    assert (gone.messages, len(there.messages)) == ([], 3)


def test_doctor_counts_what_is_encrypted(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was written before the store had a keyring."""

    async def write(cp: Store) -> None:
        await cp.append("before", [{"n": 1}])

    monkeypatch.delenv("CPKIT_KEYRING")
    in_store(url, write)
    ring = str(Path(url.removeprefix("sqlite:///")).with_name("ring.json"))

    for words in ([], ["--check"]):
        env = {"CPKIT_KEYRING": ring}
        facts = invoke("doctor", url, "--json", *words, env=env).json["facts"]
        assert facts["encrypted"] == "3 threads, 1 of them with values from before"
