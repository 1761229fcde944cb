"""The commands on an encrypted store: keyring, rewrap, erase, export, copy, doctor."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cpkit
from cpkit.cli.stores import Store
from cpkit.privacy import _NAMELESS, _OWNED
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
    # Where the ring refuses plain values, neither a file nor a store is encrypted.
    (tmp_path / "open.jsonl").write_text(in_the_clear.out)
    plain = f"sqlite:///{tmp_path}/plain.db"
    readable = str(tmp_path / "open.jsonl")
    assert invoke("copy", readable, plain, env={"CPKIT_KEYRING": None}).code == 0
    assert invoke("copy", plain, f"sqlite:///{tmp_path}/f.db").code == 0
    place = tmp_path / "ring.json"
    keys = json.loads(place.read_text())
    place.write_text(json.dumps({**keys, "sealed_only": True}))
    ended = invoke("copy", str(tmp_path / "open.jsonl"), f"sqlite:///{tmp_path}/e.db")
    assert (ended.code, "sealed_only" in ended.err) == (2, True)
    ended = invoke("copy", plain, f"sqlite:///{tmp_path}/g.db")
    assert (ended.code, "it is not encrypted" in ended.err) == (1, True)
    assert invoke("copy", str(file), f"sqlite:///{tmp_path}/e.db").code == 0
    monkeypatch.delenv("CPKIT_KEYRING")
    ended = invoke("copy", str(file), f"sqlite:///{tmp_path}/d.db")
    assert (ended.code, "CPKIT_KEYRING" in ended.err) == (2, True)


def test_a_store_is_rewrapped(url: str, tmp_path: Path) -> None:
    """After it, the keyring needs the newest key only."""
    place = tmp_path / "ring.json"
    before = in_store(url, dumps)
    assert invoke("keyring", str(place)).code == 0
    assert invoke("keyring", str(place), "--name", "x").code == 2
    ring = json.loads(place.read_text())
    oldest, newest = ring["keys"]
    done = f"2 of 2 threads rewrapped\nkeys in use: {newest}\n"
    assert invoke("rewrap", url).out == done
    again = invoke("rewrap", url, "--json").json
    assert (again["rewrapped"], again["in_use"]) == (0, [newest])
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
        seen = (
            "all values were looked at"
            if words
            else "of each the newest message, extra and calls; --check looks at all"
        )
        assert facts["encrypted"] == f"3 threads, 1 with values from before ({seen})"


def test_a_thread_of_another_ring_does_not_stop_the_tools(
    url: str, tmp_path: Path
) -> None:
    """It is named and counted, the others are done, and the exit code is 1."""
    place = tmp_path / "ring.json"
    other = tmp_path / "other.json"
    assert invoke("keyring", str(other), "--name", "agents").code == 0
    missing = next(iter(json.loads(other.read_text())["keys"]))

    async def write(cp: Store) -> None:
        await fill(cp, "user-7/b", CANARY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPKIT_KEYRING", str(other))
        in_store(url, write)

    assert invoke("keyring", str(place)).code == 0
    newest = list(json.loads(place.read_text())["keys"])[-1]
    done = invoke("rewrap", url, "--json")
    assert (done.code, done.json["rewrapped"]) == (1, 2)
    assert done.json["in_use"] == sorted([missing, newest])
    assert [missing in one for one in done.json["missing"]] == [True]
    ended = invoke("rewrap", url)
    assert (ended.code, "'user-7/b'" in ended.err) == (1, True)

    report = invoke("doctor", url, "--json")
    [told] = report.json["damaged"]
    assert (report.code, "'user-7/b'" in told, missing in told) == (1, True, True)
    assert invoke("doctor", url, "--check", "--json").json["damaged"] == [told]

    ended = invoke("export", url, "--output", str(tmp_path / "all.jsonl"))
    assert (ended.code, missing in ended.err) == (1, True)
    assert "exported 2 threads" in ended.err
    ended = invoke("copy", url, f"sqlite:///{tmp_path}/b.db", "--json")
    assert (ended.code, ended.json["copied"], ended.json["moved"]) == (1, 2, [])
    [failure] = ended.json["failures"]
    assert failure["thread_id"] == "user-7/b"


def test_doctor_takes_no_erased_hash_for_a_lost_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an erased call the store has the hash alone, and finds the call by it."""
    place = tmp_path / "ring.json"
    assert invoke("keyring", str(place), "--hash-keys").code == 0
    monkeypatch.setenv("CPKIT_KEYRING", str(place))
    url = f"sqlite:///{tmp_path}/hashed.db"

    async def write(cp: Store) -> None:
        await fill(cp, "t", CANARY)
        await cp.delete_thread("t")

    in_store(url, write)
    assert invoke("doctor", url, "--check", "--json").json["damaged"] == []


def test_an_erasure_takes_the_threads_of_runs_and_adapters(url: str) -> None:
    """What cannot be matched is counted; nothing else is touched."""
    mine = [
        "cpkit:run:user-7/a",
        "cpkit:run:cpkit:langgraph:user-7/a",
        "cpkit:langgraph:user-7/a",
        "cpkit:langgraph-store:user-7/facts:k",
        "cpkit:google-adk:user-7/s",
    ]
    others = ["cpkit:run:user-70/a", "cpkit:run:user-8/a", "cpkit:mcp:x user-7/"]
    nameless = ["cpkit:once:a0", "cpkit:once:a1", "cpkit:runs"]

    async def write(cp: Store) -> None:
        for one in (*mine, *others, *nameless):
            await cp.append(one, [{"n": 1}])

    async def names(cp: Store) -> list[str]:
        return [one.thread_id for one in await cp.list_threads(limit=100)]

    in_store(url, write)
    ended = invoke("erase", url, "--prefix", "user-7/", "--yes")
    assert ended.code == 0
    assert ended.json["threads"] == ["user-7/a", *sorted(mine)]
    assert ended.json["unmatched"] == {
        "cpkit:once": 2,
        "cpkit:runs": 1,
    }
    assert in_store(url, names) == sorted([*others, *nameless, "user-8/a"])

    # cpkit's own threads are not a person's, whatever they begin with.
    ended = invoke("erase", url, "--prefix", "cpk", "--yes")
    assert (ended.code, ended.json["threads"]) == (1, [])


def test_each_kind_of_internal_thread_is_erased_or_counted() -> None:
    """A new kind is added to one of the two lists of `cpkit.privacy`, or here."""
    texts = [path.read_text() for path in Path(cpkit.__file__).parent.rglob("*.py")]
    kinds = set(re.findall(r'"(cpkit:[a-z-]+:)["{]', "".join(texts)))
    assert len(kinds) > 12
    # Hashes, doctor's probe, which it deletes, keys of leases, and random ids.
    neither = {"cpkit:hash:", "cpkit:doctor:", "cpkit:lease:", "cpkit:beats:"}
    assert {
        one for one in kinds if not (_OWNED.match(one) or _NAMELESS.match(one))
    } == neither
