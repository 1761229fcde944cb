"""Keyrings: wrong and missing keys, rotation, threads from before, hashed keys."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cpkit import (
    BackendUnavailable,
    CorruptThread,
    InvalidURL,
    KeyMissing,
    MemoryCheckpointer,
    ToolCall,
    VersionConflict,
    open_checkpointer,
)
from cpkit.driver import Fate, StoreFailure, handle_over
from cpkit.driver.examine import examine
from cpkit.driver.seal import head_of, record_key
from cpkit.driver.sealed import SealedStore
from cpkit.keyring import FileKeyring, LocalKeyring, add_key, keyring_at
from cpkit.privacy import erase, rewrap
from cpkit.registry import DriverOptions, MissingExtra
from tests.driver.gated import GatedStore
from tests.privacy.raw import KEYS, fill, opened, ring, rows, run
from tests.stores import KINDS, fresh_url
from tests.sweeps import sweep

CANARY = "a canary of a secret"
KEY_ID = "k1"


class OwnCheckpointer:
    """A driver that is a checkpointer itself."""

    Options = DriverOptions
    client_options: frozenset[str] = frozenset()

    @classmethod
    def from_url(cls, url: str, **options: Any) -> Any:
        raise AssertionError("it was opened")


async def fails(cp: Any, error: type[Exception], match: str) -> None:
    """Check that each operation on thread t fails, and that a new thread works."""
    call = ToolCall("c9", "pay", {"x": 1}, "k9")
    operations: list[Callable[[], Awaitable[Any]]] = [
        lambda: cp.load("t"),
        lambda: cp.load_range("t", -1),
        lambda: cp.append("t", [{"n": 9}]),
        lambda: cp.append("t", [{"n": 9}], expected_version=3),
        lambda: cp.save_extra("t", {"z": 9}),
        lambda: cp.record_issued("t", call),
        lambda: cp.record_result("t", "c1", 9),
        lambda: cp.find_completed("t c1"),
        lambda: cp.list_calls("t"),
        lambda: cp.dump_thread("t"),
    ]

    for operation in operations:
        with pytest.raises(error, match=match) as raised:
            await operation()

        assert CANARY not in str(raised.value)


WRONG = {
    "missing": ring("k2"),
    "another key of this id": LocalKeyring({"k1": KEYS["k2"]}, name="test"),
    "another store": LocalKeyring({"k1": KEYS["k1"]}, name="other"),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_keyring_writes_nothing(wrong: str, tmp_path: Path) -> None:
    """The error names the key's id, for reads and for writes."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t", CANARY)
        await cp.record_issued("calls", ToolCall("c", "pay", {"x": 1}, "k"))
        await cp.record_result("calls", "c", 1)

    tables = "cpkit_threads", "cpkit_messages", "cpkit_extra", "cpkit_calls"
    before = [rows(tmp_path, f"SELECT * FROM {one}") for one in tables]

    async with opened(tmp_path, WRONG[wrong]) as cp:
        assert await cp.trim("t", 0) == 0
        await fails(cp, KeyMissing, f"'{KEY_ID}'")

        with pytest.raises(KeyMissing):
            await cp.save_extra("calls", {"x": 1})

    assert [rows(tmp_path, f"SELECT * FROM {one}") for one in tables] == before

    async with opened(tmp_path) as cp:
        assert len((await cp.load("t")).messages) == 3


