"""Keyrings: the keys that wrap the data keys of an encrypted store.

``open_checkpointer(url, keyring=…)`` takes a `Keyring`, or the place of one. A place is
the path of a file that ``cpkit keyring`` writes, or ``env:NAME``: the variable NAME has
the same JSON. ``docs/privacy.md`` says what is encrypted, and what a keyring must do.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import stat
import sys
from base64 import b64decode, b64encode, urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from cpkit.errors import InvalidURL

__all__ = [
    "HASHED",
    "FileKeyring",
    "Keyring",
    "LocalKeyring",
    "add_key",
    "keyring_at",
]

log = logging.getLogger(__name__)

HASHED = "cpkit:hash:"
"""How what is stored in place of an idempotency key begins."""

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FIELDS = {"keys", "name", "hash_key", "sealed_only"}


@runtime_checkable
class Keyring(Protocol):
    """Wraps the data keys of threads. All processes of a store use equal keyrings.

    Both methods are called once for each data key that a handle meets, on the event
    loop or in a worker thread. So they may not wait for a network: a key service
    unwraps the ring's keys before the store opens, as ``docs/privacy.md`` shows.
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
        """Encrypt up to 64 bytes with a data key; return the id of the key that did it.

        `unwrap` returns these bytes, and raises if one of them was changed.
        """

    def unwrap(self, key_id: str, wrapped: bytes) -> bytes:
        """Return what was wrapped.

        Raises ``KeyError`` for an unknown id, and ``ValueError`` if the key of this id
        did not wrap it.
        """

    def hashed(self, idempotency_key: str) -> str | None:
        """Return what is stored in place of a key; ``None`` where keys are readable.

        It is the same for the same key, at all times and in all processes.
        """

    def unhashed(self, stored: str) -> str:
        """Return the key of what `hashed` returned, and any other text as it is.

        Raises ``ValueError`` for a text that looks like one of `hashed`, and is not.
        """


class LocalKeyring:
    """A keyring in memory; the last of ``keys`` (32 bytes each) is the newest.

    With ``hash_key`` (32 random bytes) idempotency keys are stored encrypted by
    AES-SIV: the same key always looks the same, and only the keyring turns it back. It
    stays the same for the life of the store: with another one no call is found.

    Raises ``ValueError`` for keys of another length, or ids of another form.
    """

    def __init__(
        self,
        keys: Mapping[str, bytes],
        *,
        name: str = "",
        hash_key: bytes | None = None,
        sealed_only: bool = False,
    ) -> None:
        if hash_key is not None and not _is_key(hash_key):
            raise ValueError("hash_key: not 32 bytes")

        if type(sealed_only) is not bool:
            raise ValueError("sealed_only: neither true nor false")

        self.name = name
        self.sealed_only = sealed_only
        self._hash_key = hash_key
        self._siv: Any = None
        self._set(keys)

        if hash_key is not None:
            from cryptography.hazmat.primitives.ciphers.aead import AESSIV

            context = b"cpkit idempotency keys"
            self._siv = AESSIV(hmac.digest(hash_key, context, hashlib.sha512))

    def _set(self, keys: Mapping[str, bytes]) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        # Ids are not shown: where a key and its id are exchanged, they are secret.
        for number, (key_id, key) in enumerate(keys.items(), 1):
            if not _ID.fullmatch(key_id):
                raise ValueError(f"key {number}: its id is not 1 to 64 A-Za-z0-9_.-")

            if not _is_key(key):
                raise ValueError(f"key {number}: not 32 bytes")

        if not keys:
            raise ValueError("keys: none; a keyring has one or more")

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
        if self._siv is None:
            return None

        sealed = self._siv.encrypt(idempotency_key.encode(), None)
        return HASHED + urlsafe_b64encode(sealed).decode()

    def unhashed(self, stored: str) -> str:
        if self._siv is None or not stored.startswith(HASHED):
            return stored

        from cryptography.exceptions import InvalidTag

        key = ""

        with suppress(InvalidTag):
            sealed = urlsafe_b64decode(stored.removeprefix(HASHED))
            key = self._siv.decrypt(sealed, None).decode()

        if self.hashed(key) != stored:  # other bytes, or another text of them
            raise ValueError("not what this hash_key makes of a key")

        return key

    def _context(self, key_id: str) -> bytes:
        return f"cpkit data key\0{self.name}\0{key_id}".encode()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}, newest key {self.newest!r}>"


