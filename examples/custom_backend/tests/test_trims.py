"""What a trim leaves in LMDB."""

from __future__ import annotations

from pathlib import Path

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