async def test_no_text_of_a_value_is_in_the_files(tmp_path: Path) -> None:
    """Not in the file, its log, what an error says, or what a deletion leaves."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t", CANARY)
        inside = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        await cp.delete_thread("t")
        inside += b"".join(path.read_bytes() for path in tmp_path.iterdir())

    assert b"canary" not in inside
    assert b"t c1" in inside  # keys are readable


async def test_a_thread_from_before_is_encrypted_from_now_on(tmp_path: Path) -> None:
    """It opens as it is; its new values are sealed, its old ones stay."""
    async with open_checkpointer(f"sqlite:///{tmp_path}/a.db") as cp:
        await fill(cp, "t", CANARY)

    async with opened(tmp_path) as cp:
        await cp.append("t", [{"new": CANARY}], extra={"b": "new"})
        data = await cp.load("t")
        assert [one.get("new") for one in data.messages] == [None] * 3 + [CANARY]
        assert data.extra == {"a": [CANARY], "b": "new"}
        assert (await cp.find_completed("t c1")).result["paid"] == CANARY
        seals = await examine(cp, "t")
        assert (seals.sealed, seals.plain) == (2, 8)

    [[body]] = rows(tmp_path, "SELECT body FROM cpkit_messages WHERE key % 4 = 3")
    assert b"canary" not in body


@pytest.mark.parametrize("kind", sweep(KINDS, ["memory", "sqlite", "file"]))
async def test_an_encrypted_store_without_its_keyring(
    kind: str, tmp_path: Path
) -> None:
    """No operation takes an encrypted value for data; each says what is missing."""
    url = await asyncio.to_thread(fresh_url, kind, tmp_path)
    call = ToolCall("c", "pay", {"x": 1}, "k")

    async with open_checkpointer(url, keyring=ring()) as cp:
        await fill(cp, "t", CANARY)
        await cp.save_extra("extra", {"a": 1})
        await cp.record_issued("calls", call)

        async with (
            open_checkpointer(url) as plain,
            open_checkpointer(url, message_type=Any) as typed,
        ):
            store: Any = plain
            operations: list[Callable[[], Awaitable[Any]]] = [
                lambda: plain.load("t"),
                lambda: typed.load("t"),
                lambda: plain.load("extra"),
                lambda: plain.load("calls"),
                lambda: plain.record_issued("calls", call),
                lambda: plain.record_issued("u", ToolCall("c9", "pay", {}, "k")),
                lambda: plain.find_completed("t c1"),
                lambda: store.find_call("k"),
                lambda: store.list_calls("t"),
                lambda: store.dump_thread("t"),
            ]

            for operation in operations:
                with pytest.raises(CorruptThread, match="it is encrypted.*CPKIT_KEYR"):
                    await operation()


RECORD = "cpkit:key:" + "0" * 32
LIKE_SEALED: list[Any] = [
    ["cpkit:1:k:a:0", "-_-_AAAA", "cpkit:"],
    ["cpkit:1:k:AAAA:00000000"],
    ["it ends", "cpkit:"],
]


@pytest.mark.parametrize("value", LIKE_SEALED)
@pytest.mark.parametrize("kind", sweep(KINDS, ["memory", "sqlite", "file"]))
async def test_a_value_that_looks_encrypted(
    kind: str, value: Any, tmp_path: Path
) -> None:
    """A result that a user brings reads back, with a keyring and without one."""
    url = await asyncio.to_thread(fresh_url, kind, tmp_path)

    # Written without a keyring and read with one, and all other ways that may be.
    ways = (None, None), (None, ring()), (ring(), ring())

    for n, (writer, reader) in enumerate(ways):
        options: dict[str, Any] = {"message_type": Any}

        async with open_checkpointer(url, keyring=writer, **options) as cp:
            await cp.append(f"t{n}", [value], extra={RECORD: value})
            await cp.record_issued(f"t{n}", ToolCall("c", "pay", {}, f"k{n}"))
            await cp.record_result(f"t{n}", "c", value)

        async with open_checkpointer(url, keyring=reader, **options) as cp:
            data = await cp.load(f"t{n}") or pytest.fail("it is not there")
            found = await cp.find_completed(f"k{n}") or pytest.fail("no result")
            assert (data.messages, data.extra[RECORD]) == ([value], value)
            assert found.result == value


async def test_two_handles_append_without_a_version(tmp_path: Path) -> None:
    """Each has a version in mind that the other one makes wrong, again and again."""
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        await asyncio.gather(
            *(cp.append("t", [{"n": n}]) for n in range(40) for cp in (one, two))
        )
        data = await one.load("t")
        assert sorted(message["n"] for message in data.messages) == [
            n for n in range(40) for _ in "ab"
        ]


async def test_a_thread_that_another_handle_began_again(tmp_path: Path) -> None:
    """A handle that knows the ended life writes what everyone can read."""
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        await one.append("t", [{"n": 1}])
        await two.delete_thread("t")
        await two.append("t", [{"n": 2}])
        await one.append("t", [{"n": 3}], extra={"x": 1})
        await two.save_extra("t", {"y": 2})

    async with opened(tmp_path) as cp:
        data = await cp.load("t")
        assert ([one["n"] for one in data.messages], data.extra) == (
            [2, 3],
            {"x": 1, "y": 2},
        )


async def test_a_fence_still_holds(tmp_path: Path) -> None:
    """The handle repeats its own guess, and never a version that the caller gave."""
    async with opened(tmp_path) as one, opened(tmp_path) as two:
        await one.append("t", [{}])
        await two.append("t", [{}])

        with pytest.raises(VersionConflict, match="at version 2, not 1"):
            await one.append("t", [{}], expected_version=1)


@pytest.mark.parametrize("kind", sweep(KINDS, ["memory", "sqlite"]))
async def test_keys_rotate_while_agents_run(kind: str, tmp_path: Path) -> None:
    """Rewrapped, a store needs the newest key only; a second run does nothing."""
    url = await asyncio.to_thread(fresh_url, kind, tmp_path)

    def opened(_: Path, keyring: Any = None) -> Any:
        return open_checkpointer(url, keyring=keyring or ring())

    async with opened(tmp_path) as old:
        await fill(old, "t", CANARY)
        await old.record_issued("calls", ToolCall("c", "pay", {"x": 1}, "k"))

        async with opened(tmp_path, ring("k1", "k2")) as cp:
            await fill(cp, "new")
            await old.append("t", [{"n": 3}])
            await cp.append("t", [{"n": 4}])
            done = await rewrap(cp)
            assert (done.threads, done.rewrapped, done.busy) == (3, 2, [])
            assert (await rewrap(cp)).rewrapped == 0
            assert "cpkit:key" not in str(await cp.load("t"))
            assert "cpkit:key" not in str(await cp.dump_thread("t"))

    async with opened(tmp_path, ring("k2")) as cp:
        # First of all a read that does not bring the records of the thread.
        assert (await cp.find_completed("t c1")).result["paid"] == CANARY
        assert len((await cp.load("t")).messages) == 5
        [call] = (await cp.load("calls")).pending
        assert call.call.args == {"x": 1}
        await cp.append("t", [{"n": 5}])
        await cp.record_result("calls", "c", {"ok": CANARY})


async def test_a_second_rotation_renews_the_records(tmp_path: Path) -> None:
    """A record has the place of the head that it is for."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t")

    async with opened(tmp_path, ring("k1", "k2")) as cp:
        await rewrap(cp)

    async with opened(tmp_path, ring("k2", "k1")) as cp:
        assert (await rewrap(cp)).rewrapped == 0

    keys = {**KEYS, "k3": b"3" * 32}
    third = LocalKeyring({one: keys[one] for one in ("k2", "k3")}, name="test")

    async with opened(tmp_path, third) as cp:
        assert (await rewrap(cp)).rewrapped == 1

    async with opened(tmp_path, LocalKeyring({"k3": b"3" * 32}, name="test")) as cp:
        assert len((await cp.load("t")).messages) == 3


