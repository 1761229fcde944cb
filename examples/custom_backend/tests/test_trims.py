"""What a trim leaves in LMDB."""

from __future__ import annotations

from pathlib import Path

import lmdb

from cpkit import ToolCall
from cpkit.sync import SyncCheckpointer


def test_calls_keep_their_order_when_messages_were_trimmed(tmp_path: Path) -> None:
    """A new call is behind the calls of before, however many entries went."""
    with SyncCheckpointer(f"lmdb://{tmp_path}") as cp:
        for name in ("z", "y", "x"):
            version = cp.append("t", [{}] * 20)
            cp.record_issued("t", ToolCall(name, "pay", {}, name))
            assert cp.trim("t", version) == 20

        names = [record.call.call_id for record in cp.list_calls("t")]
        assert names == ["z", "y", "x"]


def test_a_thread_of_before_trims_is_trimmed(tmp_path: Path) -> None:
    """Its row has the version alone."""
    with SyncCheckpointer(f"lmdb://{tmp_path}") as cp:
        cp.append("t", [{"n": n} for n in range(3)])

    with lmdb.open(str(tmp_path)) as environment, environment.begin(write=True) as tx:
        cursor = tx.cursor()
        assert cursor.set_range(b"t")
        key, stored = bytes(cursor.key()), bytes(cursor.value())
        assert stored == (3).to_bytes(8) + bytes(8)
        tx.put(key, stored[:8])

    with SyncCheckpointer(f"lmdb://{tmp_path}") as cp:
        data = cp.load("t")
        assert data is not None
        assert (data.first, data.version) == (0, 3)
        assert cp.trim("t", 2) == 2
        assert cp.append("t", [{}]) == 4
        assert cp.read("t") == [{"n": 2}, {}]
