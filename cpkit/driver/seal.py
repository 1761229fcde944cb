"""The form of a sealed value, and what seals and opens one.

A sealed value is::

    ["cpkit:1:<key id>:<wrapped data key>:<CRC-32>","-_-_<nonce, text, tag>","cpkit:"]

The first part is its *head*. The second one is base64, and without quotes and base64
in messages of a store that takes bytes. The value is JSON, padded with spaces so that
base64 has no unused bits, and encrypted by AES-256-GCM with a random nonce of 96 bits.
It is bound
to its place by associated data: the head, the keyring's name, the thread, the kind of
value, and the position of a message, the key of extra, or the id of a call, with its
key and tool (args) or its status (result).

The data key is in each head, wrapped by the keyring together with a digest of its
thread. So a value can be opened by itself, and two processes that begin a thread at
once make two data keys, which is fine. For a head that an older key of the ring
wrapped, extra can have a *record*: the same data key under the newest key, with a
digest of the thread and of that head. So a record is not a head: who knows the data
key, because the older key leaked, cannot seal new values under the newest key.
``cpkit rewrap`` adds records; the handle hides them.
"""

from __future__ import annotations

import os
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from hmac import compare_digest
from typing import Any, TypeAlias
from zlib import crc32

from pydantic_core import CoreConfig, SchemaValidator, core_schema, to_json

from cpkit.errors import CorruptThread, InvalidURL, KeyMissing
from cpkit.keyring import Keyring

__all__ = [
    "CUT",
    "END",
    "MARK",
    "SEALED",
    "DataKey",
    "Item",
    "LineSeal",
    "Sealer",
    "as_bytes",
    "corrupt",
    "decode_text",
    "head_if_sealed",
    "head_of",
    "is_record",
    "is_sealed",
    "key_id_of",
    "make_room",
    "record_key",
]

Item: TypeAlias = "tuple[bytes | str, bytes | str]"

SEALED = b'["cpkit:'
"""How a sealed value begins."""

END = b',"cpkit:"]'
"""How it ends."""

CUT = -len(END)

MARK = b"\xfb\xff\xbf"
"""What the second part begins with: ``-_-_``, so + and / of the other base64 fail."""

_MAX_HEAD = 900
_RULE = "an id has 1 to 64 characters A-Za-z0-9_.-, and a wrapped key 600 bytes at most"
_HEAD = re.compile(rb'\["cpkit:1:([\w.-]{1,64}):([\w=-]+):([0-9a-f]{8})"')
# The key in extra of a record, of which a part of the digest of the head is the name.
_RECORD = b'"cpkit:key:%b"'
_RECORD_KEY = re.compile(rb'"cpkit:key:[0-9a-f]{32}"')

# Threads, and data keys, that are remembered.
_REMEMBERED = 4096

# pydantic_core decodes base64 six times faster than the standard library.
decode_text = SchemaValidator(
    core_schema.bytes_schema(strict=True), CoreConfig(val_json_bytes="base64")
).validate_json


@dataclass(slots=True)
class DataKey:
    """What seals the next values of a thread, and the version as far as is known.

    ``until`` is the time on the monotonic clock at which to look at the thread again.
    """

    key_id: str
    head: bytes
    cipher: Any
    bound: bytes
    version: int = 0
    until: float = 0.0