async def test_rewrap_revives_no_key_of_a_deleted_thread(tmp_path: Path) -> None:
    """A value that does not open in its place brings no data key under the new key."""
    async with opened(tmp_path) as cp:
        await fill(cp, "t", CANARY)
        [[old]] = rows(tmp_path, "SELECT body FROM cpkit_messages WHERE key=(1 << 32)")
        await cp.delete_thread("t", forget_keys=True)
        await fill(cp, "t")

    dead = old[: old.index(b",")].decode()
    value = dead + ',"-_-_AAAA","cpkit:"]'
    number = "(SELECT number FROM cpkit_threads)"
    run(tmp_path, f"INSERT INTO cpkit_extra VALUES ({number}, '\"zz\"', ?)", value)

    async with opened(tmp_path, ring("k1", "k2")) as cp:
        done = await rewrap(cp)
        assert (done.rewrapped, len(done.damaged)) == (1, 1)
        assert "extra key" in done.damaged[0]

    names = rows(tmp_path, "SELECT key FROM cpkit_extra WHERE key LIKE '\"cpkit:k%'")
    assert len(names) == 1
    assert names[0][0].encode() != record_key(dead.encode())
    run(tmp_path, "DELETE FROM cpkit_extra WHERE key = '\"zz\"'")

    async with opened(tmp_path, ring("k2")) as cp:
        assert len((await cp.load("t")).messages) == 3