class FileKeyring(LocalKeyring):
    """The keyring in a file; an open store notices a change of it within a second.

    The log has a warning if all users of the machine may read the file.

    Raises ``OSError`` as `open` does, and ``InvalidURL`` for a file of another form.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._state = self._stat()
        self._fault: str | None = None
        super().__init__(**_parsed(self._path.read_bytes(), str(path)))

        if sys.platform != "win32" and os.stat(self._path).st_mode & stat.S_IROTH:
            log.warning("all users can read the keyring: chmod go-rwx '%s'", path)

    def reload(self) -> None:
        """Take up keys and ``sealed_only`` if the file has changed.

        Where that fails, the keys stay as they are. The log has a warning, once for
        each cause, and the next call tries again.
        """
        try:
            if (state := self._stat()) != self._state:
                self._take(_parsed(self._path.read_bytes(), str(self._path)))
                self._state = state

            self._fault = None
        except (OSError, InvalidURL) as exc:
            if (fault := str(exc)) != self._fault:
                self._fault = fault
                log.warning("a changed keyring is not used yet: %s", fault)

    def _take(self, ring: dict[str, Any]) -> None:
        if (ring["name"], ring["hash_key"]) != (self.name, self._hash_key):
            fault = "its name or hash_key has changed: start the process again"
            raise InvalidURL(f"keyring {self._path}: {fault}")

        self.sealed_only = ring["sealed_only"]
        self._set(ring["keys"])

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_ino, found.st_size


def keyring_at(place: str | os.PathLike[str]) -> Keyring:
    """Return the keyring of a file, or of a variable (``env:NAME``).

    Raises ``InvalidURL`` if it cannot be read. No error shows what could be a key.
    """
    text = os.fspath(place)

    if not text:
        fault = "empty: unset CPKIT_KEYRING to open the store without encryption"
        raise InvalidURL(f"the keyring (keyring= or CPKIT_KEYRING) is {fault}")

    if "{" in text or "\0" in text or text.endswith("="):  # JSON, or a key
        fault = (
            "not the keyring itself: put its JSON into a variable, and give env:NAME"
        )
        raise InvalidURL(f"keyring= and CPKIT_KEYRING take the path of a file, {fault}")

    if text.startswith("env:"):
        if not re.fullmatch(r"env:[A-Za-z_][A-Za-z0-9_]*", text):
            raise InvalidURL("keyring env: what follows is not the name of a variable")

        if not (value := os.environ.get(text[4:])):
            raise InvalidURL(f"keyring {text}: the variable is not set")

        return LocalKeyring(**_parsed(value, text))

    try:
        return FileKeyring(text)
    except FileNotFoundError:
        fault = f"no such file; create it: cpkit keyring {text}"
        raise InvalidURL(f"keyring {text}: {fault}") from None
    except OSError as exc:
        raise InvalidURL(f"keyring {text}: {exc.strerror}") from None


def add_key(path: Path, *, name: str = "", hash_keys: bool = False) -> str:
    """Add a new key to the file, or create it for its owner alone; return the id.

    The file is replaced as a whole, so that a reader sees the old ring or the new one.
    It keeps its owner and mode; a link stays, and its target is replaced. Two calls at
    once wait for each other.

    Raises ``ValueError`` if ``name`` or ``hash_keys`` is given for a file that exists.
    """
    path = Path(os.path.realpath(path))

    with _alone(path.parent) as folder:
        found = None

        if path.exists():
            if name or hash_keys:
                raise ValueError(f"{path} exists: a name and a hash key cannot be set")

            found = os.stat(path)
            text = path.read_bytes()
            _parsed(text, str(path))
            ring = json.loads(text)
        else:
            ring = {"name": name, "sealed_only": False, "keys": {}}

            if hash_keys:
                ring["hash_key"] = b64encode(os.urandom(32)).decode()

        key_id = f"{datetime.now(UTC):%Y-%m-%d}-{os.urandom(4).hex()}"
        ring["keys"][key_id] = b64encode(os.urandom(32)).decode()
        _replace(path, json.dumps(ring, indent=2) + "\n", found)

        if folder is not None:
            os.fsync(folder)

    return key_id


@contextmanager
def _alone(folder: Path) -> Iterator[int | None]:
    """Lock a folder, and yield its descriptor; Windows has no such lock."""
    if sys.platform == "win32":
        yield None
        return

    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str, found: os.stat_result | None) -> None:
    """Write a file as a whole, synced, with the owner and mode that were found."""
    draft = path.with_name(f"{path.name}.{os.urandom(4).hex()}")

    try:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

        with open(file, "w", encoding="utf-8") as target:
            if found is not None and hasattr(os, "fchown"):
                mine = os.fstat(file)
                owner = found.st_uid, found.st_gid

                if (mine.st_uid, mine.st_gid) != owner:
                    os.fchown(file, *owner)

                os.fchmod(file, stat.S_IMODE(found.st_mode))

            target.write(text)
            target.flush()
            os.fsync(file)

        os.replace(draft, path)
    finally:
        with suppress(FileNotFoundError):  # it has its name
            os.unlink(draft)


def _parsed(text: str | bytes, place: str) -> dict[str, Any]:
    """Return the arguments of a `LocalKeyring`; an error shows nothing of the text."""
    try:
        ring = json.loads(text)
        keys = ring["keys"].items()
        name = ring.get("name", "")
        hash_key = ring.get("hash_key")

        if ring.keys() - _FIELDS:
            names = ", ".join(sorted(_FIELDS))
            raise InvalidURL(
                f"keyring {place}: a field is not one of: {names}; to hash idempotency "
                'keys, a new store has "hash_key": 32 random bytes in base64'
            )

        arguments: dict[str, Any] = {
            "keys": {key_id: _decoded(key) for key_id, key in keys},
            "name": name,
            "hash_key": None if hash_key is None else _decoded(hash_key),
            "sealed_only": ring.get("sealed_only", False),
        }

        if not isinstance(name, str):
            raise ValueError("name: not a text")

        LocalKeyring(**arguments)
    except (TypeError, KeyError, AttributeError, json.JSONDecodeError, UnicodeError):
        form = '{"keys": {"id": "32 bytes, base64"}}'
        raise InvalidURL(f"keyring {place}: not of the form {form}") from None
    except ValueError as exc:
        raise InvalidURL(f"keyring {place}: {exc}") from None

    return arguments


def _decoded(text: str) -> bytes:
    try:
        key = b64decode(text, validate=True)
    except ValueError:  # which shows a part of the text, or says what is padding
        raise ValueError("a key is not 32 bytes in base64") from None

    if _is_key(key) and len({*key}) == 1:
        raise ValueError("a key is not random: all its bytes are equal")

    return key


def _is_key(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == 32
