"""What a store gets, in every store: no text, and each changed byte is found."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from cpkit import CorruptThread, open_checkpointer
from cpkit.driver import Erase, Restore, StoredDump
from cpkit.keyring import LocalKeyring
from tests.privacy.raw import fill, ring
from tests.servers.postgres import PostgresServer
from tests.servers.redis import RedisServer
from tests.stores import SHARED, fresh_url

CANARY = "a canary of a secret"
PLACES = "message", "extra", "args", "result"


def changed(stored: StoredDump, chosen: random.Random) -> StoredDump:
    """Return the dump with another byte in one of its values."""
    bodies, items, calls = [*stored.bodies], [*stored.items], [*stored.calls]
    row = chosen.randrange(2)

    match chosen.choice(PLACES):
        case "message":
            bodies[row] = other(bodies[row], chosen)
        case "extra":
            items[row] = items[row][0], other(items[row][1], chosen)
        case "args":
            calls[row] = calls[row]._replace(args=other(calls[row].args, chosen))
        case _:
            result = other(calls[row].result or b"", chosen)
            calls[row] = calls[row]._replace(result=result)

    return stored._replace(bodies=bodies, items=items, calls=calls)


def other(value: bytes | str, chosen: random.Random) -> bytes:
    text = bytearray(value.encode() if isinstance(value, str) else value)
    spot = chosen.randrange(len(text))
    text[spot] = chosen.choice([c for c in range(32, 127) if c != text[spot]])
    return bytes(text)


def as_bytes(stored: StoredDump) -> StoredDump:
    """A store may fetch text, and takes bytes."""

    def fix(one: Any) -> Any:
        return one.encode() if isinstance(one, str) else one

    return stored._replace(
        bodies=[fix(one) for one in stored.bodies],
        items=[(fix(key), fix(value)) for key, value in stored.items],
        calls=[
            one._replace(args=fix(one.args), result=fix(one.result))
            for one in stored.calls
        ],
    )


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        ("memory", 200),
        pytest.param("memory", 1_000, marks=pytest.mark.long),
        *(pytest.param(kind, 200, marks=pytest.mark.long) for kind in SHARED),
    ],
)
async def test_each_changed_byte_is_found(
    kind: str, times: int, tmp_path: Path
) -> None:
    """The store has the whole thread again, but for one byte of one value."""
    url = await asyncio.to_thread(fresh_url, kind, tmp_path)
    chosen = random.Random(46)

    async with open_checkpointer(url, keyring=ring()) as opened:
        cp: Any = opened
        await fill(cp, "t", CANARY)
        store = cp.store._store
        whole = as_bytes(await store.dump("t"))
        assert "canary" not in str(whole)

        async def read() -> None:
            await cp.load("t")
            await cp.list_calls("t")

        for _ in range(times):
            now = changed(whole, chosen)
            parts: Any = now[:5]
            await store.commit([Erase("t", True)])
            assert await store.commit([Restore("t", *parts)]) == [None]

            with pytest.raises(CorruptThread) as raised:
                await read()

            assert "canary" not in str(raised.value)


@pytest.mark.parametrize("place", [*PLACES, "message of a store that takes text"])
async def test_every_changed_character_is_found(place: str) -> None:
    """Every character of a value, replaced by some of the others, or left out."""
    async with open_checkpointer("memory://", keyring=ring()) as opened:
        cp: Any = opened

        if place not in PLACES:
            cp.store._sealed_body = cp.store._sealed

        await fill(cp, "t", CANARY)
        stored = await cp.store._store.dump("t")
        key, value = stored.items[0]
        call = stored.calls[0]

        def reads(text: bytes) -> object:
            """Open the text in its place, as every read does."""
            match place:
                case "extra":
                    return cp.store._items([(key, text)], "t")
                case "args" | "result":
                    return cp.store._call(call._replace(**{place: text}))
                case _:
                    return list(cp.store._messages([text], "t", 0, []))

        values = {"extra": value, "args": call.args, "result": call.result}
        text = values.get(place, stored.bodies[0])
        assert text.isascii() == (place != "message")
        reads(text)

        for spot in range(len(text)):
            for one in (b"", b"+", b"/", b"-", b"_", b"A", b"=", b'"', b" ", b"0"):
                altered = text[:spot] + one + text[spot + 1 :]

                if altered != text:
                    with pytest.raises(CorruptThread):
                        reads(altered)


@pytest.mark.long
@pytest.mark.parametrize("kind", [PostgresServer, RedisServer])
def test_no_text_is_in_the_files_of_a_server(
    kind: type[PostgresServer] | type[RedisServer],
) -> None:
    """Tables, a write-ahead log, an append-only file, a log; a plain store shows it."""

    async def use(keyring: LocalKeyring | None) -> None:
        async with open_checkpointer(server.url, keyring=keyring) as opened:
            cp: Any = opened
            await fill(cp, "kept", CANARY)
            await fill(cp, "gone", CANARY)
            await cp.delete_thread("gone", forget_keys=True)
            await cp.delete_thread("kept", forget_keys=True)

    def is_there() -> bool:
        server.stop()
        files = [path for path in server.data.rglob("*") if path.is_file()]
        found = any(b"canary" in path.read_bytes() for path in files)
        server.start()
        return found

    with kind() as server:
        asyncio.run(use(ring()))
        assert not is_there()
        asyncio.run(use(None))
        assert is_there()