WRITES: dict[str, Callable[[Any], Awaitable[Any]]] = {
    "append": lambda cp: cp.append("t", [{"n": 9}]),
    "fenced": lambda cp: cp.append("t", [{"n": 9}], expected_version=1),
    "extra": lambda cp: cp.save_extra("t", {"x": 9}),
    "claim": lambda cp: cp.record_issued("t", ToolCall("c9", "pay", {}, "k9")),
}


@pytest.mark.parametrize("way", ["later", "after a load"])
@pytest.mark.parametrize("write", WRITES)
async def test_a_writer_does_not_go_on_with_a_destroyed_key(
    write: str, way: str, tmp_path: Path
) -> None:
    """A minute after it read the thread, or where it reads that the thread is gone."""
    async with opened(tmp_path) as agent, opened(tmp_path) as other:
        await agent.append("t", [{"n": 1}], extra={"y": 1})
        [[old]] = rows(tmp_path, "SELECT value FROM cpkit_extra")
        await other.delete_thread("t", forget_keys=True)

        if way == "later":
            await other.append("t", [{"n": 2}])  # the version is the one from before
            agent.store._threads["t"].until = time.monotonic() - 1
        else:
            assert await agent.load("t") is None
            await other.append("t", [{"n": 2}])

        await WRITES[write](agent)
        dead = head_of(old.encode())
        assert agent.store._threads["t"].head != dead
        values = [
            one.encode() if isinstance(one, str) else one
            for table, column in (
                ("cpkit_messages", "body"),
                ("cpkit_extra", "value"),
                ("cpkit_calls", "args"),
            )
            for [one] in rows(tmp_path, f"SELECT {column} FROM {table}")
        ]
        assert len(values) == 2
        assert dead not in map(head_of, values)
        assert (await agent.load("t")).messages[0] == {"n": 2}


async def test_a_thread_of_calls_keeps_its_data_key(tmp_path: Path) -> None:
    """Also a thread with nothing but calls that have an outcome."""
    async with opened(tmp_path) as cp:
        await cp.record_issued("t", ToolCall("c", "pay", {}, "k"))
        await cp.record_result("t", "c", 1)
        head = cp.store._threads["t"].head
        cp.store._threads["t"].until = time.monotonic() - 1
        await cp.record_issued("t", ToolCall("c2", "pay", {}, "k2"))
        assert cp.store._threads["t"].head == head


async def test_a_running_store_takes_up_a_new_key(tmp_path: Path) -> None:
    """The file is read again; a process that has not read it yet misses nothing."""
    place = tmp_path / "ring.json"
    first = await asyncio.to_thread(add_key, place, name="test")
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
    url = f"sqlite:///{tmp_path}/a.db"

    async with (
        open_checkpointer(url, keyring=place) as slow,
        open_checkpointer(url, keyring=str(place)) as cp,
    ):
        await slow.append("t", [{"n": 1}])
        second = await asyncio.to_thread(add_key, place)
        store: Any = cp
        store.store._look_at = 0.0  # a second has passed
        await cp.append("t", [{"n": 2}])
        assert len((await slow.load("t") or pytest.fail("no t")).messages) == 2

    found = rows(tmp_path, "SELECT body FROM cpkit_messages ORDER BY key")
    ids = [body.split(b":")[2].decode() for [body] in found]
    assert ids == [first, second]
    assert (await asyncio.to_thread(FileKeyring, place)).newest == second


