"""The format of stored records does not change."""

from __future__ import annotations

from typing import Any

import pytest
from langgraph.checkpoint.serde.types import INTERRUPT

from cpkit import MemoryCheckpointer
from cpkit.integrations.langgraph import CheckpointSaver, store_thread_id

FIRST_BODY = (
    "\x92\x85\xa1v\x04\xa2ts\xb92026-01-01T00:00:00+00:00\xa2id\xa2c1\xadversions_seen"
    "\x80\xb0updated_channels\xc0\x82\xa6source\xa4loop\xa4step\x01"
)
SECOND_BODY = (
    "\x92\x85\xa1v\x04\xa2ts\xb92026-01-02T00:00:00+00:00\xa2id\xa2c2\xadversions_seen"
    "\x80\xb0updated_channels\x91\xa3log\x82\xa6source\xa4loop\xa4step\x01"
)

RECORDS: list[dict[str, Any]] = [
    {
        "type": "checkpoint",
        "id": "r1",
        "first": None,
        "ns": "",
        "checkpoint_id": "c1",
        "parent": None,
        "body": ["msgpack", FIRST_BODY, "latin-1"],
        "versions": {"log": "1.5", "text": 1, "gone": 1},
        "values": {
            "log": {"version": "1.5", "data": ["msgpack", "kqFhoWI="]},
            "text": {"version": 1, "data": ["msgpack", "pXZhbHVl"]},
            "gone": {"version": 1, "data": ["empty", ""]},
        },
    },
    {
        "type": "checkpoint",
        "id": "r2",
        "first": "r1",
        "ns": "",
        "checkpoint_id": "c2",
        "parent": "c1",
        "body": ["msgpack", SECOND_BODY, "latin-1"],
        "versions": {"log": "2.5", "text": 1, "gone": 1},
        "values": {
            "log": {
                "version": "2.5",
                "data": ["msgpack", "kaFj"],
                "base": "r1",
                "keep": 2,
            },
        },
    },
    {
        "type": "writes",
        "id": "r3",
        "first": "r1",
        "ns": "",
        "checkpoint_id": "c2",
        "task_id": "task",
        "task_path": "~__pregel_pull, node",
        "writes": [
            [0, "log", "msgpack", "kaFj"],
            [-3, "__interrupt__", "msgpack", "gahxdWVzdGlvbgE="],
        ],
    },
    {"type": "hidden", "id": "r4", "first": "r1", "checkpoints": [["", "c1"]]},
]


@pytest.mark.parametrize("thread_id", ["t", "t" * 600])
async def test_stored_records_are_read(thread_id: str) -> None:
    """Every field of an old record is loaded."""
    config: Any = {"configurable": {"thread_id": thread_id}}

    async with MemoryCheckpointer[Any]() as cp:
        hashed = {"thread_id": thread_id} if len(thread_id) > 500 else {}
        records = [record | hashed for record in RECORDS]
        await cp.append(store_thread_id(thread_id), records[:3])
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
        assert second.checkpoint == {
            "v": 4,
            "ts": "2026-01-02T00:00:00+00:00",
            "id": "c2",
            "versions_seen": {},
            "updated_channels": ["log"],
            "channel_versions": {"log": "2.5", "text": 1, "gone": 1},
            "channel_values": {"log": ["a", "b", "c"], "text": "value"},
        }
        assert first.checkpoint["channel_values"] == {
            "log": ["a", "b"],
            "text": "value",
        }
        assert second.pending_writes == [
            ("task", INTERRUPT, {"question": 1}),
            ("task", "log", ["c"]),
        ]
        await cp.append(store_thread_id(thread_id), records[3:])
        (second,) = [found async for found in saver.alist(config)]
        assert second.parent_config is None


async def test_written_records_have_the_same_format() -> None:
    """The same calls write the same records, except for their ids.

    Only small texts, numbers and empty values are now stored in another form.
    """
    async with MemoryCheckpointer[Any]() as cp:
        saver = CheckpointSaver(cp)
        config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        body: Any = {
            "v": 4,
            "ts": "2026-01-01T00:00:00+00:00",
            "id": "c1",
            "versions_seen": {},
            "updated_channels": None,
            "channel_versions": {"log": "1.5", "text": 1, "gone": 1},
            "channel_values": {"log": ["a", "b"], "text": "value"},
        }
        new: Any = body["channel_versions"]
        config = await saver.aput(config, body, {"source": "loop", "step": 1}, new)
        body = {
            **body,
            "ts": "2026-01-02T00:00:00+00:00",
            "id": "c2",
            "updated_channels": ["log"],
            "channel_versions": {"log": "2.5", "text": 1, "gone": 1},
            "channel_values": {"log": ["a", "b", "c"], "text": "value"},
        }
        new = {"log": "2.5"}
        config = await saver.aput(config, body, {"source": "loop", "step": 1}, new)
        writes = [("log", ["c"]), (INTERRUPT, {"question": 1})]
        await saver.aput_writes(config, writes, "task", "~__pregel_pull, node")
        await saver.aprune(["t"])
        written = await cp.read(store_thread_id("t"))

    names = {record["id"]: f"r{n}" for n, record in enumerate(written, 1)}

    for record in written:
        record["id"] = names[record["id"]]
        record["first"] = names.get(record["first"])

        for value in record.get("values", {}).values():
            if "base" in value:
                value["base"] = names[value["base"]]

    assert written == [
        {
            **RECORDS[0],
            "values": {"log": RECORDS[0]["values"]["log"]},
            "plain": {"text": "value"},
            "empty": ["gone"],
        },
        {**RECORDS[1], "plain": {}, "empty": []},
        *RECORDS[2:],
    ]
