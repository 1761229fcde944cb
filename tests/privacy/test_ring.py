"""The file of a keyring: what is refused, and what two commands at once do to it."""

from __future__ import annotations

import json
import logging
import os
import stat
from base64 import b64encode
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from cpkit import InvalidURL, open_checkpointer
from cpkit.keyring import FileKeyring, LocalKeyring, _alone, add_key, keyring_at

SECRET = b64encode(bytes(range(32))).decode()
GOOD: dict[str, Any] = {"keys": {"k1": SECRET}}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "unknown field": ({"hash_keys": True}, '"hash_key": 32 random bytes in base64'),
    "hash key of no bytes": ({"hash_key": ""}, "hash_key: not 32 bytes"),
    "hash key of one byte": ({"hash_key": "AA=="}, "hash_key: not 32 bytes"),
    "hash key of other text": ({"hash_key": "!!!!"}, "32 bytes in base64"),
    "key with other text in it": ({"keys": {"k": f"!{SECRET}"}}, "bytes in base64"),
    "key in the place of its id": ({"keys": {SECRET: "AA=="}}, "key 1: its id"),
    "key of zeros": ({"keys": {"k": b64encode(bytes(32)).decode()}}, "not random"),
    "hash key of one letter": ({"hash_key": b64encode(b"x" * 32).decode()}, "random"),
    "short key": ({"keys": {"k": "AA=="}}, "key 1: not 32 bytes"),
    "no keys": ({"keys": {}}, "one or more"),
    "keys as a list": ({"keys": [SECRET]}, "not of the form"),
    "name that is a number": ({"name": 1}, "name: not a text"),
    "text for true": ({"sealed_only": "true"}, "neither true nor false"),
    "number for true": ({"sealed_only": 1}, "neither true nor false"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_ring_of_another_form_is_refused(case: str, monkeypatch: Any) -> None:
    """Nothing in it is guessed or left out; the error shows no part of a key."""
    fields, words = BAD[case]
    monkeypatch.setenv("RING", json.dumps(GOOD | fields))

    with pytest.raises(InvalidURL) as raised:
        keyring_at("env:RING")

    assert words in str(raised.value)
    assert SECRET[:8] not in str(raised.value)


def test_a_ring_in_code_is_checked_too() -> None:
    """Keys and the hash key have 32 bytes; an error shows neither keys nor ids."""
    secret: Any = "s" * 32

    for keys, options in (
        ({"k": b"short"}, {}),
        ({"k": secret}, {}),
        ({"a secret+": b"k" * 32}, {}),
        ({"k": b"k" * 32}, {"hash_key": b""}),
        ({"k": b"k" * 32}, {"sealed_only": 1}),
    ):
        with pytest.raises(ValueError, match=r"not 32|its id|neither") as raised:
            LocalKeyring(keys, **options)

        assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "place",
    [json.dumps(GOOD), f"env:{json.dumps(GOOD)}", f"env:{SECRET}", SECRET, "env:A B"],
)
def test_a_key_in_the_place_of_a_path_is_not_shown(place: str) -> None:
    """The error says what to write."""
    with pytest.raises(InvalidURL, match="variable") as raised:
        keyring_at(place)

    assert SECRET[:8] not in str(raised.value)


async def test_an_empty_place_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is set to nothing is a fault, and not the wish of plain text."""
    with pytest.raises(InvalidURL, match="unset CPKIT_KEYRING"):
        async with open_checkpointer("memory://", keyring=""):
            pytest.fail("it opened")

    monkeypatch.setenv("CPKIT_KEYRING", "")

    with pytest.raises(InvalidURL, match="unset CPKIT_KEYRING"):
        async with open_checkpointer("memory://"):
            pytest.fail("it opened")


def test_a_reload_takes_up_what_may_change(tmp_path: Path, caplog: Any) -> None:
    """Of one cause that it fails the log tells once; after that it works again."""
    place = tmp_path / "ring.json"
    first = add_key(place, name="a")
    ring = FileKeyring(place)
    stored = json.loads(place.read_text())
    place.write_text(json.dumps(stored | {"name": "b"}))

    with caplog.at_level(logging.WARNING, "cpkit.keyring"):
        ring.reload()
        ring.reload()
        [told] = caplog.records
        assert "name or hash_key has changed: start the process" in told.getMessage()
        place.unlink()
        ring.reload()
        ring.reload()
        assert len(caplog.records) == 2

    assert (ring.newest, ring.sealed_only) == (first, False)
    stored["keys"]["k2"] = SECRET
    place.write_text(json.dumps(stored | {"sealed_only": True}))
    ring.reload()
    assert (ring.newest, ring.sealed_only) == ("k2", True)


@pytest.mark.parametrize(("mode", "count"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_ring_that_all_can_read_is_told(
    mode: int, count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used all the same; a group may be meant to read it."""
    place = tmp_path / "ring.json"
    newest = add_key(place)
    place.chmod(mode)

    with caplog.at_level(logging.WARNING, "cpkit.keyring"):
        assert FileKeyring(place).newest == newest

    told = [one.getMessage() for one in caplog.records]
    assert told == [f"all users can read the keyring: chmod go-rwx '{place}'"] * count


def test_two_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    """The second one waits, and adds to what the first one wrote."""
    place = tmp_path / "ring.json"
    add_key(place)
    added = Thread(target=add_key, args=[place])

    with _alone(tmp_path):
        ring = json.loads(place.read_text())
        ring["keys"]["mine"] = SECRET
        added.start()
        added.join(0.05)  # without the lock it ends meanwhile
        place.write_text(json.dumps(ring))

    added.join()
    keys = json.loads(place.read_text())["keys"]
    assert (len(keys), "mine" in keys) == (3, True)


def test_a_ring_keeps_its_place(tmp_path: Path, monkeypatch: Any) -> None:
    """A link stays a link, and the file keeps its mode; the new name is synced."""
    target = tmp_path / "secrets" / "ring.json"
    target.parent.mkdir()
    link = tmp_path / "ring.json"
    link.symlink_to(target)
    add_key(link)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    target.chmod(0o640)
    done: list[str] = []
    replace, sync = os.replace, os.fsync

    def replaced(source: Path, to: Path) -> None:
        done.append("named")
        replace(source, to)

    def synced(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder synced" if is_folder else "file synced")
        sync(descriptor)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "fsync", synced)
    newest = add_key(link)
    assert done == ["file synced", "named", "folder synced"]
    assert link.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert FileKeyring(link).newest == newest
    assert [one.name for one in target.parent.iterdir()] == ["ring.json"]

    with pytest.raises(ValueError, match="exists"):
        add_key(link, hash_keys=True)
