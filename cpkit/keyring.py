"""Keyrings: the keys that wrap the data keys of an encrypted store.

``open_checkpointer(url, keyring=…)`` takes a `Keyring`, or the place of one. A place is
the path of a file that ``cpkit keyring`` writes, or ``env:NAME``: the variable NAME has
the same JSON. ``docs/privacy.md`` says what is encrypted, and what a keyring must do.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from base64 import b64decode, b64encode, urlsafe_b64encode
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from cpkit.errors import InvalidURL

__all__ = ["FileKeyring", "Keyring", "LocalKeyring", "add_key", "keyring_at"]

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@runtime_checkable
class Keyring(Protocol):
    """Wraps the data keys of threads. All processes of a store use equal keyrings.

    Both methods are called once for each data key that a handle meets, on the event
    loop or in a worker thread. So they may not wait for a network: a key service
    unwraps the ring's keys before the store opens, as ``examples/key_service.py`` does.
    A method ``reload()``, if there is one, is called in a worker thread once a second
    while there are writes, and where a key is missing.
    """

    @property
    def name(self) -> str:
        """Which store the keys are for; a value of another name is not accepted."""

    @property
    def newest(self) -> str:
        """The id of the key that `wrap` uses, of 1 to 64 characters A-Za-z0-9_.-"""

    @property
    def sealed_only(self) -> bool:
        """Whether a value that is not encrypted is refused as damage."""

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        """Encrypt a data key of 32 bytes; return the id of the key that did it."""

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        """Return the data key.

        Raises ``KeyError`` for an unknown id, and ``ValueError`` if the key of this id
        did not wrap it.
        """

    def hashed(self, idempotency_key: str) -> str | None:
        """Return what is stored in place of a key; ``None`` where keys are readable."""


class LocalKeyring:
    """A keyring in memory; the last of ``keys`` (32 bytes each) is the newest.

    With ``hash_key`` (32 random bytes) idempotency keys are stored as keyed hashes. It
    stays the same for the life of the store: other hashes find no call.
    """

    def __init__(
        self,
        keys: Mapping[str, bytes],
        *,
        name: str = "",
        hash_key: bytes | None = None,
        sealed_only: bool = False,
    ) -> None:
        self.name = name
        self.sealed_only = sealed_only
        self._hash_key = hash_key
        self._set(keys)

    def _set(self, keys: Mapping[str, bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        for key_id, key in keys.items():
            if not _ID.fullmatch(key_id) or len(key) != 32:
                raise ValueError(f"key {key_id!r:.80}: an id of 1 to 64, and 32 bytes")

        if not keys:
            raise ValueError("a keyring has one key or more")

        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self.newest = list(keys)[-1]
        self._wrapping = self.newest, self._ciphers[self.newest]

    def wrap(self, data_key: bytes) -> tuple[str, bytes]:
        key_id, cipher = self._wrapping  # read at once: another thread may reload
        nonce = os.urandom(12)
        return key_id, nonce + cipher.encrypt(nonce, data_key, self._context(key_id))

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        from cryptography.exceptions import InvalidTag

        cipher = self._ciphers[key_id]

        try:
            return cipher.decrypt(wrapped[:12], wrapped[12:], self._context(key_id))
        except InvalidTag:
            raise ValueError("wrapped by another key of this id") from None

    def hashed(self, idempotency_key: str) -> str | None:
        if self._hash_key is None:
            return None

        digest = hmac.digest(self._hash_key, idempotency_key.encode(), hashlib.sha256)
        return "cpkit:hash:" + urlsafe_b64encode(digest).decode().rstrip("=")

    def _context(self, key_id: str) -> bytes:
        return f"cpkit data key\0{self.name}\0{key_id}".encode()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, newest key {self.newest!r}>"


class FileKeyring(LocalKeyring):
    """The keyring in a file; an open store notices a change of it within a second."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._state = self._stat()
        super().__init__(**_parsed(self._path.read_text("utf-8"), str(path)))

    def reload(self) -> None:
        """Read the keys again if the file has changed; keep them if it is not there."""
        try:
            if (state := self._stat()) != self._state:
                text = self._path.read_text("utf-8")
                self._set(_parsed(text, str(self._path))["keys"])
                self._state = state
        except (OSError, InvalidURL):  # it is being replaced: look again later
            return

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_ino, found.st_size


def keyring_at(place: str | os.PathLike[str]) -> Keyring:
    """Return the keyring of a file, or of a variable (``env:NAME``).

    Raises ``InvalidURL`` if it cannot be read.
    """
    text = os.fspath(place)

    if text.startswith("env:"):
        if not (value := os.environ.get(text[4:])):
            raise InvalidURL(f"keyring {text}: the variable is not set")

        return LocalKeyring(**_parsed(value, text))

    try:
        return FileKeyring(text)
    except OSError as exc:
        problem = f"keyring {text}: {exc.strerror}; create it: cpkit keyring {text}"
        raise InvalidURL(problem) from None


def add_key(path: Path, *, name: str = "", hash_keys: bool = False) -> str:
    """Add a new key to the file, or create it for its owner alone; return the id.

    The file is replaced as a whole, so that a reader sees the old ring or the new one.
    ``name`` and ``hash_keys`` are for a new file.
    """
    if path.exists():
        ring = json.loads(path.read_text("utf-8"))
        _parsed(json.dumps(ring), str(path))
    else:
        ring = {"name": name, "sealed_only": False, "keys": {}}

        if hash_keys:
            ring["hash_key"] = b64encode(os.urandom(32)).decode()

    key_id = f"{datetime.now(UTC):%Y-%m-%d}-{os.urandom(4).hex()}"
    ring["keys"][key_id] = b64encode(os.urandom(32)).decode()
    draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    with open(file, "w", encoding="utf-8") as text:
        text.write(json.dumps(ring, indent=2) + "\n")
        text.flush()
        os.fsync(file)

    os.replace(draft, path)
    return key_id


def _parsed(text: str, place: str) -> dict[str, Any]:
    """Return the arguments of a `LocalKeyring`; an error shows nothing of the text."""
    try:
        ring = json.loads(text)
        keys = {key_id: b64decode(key) for key_id, key in ring["keys"].items()}
        hash_key = ring.get("hash_key")
        arguments: dict[str, Any] = {
            "keys": keys,
            "name": str(ring.get("name", "")),
            "hash_key": None if hash_key is None else b64decode(hash_key),
            "sealed_only": ring.get("sealed_only", False) is True,
        }
        LocalKeyring(**arguments)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InvalidURL(
            f'keyring {place}: not of the form {{"keys": {{"id": "32 bytes, base64"}}}}'
        ) from None

    return arguments