class Sealer:
    """Seals values, and opens them; remembers data keys.

    ``keyring`` is a `Keyring`, also one that is set later.
    """

    def __init__(self, keyring: Any) -> None:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._ring = keyring
        self._cipher_of: Callable[[bytes], Any] = AESGCM
        self._wrong: type[Exception] = InvalidTag
        # By thread, so that a moved head or record cannot spoil another thread's.
        self._ciphers: dict[tuple[str, bytes], Any] = {}
        self._records: dict[tuple[str, bytes], bytes] = {}

    def _new(self, thread_id: str, version: int) -> DataKey:
        data_key = os.urandom(32)
        key_id, head = self._wrapped(data_key, thread_id)
        cipher = self._cipher_of(data_key)
        return DataKey(key_id, head, cipher, self._bound(head, thread_id), version)

    def _wrapped(
        self, data_key: bytes, thread_id: str, of: bytes = b""
    ) -> tuple[str, bytes]:
        """Return the newest key's id, and a head; or the record of the head ``of``."""
        key_id, wrapped = self._ring.wrap(data_key + _context(thread_id, of))
        text = b'["cpkit:1:%b:%b' % (key_id.encode(), urlsafe_b64encode(wrapped))
        head = b'%b:%08x"' % (text, crc32(text))

        if key_id_of(head) != key_id or len(head) > _MAX_HEAD:
            # Nothing that is written could be opened.
            raise InvalidURL(f"the keyring wraps by key {key_id!r:.80}: {_RULE}")

        return key_id, head

    def _bound(self, head: bytes, thread_id: str) -> bytes:
        # Neither names, ids nor the JSON of a key have a NUL.
        return b"%b\0%b\0%b\0" % (head, self._ring.name.encode(), thread_id.encode())

    def _sealed(self, thread: DataKey, value: bytes, place: bytes) -> bytes:
        nonce = os.urandom(12)
        padded = value + b"  "[: (2 - len(value)) % 3]
        sealed = MARK + nonce + thread.cipher.encrypt(nonce, padded, place)
        return b"%b,%b%b" % (thread.head, to_json(sealed, bytes_mode="base64"), END)

    def _sealed_bytes(self, thread: DataKey, value: bytes, place: bytes) -> bytes:
        """Seal for a store that takes bytes."""
        nonce = os.urandom(12)
        sealed = thread.cipher.encrypt(nonce, value, place)
        return b"%b,%b%b%b%b" % (thread.head, MARK, nonce, sealed, END)

    def _learn(self, items: Iterable[Item], thread_id: str) -> None:
        """Note the records among the items of a thread's extra."""
        for key, value in items:
            if is_record(as_bytes(key), as_bytes(value)):
                make_room(self._records)
                self._records[thread_id, as_bytes(key)] = as_bytes(value)[:-1]

    def _opened(
        self, value: bytes | str, thread_id: str, place: bytes, where: str
    ) -> bytes:
        """Return the JSON in a value."""
        value = as_bytes(value)

        if not is_sealed(value):
            if self._ring.sealed_only:
                raise CorruptThread(thread_id, where, "it is not encrypted")

            return value

        head, _, text = value.partition(b",")
        cipher = self._cipher(head, thread_id, where)

        try:
            data = text.removesuffix(END)

            if data[:1] == b'"':
                data = decode_text(data)

            if not text.endswith(END) or data[:3] != MARK:
                raise ValueError("another frame")

            place = self._bound(head, thread_id) + place
            opened: bytes = cipher.decrypt(data[3:15], data[15:], place)
        except (ValueError, self._wrong):
            raise corrupt(thread_id, where) from None

        return opened

    def _cipher(self, head: bytes, thread_id: str, where: str) -> Any:
        """Return the cipher of a head.

        Raises ``KeyMissing`` if neither the ring nor a record has its key.
        """
        if (known := self._ciphers.get((thread_id, head))) is not None:
            return known

        cipher = self._cipher_of(self._data_key(head, thread_id, where))
        make_room(self._ciphers)
        self._ciphers[thread_id, head] = cipher
        return cipher

    def _data_key(self, head: bytes, thread_id: str, where: str) -> bytes:
        try:
            return self._unwrapped(head, thread_id, where)
        except KeyMissing:
            if (record := self._records.get((thread_id, record_key(head)))) is None:
                raise

        try:
            return self._unwrapped(record, thread_id, where, head)
        except CorruptThread:
            # The next read looks whether there is a better one.
            self._records.pop((thread_id, record_key(head)), None)
            raise

    def _unwrapped(
        self, head: bytes, thread_id: str, where: str, of: bytes = b""
    ) -> bytes:
        """Return the data key in a head, or in the record of the head ``of``."""
        key_id, wrapped = _parts(head, thread_id, where)

        try:
            opened: bytes = self._ring.unwrap(key_id, wrapped)
        except KeyError:
            raise KeyMissing(
                thread_id, where, key_id, "is not in the keyring"
            ) from None
        except ValueError:
            fault = "of the keyring is not the one that wrapped the value's data key"
            raise KeyMissing(thread_id, where, key_id, fault) from None

        if not compare_digest(opened[32:], _context(thread_id, of)):
            raise corrupt(thread_id, where)

        return opened[:32]


