"""Lists that are stored by their new items equal lists that are stored completely."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage
from langgraph.checkpoint.base import BaseCheckpointSaver, empty_checkpoint
from langgraph.checkpoint.base.id import uuid6
from langgraph.checkpoint.memory import InMemorySaver

from cpkit import MemoryCheckpointer
from cpkit.integrations.langgraph import (
    CheckpointSaver,
    composing,
    records,
    threads,
    values,
)
from cpkit.integrations.langgraph.values import prints_of
from tests.sweeps import sweep

ITEMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(0, 1),
    st.sampled_from([0.0, 1.0, -0.0, "", "a", b"a", "a" * 50]),
    st.lists(st.integers(0, 1), max_size=2),
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(0, 1)),
    st.builds(
        AIMessage,
        st.sampled_from(["", "a", "a" * 50]),
        id=st.sampled_from(["1", "2"]),
        additional_kwargs=st.dictionaries(st.just("a"), st.integers(0, 1)),
    ),
)

# The saver, the checkpoint to start from, the number of items to keep, the new items,
# and a replacement of one item, counted from the end.
STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 9),
        st.integers(0, 12),
        st.lists(ITEMS, max_size=6),
        st.none() | st.tuples(st.integers(0, 9), ITEMS),
    ),
    max_size=12,
)


def exactly(value: Any) -> str:
    """Return a form in which 1, 1.0, True, 0.0 and -0.0 are different."""
    return repr(value)


@pytest.mark.parametrize("examples", sweep([4, 100], [4]))
def test_every_list_is_loaded_exactly(examples: int) -> None:
    """Any saver reads and lists the checkpoints of any other saver.

    Whole checkpoints may be frequent or rare, texts may all be blobs, and reads short.
    """

    @given(STEPS, st.sampled_from([0, 0.3, 10]), st.booleans())
    @settings(deadline=None, max_examples=examples)
    def check(steps: list[Any], repeated: float, short: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(composing, "_REPEATED", repeated)
            patch.setattr(records, "_OVERHEAD", 16)

            if short:
                patch.setattr(composing, "INLINE", 0)
                patch.setattr(values, "_LARGEST", 20)
                patch.setattr(threads, "_FIRST_READ", 1)

            asyncio.run(play(steps))

    check()


async def play(steps: list[Any]) -> None:
    async with MemoryCheckpointer[Any]() as cp:
        reference = InMemorySaver()
        savers = [CheckpointSaver(cp), CheckpointSaver(cp)]
        start_config: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
        child: Any = {"configurable": {"thread_id": "t", "checkpoint_ns": "child"}}
        configs: list[Any] = [start_config, child]

        for which, start, keep, added, change in steps:
            config = configs[start % len(configs)]
            saver: BaseCheckpointSaver[str] = savers[which]
            there = await saver.aget_tuple(config)
            log = there.checkpoint["channel_values"]["log"][:keep] if there else []
            log += added

            if change is not None and change[0] < len(log):
                log[-1 - change[0]] = change[1]

            version = saver.get_next_version(str(len(configs)), None)
            checkpoint = empty_checkpoint()
            checkpoint["id"] = str(uuid6())
            checkpoint["channel_values"] = {"log": log}
            new: Any = {"log": version}

            if "checkpoint_id" in config["configurable"] and keep % 3:
                # A task wrote the list, or its new items.
                write = [("log", log if keep % 3 == 1 else added)]
                await saver.aput_writes(config, write, f"task {len(configs)}")

            if keep % 2 or there is None:
                checkpoint["channel_values"]["n"] = keep
                new["n"] = version
            else:
                checkpoint["channel_values"]["n"] = there.checkpoint["channel_values"][
                    "n"
                ]

            before = there.checkpoint["channel_versions"] if there else {}
            checkpoint["channel_versions"] = {**before, **new}
            await reference.aput(config, checkpoint, {}, new)
            configs.append(await saver.aput(config, checkpoint, {}, new))

        for config in configs:
            expected = await reference.aget_tuple(config)

            for reader in (*savers, CheckpointSaver(cp)):
                found = await reader.aget_tuple(config)
                assert exactly(_log(found)) == exactly(_log(expected))

        for reader in (*savers, CheckpointSaver(cp)):
            for config in (start_config, child):
                newest = await reader.aget_tuple(config)
                expected = await reference.aget_tuple(config)
                assert exactly(_log(newest)) == exactly(_log(expected))

        everything: Any = {"configurable": {"thread_id": "t"}}

        for config in (start_config, child, everything):
            for before, limit in [(None, 1), (None, 3), (configs[-1], 2), (None, None)]:
                if before is not None and len(configs) == 2:
                    continue

                history = [
                    one
                    async for one in reference.alist(config, before=before, limit=limit)
                ]
                # All namespaces by id; LangGraph's saver goes by namespace.
                history.sort(key=_id, reverse=True)

                if config is everything and limit is not None:
                    every = [
                        one async for one in reference.alist(config, before=before)
                    ]
                    history = sorted(every, key=_id, reverse=True)[:limit]

                for reader in (*savers, CheckpointSaver(cp)):
                    listed = [
                        one
                        async for one in reader.alist(
                            config, before=before, limit=limit
                        )
                    ]
                    assert list(map(_id, listed)) == list(map(_id, history))
                    assert exactly([*map(_log, listed)]) == exactly(
                        [*map(_log, history)]
                    )


def _id(found: Any) -> Any:
    return found.checkpoint["id"]


def _log(found: Any) -> Any:
    return found and found.checkpoint["channel_values"]


def test_fingerprints_differ_if_the_stored_items_differ() -> None:
    """No two different items have the same fingerprint."""
    odd: list[Any] = ["1", b"1", True, 1, 1.0, None, [1], {"1": 1}, {1: 1}, ("m", 1)]
    odd += [AIMessage("1", id="1"), AIMessage("1", id="2"), {"content": "1"}]
    odd += [AIMessage("1", id="1", extra=1), AIMessage(["1"], id="1"), {1}, 1j]
    fingerprints = prints_of(odd[:-1])
    assert fingerprints is not None
    assert len(set(fingerprints)) == len(odd) - 1
    # The serializer refuses an item that cannot be packed.
    assert prints_of(odd) is None
    assert prints_of([1.5] * 3) is None
    assert prints_of([]) is None
    assert prints_of(("a",)) is None