def test_a_keyring_has_a_place(tmp_path: Path, monkeypatch: Any) -> None:
    """A file or a variable; an error shows no part of a key."""
    place = tmp_path / "ring.json"
    add_key(place)
    monkeypatch.setenv("RING", place.read_text())
    assert keyring_at("env:RING").newest == keyring_at(place).newest

    with pytest.raises(InvalidURL, match="cpkit keyring"):
        keyring_at(tmp_path / "none.json")

    with pytest.raises(InvalidURL, match="not set"):
        keyring_at("env:NONE")

    secret = "c2VjcmV0IGtleQ=="
    monkeypatch.setenv("RING", json.dumps({"keys": {"k": secret}}))

    with pytest.raises(InvalidURL, match="32 bytes") as raised:
        keyring_at("env:RING")

    assert secret not in str(raised.value)
    assert raised.value.__cause__ is None


async def test_the_environment_names_a_keyring(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """``CPKIT_KEYRING`` counts for every store that ``open_checkpointer`` opens."""
    monkeypatch.setenv("CPKIT_KEYRING", str(tmp_path / "none.json"))

    with pytest.raises(InvalidURL, match="none.json"):
        async with open_checkpointer("memory://"):
            pytest.fail("it opened")

    await asyncio.to_thread(add_key, tmp_path / "none.json")

    async with open_checkpointer("memory://named") as cp:
        await cp.append("t", [{"n": CANARY}])

    store: MemoryCheckpointer[Any] = MemoryCheckpointer("named")

    async with store as plain:
        with pytest.raises(CorruptThread):
            await plain.load("t")


async def test_idempotency_keys_are_hashed(tmp_path: Path) -> None:
    """The store has no readable key, and every method answers as without the hash."""
    hashed = ring(hash_key=b"h" * 32)
    key = "card 4242"

    async with opened(tmp_path, hashed) as cp:
        call = ToolCall("c1", "pay", {"x": 1}, key)
        assert await cp.record_issued("t", call) is None
        assert (await cp.record_issued("t", call)).call == call
        found = await cp.record_issued("u", ToolCall("c2", "pay", {}, key))
        assert found.call.idempotency_key == key
        await cp.record_result("t", "c1", {"ok": 1})
        assert (await cp.find_completed(key)).call == call
        [listed] = await cp.list_calls("t")
        dump = await cp.dump_thread("t")
        assert (listed.call, dump.calls) == (call, [listed])
        await cp.delete_thread("t")
        assert (await cp.find_completed(key)).call.idempotency_key == key
        again = await cp.record_issued("t", call)
        assert (again.erased, again.call.idempotency_key) == (True, key)
        erased = await cp.dump_thread("t")
        await cp.delete_thread("t", forget_keys=True)
        await cp.restore_thread(erased)
        assert (await cp.find_completed(key)).erased

    assert b"4242" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


async def test_a_hash_is_not_the_key(tmp_path: Path) -> None:
    """Who reads the hash in the store, and may choose a key, gets no result."""
    async with opened(tmp_path, ring(hash_key=b"h" * 32)) as cp:
        await cp.record_issued("t", ToolCall("c1", "pay", {"x": 1}, "secret"))
        await cp.record_result("t", "c1", {"ok": CANARY})
        [[shown]] = rows(
            tmp_path, "SELECT idempotency_key FROM cpkit_calls WHERE call_id = 'c1'"
        )
        assert shown.startswith("cpkit:hash:")
        assert await cp.find_completed(shown) is None
        assert await cp.record_issued("u", ToolCall("c", "pay", {}, shown)) is None
        await cp.delete_thread("u", forget_keys=True)
        await cp.delete_thread("t")
        # What is left of it shows the key, and is not found by the hash either.
        [left] = await cp.list_calls("t")
        assert left.call.idempotency_key == "secret"
        assert await cp.find_call(shown) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda shown: shown[:20] + shown[20:].swapcase(), "its key is damaged"),
        (lambda shown: f"{shown}====", "its key is damaged"),
        (lambda shown: "forged", "its key is not hashed"),
    ],
    ids=["other bytes", "another text of the same bytes", "plain"],
)
async def test_a_hash_that_the_keyring_has_not_made_is_damage(
    change: Callable[[str], str], words: str, tmp_path: Path
) -> None:
    """Of an erased call too, which has nothing else that is sealed."""
    hashed = ring(hash_key=b"h" * 32, sealed_only=True)

    async with opened(tmp_path, hashed) as cp:
        await cp.record_issued("t", ToolCall("c1", "pay", {"x": 1}, "secret"))
        await cp.delete_thread("t")
        of = "WHERE call_id = 'c1'"
        [[shown]] = rows(tmp_path, f"SELECT idempotency_key FROM cpkit_calls {of}")
        run(tmp_path, f"UPDATE cpkit_calls SET idempotency_key = ? {of}", change(shown))

        with pytest.raises(CorruptThread, match=words):
            await cp.list_calls("t")