class LineSeal(Sealer):
    """Seals the lines of a file under a data key of its own, and opens them.

    A line is bound to its number, and all lines have one head. So a line that is moved,
    left out, or taken from another file is ``CorruptThread``. That the last lines are
    missing is not seen.
    """

    def __init__(self, keyring: Keyring) -> None:
        super().__init__(keyring)
        self._key: DataKey | None = None
        self._head: bytes | None = None

    def sealed(self, line: bytes, number: int) -> bytes:
        """Return a line as it is written; both end with a newline."""
        key = self._key = self._key or self._new("", 0)
        return self._sealed(key, line[:-1], b"%be%d" % (key.bound, number)) + b"\n"

    def opened(self, line: bytes, number: int, where: str) -> bytes:
        """Return a line as it was before it was sealed."""
        head = head_of(line)
        self._head = self._head or head

        if head != self._head or not is_sealed(line):
            raise corrupt("", where)

        return self._opened(line.rstrip(b"\n"), "", b"e%d" % number, where) + b"\n"


def is_sealed(value: bytes | str) -> bool:
    """Tell whether a stored value is sealed.

    Start and end are alike in no plain value, so one changed byte hides neither.
    """
    value = as_bytes(value)
    return value.startswith(SEALED) or value.endswith(END)


def key_id_of(head: bytes) -> str | None:
    """Return the id of the key that wrapped the data key of a head."""
    found = _HEAD.fullmatch(head)
    return None if found is None else found[1].decode()


def record_key(head: bytes) -> bytes:
    """Return the key in extra of the record of a head."""
    return _RECORD % sha256(head).hexdigest()[:32].encode()


def is_record(key: bytes, value: bytes) -> bool:
    """Tell whether an item of extra is a record, which is stored as it is.

    A value that a user brings never is: see ``Codec``.
    """
    if _RECORD_KEY.fullmatch(key) is None or value[-1:] != b"]":
        return False

    return _HEAD.fullmatch(value, 0, len(value) - 1) is not None


def head_if_sealed(value: bytes | str) -> bytes | None:
    """Return the head of a value; ``None`` for a plain one."""
    return head_of(as_bytes(value)) if is_sealed(value) else None


def head_of(value: bytes) -> bytes:
    return value.partition(b",")[0]


def _context(thread_id: str, of: bytes) -> bytes:
    """Return what is wrapped with a data key: where it is good for."""
    return sha256(b"%b\0%b" % (thread_id.encode(), of)).digest()


def _parts(head: bytes, thread_id: str, where: str) -> tuple[str, bytes]:
    """Return the key's id and the wrapped data key of a head that is not damaged."""
    found = _HEAD.fullmatch(head)

    if found is None or crc32(head[:-10]) != int(found[3], 16):
        raise CorruptThread(thread_id, where, "the head of the sealed value is damaged")

    try:
        return found[1].decode(), urlsafe_b64decode(found[2])
    except ValueError:
        raise corrupt(thread_id, where) from None


def corrupt(thread_id: str, where: str) -> CorruptThread:
    fault = "not the value that was sealed for this place: changed, moved or exchanged"
    return CorruptThread(thread_id, where, fault)


def as_bytes(value: bytes | str) -> bytes:
    return value if type(value) is bytes else bytes(value, "utf-8")  # type: ignore[arg-type]  # a str


def make_room(known: dict[Any, Any]) -> None:
    """Forget the oldest entry of a full dictionary; a worker thread may do so too."""
    if len(known) >= _REMEMBERED:
        with suppress(RuntimeError):
            known.pop(next(iter(known)), None)
