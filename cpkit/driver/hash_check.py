"""A check at the opening of a sealed store: are its idempotency keys hashed as before?

With another hash key, or without one, a process finds no call that is on record, and
pays again. So the first opening with a hash key claims a key of its own, whose tool
name is a hash under it, and erases the call. What is left is the record of the key:
one atomic claim, in no list of live threads, and in each copy of the database.
"""

from __future__ import annotations

from cpkit.driver.sealed import HASH_THREAD, SealedStore
from cpkit.driver.writes import Claim, Erase, Resolve, StoredCall, Write
from cpkit.errors import InvalidURL

__all__ = ["CheckedStore"]

_CALL = "hash_key"


class CheckedStore(SealedStore):
    """A sealed store that compares the hash key of its keyring at the opening."""

    async def check_keyring(self) -> None:
        """Raise ``InvalidURL`` if the store has keys that this keyring does not find.

        A store that has threads, and no hashed keys, takes no hash key any more. It is
        safe to repeat.
        """
        mine = self._ring.hashed(HASH_THREAD)
        held: StoredCall | None = await self._store.holder(HASH_THREAD)

        if mine and not held:
            held = await self._began(mine)

        if held and held.tool_name != mine:
            which = "another" if mine else "no"
            raise InvalidURL(
                f"{self.name}: the store has hashed idempotency keys, and the keyring "
                f"has {which} hash_key: no call would be found, and each would be made "
                "again; open the store with the hash_key that it began with"
            )

        # Another process may have died between the claim and this.
        is_erased = held and (held.erased or not self.erases)

        if mine and not is_erased:
            await self._erase_claim()

    async def _began(self, mine: str) -> StoredCall | None:
        """Claim the key; return the call of a process that was faster."""
        if hasattr(self, "threads") and await self.threads("", None, 1, True):
            held: StoredCall | None = await self._store.holder(HASH_THREAD)

            if held is None:
                raise InvalidURL(
                    f"{self.name}: the keyring has a hash_key, but the store has "
                    "threads from before, whose idempotency keys are not hashed: take "
                    "the hash_key out of the keyring, or cpkit copy into a new store"
                )

            return held

        claim = Claim(HASH_THREAD, _CALL, mine, b"{}", HASH_THREAD)
        [outcome] = await self._store.commit([claim])
        return outcome if isinstance(outcome, StoredCall) else None

    async def _erase_claim(self) -> None:
        """Leave nothing of the call but the record of its key."""
        writes: list[Write] = [Resolve(HASH_THREAD, _CALL, "completed", b"null")]

        if self.erases:
            writes.append(Erase(HASH_THREAD, False))

        for write in writes:
            await self._store.commit([write])