@pytest.mark.parametrize("key_id", ["", "a key", "k" * 65, "k:1", "é"])
async def test_a_keyring_with_another_id_writes_nothing(
    key_id: str, tmp_path: Path
) -> None:
    """What it wraps could not be opened again."""

    class Other(LocalKeyring):
        def wrap(self, data_key: bytes) -> tuple[str, bytes]:
            return key_id, super().wrap(data_key)[1]

    async with opened(tmp_path, Other({"k1": KEYS["k1"]})) as cp:
        with pytest.raises(InvalidURL, match="1 to 64 characters"):
            await cp.append("t", [{"n": 1}])

        assert await cp.load("t") is None


async def test_an_erasure_has_a_receipt(tmp_path: Path) -> None:
    """It counts what went, and names what is kept; a second one finds only that."""
    async with opened(tmp_path) as cp:
        await fill(cp, "user-7/a", CANARY)
        await cp.append("user-7/b", [{}])
        await fill(cp, "user-70", CANARY)
        receipt = await erase(cp, "user-7/")
        assert receipt.threads == ["user-7/a", "user-7/b"]
        assert (receipt.messages, receipt.extra, receipt.calls) == (4, 2, 2)
        assert [one["status"] for one in receipt.kept] == ["completed"] * 2
        assert receipt.kept[0]["key"] == "user-7/a c1"
        assert await cp.load("user-7/a") is None
        again = await erase(cp, "user-7/", forget_keys=True)
        assert (again.threads, again.messages, again.kept) == (["user-7/a"], 0, [])
        assert [one.thread_id for one in await cp.list_threads()] == ["user-70"]

        with pytest.raises(ValueError, match="prefix"):
            await erase(cp, "")


def test_a_keyring_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the pip line; without a keyring nothing is missing."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    open_checkpointer("memory://")

    with pytest.raises(MissingExtra, match=r"pip install 'cpkit\[privacy\]'"):
        open_checkpointer("memory://", keyring="ring.json")


async def test_a_driver_without_a_store_takes_no_keyring(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is refused, because its values would be readable."""
    monkeypatch.setenv("CPKIT_KEYRING", "ring.json")
    monkeypatch.setattr("cpkit.registry._find_driver", lambda _: OwnCheckpointer)

    with pytest.raises(InvalidURL, match="no keyring"):
        open_checkpointer("own://x")


class Away(GatedStore):
    """A store whose next reads of a thread fail, as often as ``down`` says."""

    down = 0
    fate: Fate = "not sent"

    async def snapshot(self, *args: Any) -> Any:
        if self.down:
            self.down -= 1
            raise StoreFailure(self.fate, "the server is away")

        return await super().snapshot(*args)


async def test_a_store_that_is_away_is_asked_again() -> None:
    """Rotation has the retries and the errors of every read."""
    store = Away(timeout=30)

    async with handle_over(SealedStore(store, ring())) as cp:
        await fill(cp, "t")

    async with handle_over(SealedStore(store, ring("k1", "k2"))) as cp:
        store.down = 2
        assert (await rewrap(cp)).rewrapped == 1
        store.down, store.fate = 1, "rejected"

        with pytest.raises(BackendUnavailable, match="the server is away"):
            await rewrap(cp)
