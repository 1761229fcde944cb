"""The format of stored records does not change."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest
from langgraph.checkpoint.serde.types import INTERRUPT

from cpkit import MemoryCheckpointer
from cpkit.integrations.langgraph import (
    CheckpointSaver,
    NotOwner,
    composing,
    store_thread_id,
)
from cpkit.integrations.langgraph.names import OWNER
from tests.integrations.test_langgraph_reading import SixMethods

FIRST_HEAD = (
    "\x92\x85\xa1v\x04\xa2ts\xb92026-01-01T00:00:00+00:00\xa2id\xa2c1\xadversions_seen"
    "\x80\xb0updated_channels\xc0\x82\xa6source\xa4loop\xa4step\x01"
)
SECOND_HEAD = (
    "\x92\x85\xa1v\x04\xa2ts\xb92026-01-02T00:00:00+00:00\xa2id\xa2c2\xadversions_seen"
    "\x80\xb0updated_channels\x91\xa3log\x82\xa6source\xa4loop\xa4step\x01"
)
BINARY = bytes(range(256))
LONG = "long " * 1000

RECORDS: list[dict[str, Any]] = [
    {"type": "owner", "size": 0},
    {"type": "blob", "id": "b1", "text": LONG},
    {
        "type": "checkpoint",
        "size": 849,
        "ns": "",
        "checkpoint_id": "c1",
        "parent": None,
        "start": 1,
        "whole": True,
        "head": ["latin-1", "msgpack", FIRST_HEAD],
        "versions": {"log": "1.5", "text": 1, "long": 1, "raw": 1, "gone": 1},
        "values": {
            "log": ["base64", "msgpack", "kqFhoWI="],
            "text": "value",
            "long": ["plain", "", ["b1"]],
            "raw": ["base64", "bytes", b64encode(BINARY).decode()],
            "number": 1.5,
        },
        "gone": [],
    },
    {
        "type": "checkpoint",
        "size": 100,
        "ns": "",
        "checkpoint_id": "c2",
        "parent": "c1",
        "start": 1,
        "whole": False,
        "head": ["latin-1", "msgpack", SECOND_HEAD],
        "versions": {"log": "2.5"},
        "values": {"log": ["base64", "msgpack", "kaFj", 2]},
        "gone": ["number"],
    },
    {
        "type": "writes",
        "size": 223,
        "ns": "",
        "checkpoint_id": "c2",
        "start": 1,
        "task_id": "task",
        "task_path": "~__pregel_pull, node",
        "writes": [
            [0, "log", ["base64", "msgpack", "kaFj"]],
            [-3, "__interrupt__", ["base64", "msgpack", "gahxdWVzdGlvbgE="]],
            [2, "text", "new"],
        ],
    },
    {"type": "hidden", "size": 0, "checkpoints": [["", "c1"]]},
]
EXTRA: dict[str, Any] = {"thread": {"id": "1", "name": "t" * 600}, "owner": "token"}


def bodies(second: bool) -> Any:
    """Return a checkpoint as LangGraph has it, the first or the second."""
    log = ["a", "b", "c"] if second else ["a", "b"]
    versions = {"log": "2.5" if second else "1.5", "text": 1, "long": 1}
    values = {"log": log, "text": "value", "long": LONG, "raw": BINARY}
    return {
        "v": 4,
        "ts": f"2026-01-0{1 + second}T00:00:00+00:00",
        "id": "c2" if second else "c1",
        "versions_seen": {},
        "updated_channels": ["log"] if second else None,
        "channel_versions": {**versions, "raw": 1, "gone": 1},
        "channel_values": values if second else {**values, "number": 1.5},
    }


async def test_stored_records_are_read() -> None:
    """Every field of an old record is loaded."""
    thread_id = "t" * 600
    config: Any = {"configurable": {"thread_id": thread_id}}

    async with MemoryCheckpointer[Any]() as cp:
        await cp.append(store_thread_id(thread_id), RECORDS[:-1], extra=EXTRA)
        saver = CheckpointSaver(cp)
        second, first = [found async for found in saver.alist(None)]
        assert second == await saver.aget_tuple(config)
        assert second.config["configurable"] == {
            "thread_id": thread_id,
            "checkpoint_ns": "",
            "checkpoint_id": "c2",
        }
        assert second.parent_config == first.config
        assert first.parent_config is None
        assert second.metadata == {"source": "loop", "step": 1}
        assert (first.checkpoint, second.checkpoint) == (bodies(False), bodies(True))
        assert second.pending_writes == [
            ("task", INTERRUPT, {"question": 1}),
            ("task", "log", ["c"]),
            ("task", "text", "new"),
        ]
        await cp.append(store_thread_id(thread_id), RECORDS[-1:])
        (second,) = [found async for found in saver.alist(config)]
        owned: Any = {"configurable": {**config["configurable"], OWNER: "token"}}
        await saver.aput_writes(
            {**owned, **second.config}, [("text", "more")], "task 2"
        )
        owned["configurable"][OWNER] = "stale"

        with pytest.raises(NotOwner):
            await saver.aput_writes(
                {"configurable": second.config["configurable"] | owned["configurable"]},
                [("text", "late")],
                "task 3",
            )


async def test_written_records_have_the_same_format() -> None:
    """The same calls write the same records, except for random ids."""
    async with MemoryCheckpointer[Any]() as cp:
        saver = CheckpointSaver(cp)
        thread_id = "t" * 600
        config: Any = {"configurable": {"thread_id": thread_id, "checkpoint_ns": ""}}
        owner = (await saver.aclaim(config))["configurable"][OWNER]
        metadata: Any = {"source": "loop", "step": 1}
        new: Any = bodies(False)["channel_versions"]
        config = await saver.aput(config, bodies(False), metadata, new)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(composing, "_REPEATED", 0)
            new = {"log": "2.5"}
            config = await saver.aput(config, bodies(True), metadata, new)

        writes = [("log", ["c"]), (INTERRUPT, {"question": 1}), ("text", "new")]
        await saver.aput_writes(config, writes, "task", "~__pregel_pull, node")
        six: Any = SixMethods(cp)  # which cannot trim
        await CheckpointSaver(six).aprune([thread_id])
        data = await cp.load(store_thread_id(thread_id))
        await saver.aput_writes(config, [("text", "more")], "task 2")
        await CheckpointSaver(cp).aput(config, bodies(False), metadata, {})
        await CheckpointSaver(cp).aprune([thread_id])
        pruned = await cp.load(store_thread_id(thread_id))

    assert pruned is not None
    assert data is not None
    assert pruned.messages[-1] == {"type": "begin", "before": pruned.first, "size": 0}
    assert data is not None
    blob, checkpoint = data.messages[1], data.messages[2]
    checkpoint["values"]["long"][2] = [blob["id"] == checkpoint["values"]["long"][2][0]]
    assert data.messages == [
        RECORDS[0],
        {**RECORDS[1], "id": blob["id"]},
        {
            **RECORDS[2],
            "values": {**RECORDS[2]["values"], "long": ["plain", "", [True]]},
        },
        *RECORDS[3:],
    ]
    thread: Any = data.extra["thread"]
    assert data.extra == {
        "thread": EXTRA["thread"] | {"id": thread["id"]},
        "owner": owner,
    }
