"""pydantic-ai's conversations, beside its own store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_ai import Agent, DeferredToolRequests
from pydantic_ai.conversation import Conversation
from pydantic_ai.conversation_store import (
    ConversationConflict,
    ConversationEntry,
    ConversationRecord,
    InMemoryConversationStore,
)
from pydantic_ai.conversation_store import ConversationStore as TheirStore
from pydantic_ai.exceptions import UserError
from pydantic_ai.messages import (
    ModelMessage,
    ModelRequest,
    ModelResponse,
    TextPart,
    ToolCallPart,
    UserPromptPart,
)
from pydantic_ai.models.test import TestModel

from cpkit import InvalidId, MemoryCheckpointer, open_checkpointer
from cpkit.integrations.pydantic_ai import ConversationStore, conversation_thread
from tests.integrations.losing import LosesAnAnswer

T = TypeVar("T")


class Both(TheirStore):
    """pydantic-ai's logic over both stores; each answer must be the same."""

    def __init__(self, ours: TheirStore) -> None:
        self.stores = (ours, InMemoryConversationStore())

    async def both(self, call: Callable[[TheirStore], Awaitable[T]]) -> T:
        """Return what both return; raise what both raise."""
        answers = [
            await asyncio.gather(call(one), return_exceptions=True)
            for one in self.stores
        ]
        (ours,), (theirs,) = answers

        if isinstance(ours, BaseException) and isinstance(theirs, BaseException):
            assert (type(ours), str(ours)) == (type(theirs), str(theirs))
            raise ours

        assert ours == theirs
        return ours  # type: ignore[return-value]  # an exception is unlike a result

    async def read_record(self, conversation_id: str) -> ConversationRecord | None:
        return await self.both(lambda one: one.read_record(conversation_id))

    async def read_records(
        self, *, scope: str | None = None, limit: int | None = None
    ) -> Sequence[ConversationRecord]:
        return await self.both(lambda one: one.read_records(scope=scope, limit=limit))

    async def write_record(
        self,
        record: ConversationRecord,
        *,
        new_entries: Sequence[ConversationEntry] = (),
        expected_revision: str | None,
    ) -> None:
        await self.both(
            lambda one: one.write_record(
                record, new_entries=new_entries, expected_revision=expected_revision
            )
        )

    async def delete_record(
        self, conversation_id: str, *, expected_revision: str
    ) -> None:
        await self.both(
            lambda one: one.delete_record(
                conversation_id, expected_revision=expected_revision
            )
        )

    async def read_entry(self, entry_id: str) -> ConversationEntry:
        return await self.both(lambda one: one.read_entry(entry_id))

    async def read_history(
        self, head_id: str | None, *, limit: int | None = None
    ) -> list[ConversationEntry]:
        return await self.both(lambda one: one.read_history(head_id, limit=limit))


names = st.sampled_from(["a", "b", "c"])
scopes = st.sampled_from([None, "x", "y"])
numbers = st.integers(0, 4)
operations = st.one_of(
    st.tuples(st.just("turn"), names, scopes, st.none() | numbers),
    st.tuples(st.just("rewrite"), names, numbers),
    st.tuples(st.just("stale"), names),
    st.tuples(st.just("branch"), names, numbers),
    st.tuples(st.just("back"), names, numbers),
    st.tuples(st.just("fork"), names, names, st.none() | numbers),
    st.tuples(st.just("delete"), names, scopes),
    st.tuples(st.just("list"), scopes, st.none() | numbers),
    st.tuples(st.just("forget")),
)


def turn(number: int) -> list[ModelMessage]:
    """Return the messages of a turn."""
    return [
        ModelRequest(parts=[UserPromptPart(content=f"question {number}")]),
        ModelResponse(parts=[TextPart(content=f"answer {number}")]),
    ]


async def play(cp: Any, story: list[Any]) -> None:
    """Do what the story says with both stores."""
    store, number = Both(ConversationStore(cp)), 0

    for verb, *rest in story:
        number += 1

        try:
            match verb, rest:
                case "turn", [name, scope, limit]:
                    found = await store.load(name, limit=limit)
                    talk = found or Conversation(conversation_id=name)
                    talk.messages += turn(number)
                    talk.usage.requests += 1
                    await store.save(talk, scope=scope)
                case "rewrite", [name, keep]:
                    talk = await store.load(name) or Conversation(conversation_id=name)
                    talk.messages = talk.messages[:keep] + turn(number)
                    talk.new_message_index = None
                    talk.deferred_tool_requests = DeferredToolRequests(
                        calls=[ToolCallPart("pay", {"amount": 1}, f"call-{number}")]
                    )
                    await store.save(talk)
                case "stale", [name]:
                    await store.save(Conversation(conversation_id=name, revision="old"))
                case "branch", [name, at]:
                    found = await store.load(name)
                    revision = None if found is None else found.revision
                    await store.branch(name, at=at, expected_revision=revision)
                case "back", [name, which]:
                    record = await store.read_record(name)
                    tips = [] if record is None else record.branches

                    if record is not None and which < len(tips):
                        revision, tip = record.revision, tips[which]
                        await store.branch(
                            name, from_entry=tip, expected_revision=revision
                        )
                case "fork", [name, new, at]:
                    await store.fork(name, new_conversation_id=new, at=at)
                case "delete", [name, scope]:
                    await store.delete(name, scope=scope)
                case "list", [scope, limit]:
                    await store.list_conversations(scope=scope, limit=limit)
                case "forget", []:  # as in another process
                    store.stores = ConversationStore(cp), store.stores[1]
        except UserError:  # both raised it
            continue

    for name in ("a", "b", "c"):
        await store.load_entries(name)
        record = await store.read_record(name)

        for tip in [] if record is None else record.branches:
            await store.read_history(tip)


@given(st.lists(operations, min_size=4, max_size=20))
@settings(max_examples=30, deadline=None)
def test_it_behaves_as_pydantic_ais_own_store(story: list[Any]) -> None:
    """Random saves, branches, forks and deletions have the same answers."""

    async def run() -> None:
        async with MemoryCheckpointer[Any]() as cp:
            await play(cp, story)

    asyncio.run(run())


async def test_conversations_outlive_the_handle(url: str) -> None:
    """A fork, a branch and the rest, after the store was opened again."""
    agent = Agent(TestModel(custom_output_text="Hello."))

    async with open_checkpointer(url) as cp:
        store = ConversationStore(cp)
        talk = Conversation(conversation_id="c")

        for text in ("one", "two"):
            result = await agent.run(text, conversation=talk)
            await store.save(result, scope="ann")
            talk = result.conversation

        await store.fork("c", at=2, new_conversation_id="f")
        await store.branch("c", at=1, expected_revision=talk.revision)

    async with open_checkpointer(url) as cp:
        store = ConversationStore(cp)
        ours, fork = await store.load("c"), await store.load("f")
        assert ours is not None
        assert fork is not None
        assert ours.messages == talk.messages[:1]
        assert fork.messages == talk.messages[:2]
        assert ours.usage == talk.usage
        assert [
            one.conversation_id for one in await store.list_conversations(scope="ann")
        ] == ["c", "f"]
        record = await store.read_record("c")
        assert record is not None
        (tip,) = record.branches
        back = await store.branch(
            "c", from_entry=tip, expected_revision=record.revision
        )
        assert back.messages == talk.messages


async def test_of_two_savers_the_second_is_told(url: str) -> None:
    """Both loaded the same conversation; nothing of the second is stored."""
    async with open_checkpointer(url) as cp, open_checkpointer(url) as other:
        stores = [ConversationStore(cp), ConversationStore(other)]
        await stores[0].save(Conversation(conversation_id="c", messages=turn(1)))
        talks: list[Any] = [await one.load("c") for one in stores]

        for number, talk in enumerate(talks):
            talk.messages += turn(number)

        saves = map(TheirStore.save, stores, talks)
        told = await asyncio.gather(*saves, return_exceptions=True)
        assert sorted(map(type, told), key=str) == sorted(
            [list, ConversationConflict], key=str
        )
        stored: Any = await stores[0].load("c")
        assert stored.messages in [one.messages for one in talks]


async def test_a_deletion_erases_what_no_fork_uses(cp: MemoryCheckpointer[Any]) -> None:
    """The entries of a forked conversation stay, also under a fork of a fork."""
    store, said = ConversationStore(cp), turn(1)

    for name in ("a", "b"):
        await store.save(Conversation(conversation_id=name, messages=said))

    await store.fork("a", new_conversation_id="f", at=1)
    await store.fork("f", new_conversation_id="g")

    for name in ("a", "b", "f"):
        await store.delete(name)

    assert await cp.load(conversation_thread("b")) is None
    assert await store.load("a") is None
    fork: Any = await ConversationStore(cp).load("g")
    assert fork.messages == said[:1]
    # The id may be used again, and the fork keeps what it has.
    await store.save(Conversation(conversation_id="a", messages=turn(2)))
    again: Any = await ConversationStore(cp).load("g")
    assert again.messages == fork.messages


async def test_a_fork_of_what_is_deleted_meanwhile_is_a_conflict(
    cp: MemoryCheckpointer[Any],
) -> None:
    """Either the entries stay, or the fork is not stored."""
    store = ConversationStore(cp)
    await store.save(Conversation(conversation_id="a", messages=turn(1)))
    record = await store.read_record("a")
    assert record is not None
    fork = ConversationRecord(conversation_id="f", head_id=record.head_id)
    await store.delete("a")

    with pytest.raises(ConversationConflict):
        await store.write_record(fork, expected_revision=None)

    await store.save(Conversation(conversation_id="a", messages=turn(2) + turn(3)))

    with pytest.raises(ConversationConflict):
        await store.write_record(fork, expected_revision=None)

    assert await store.load("f") is None


async def test_an_entry_is_found_by_its_id_alone(cp: MemoryCheckpointer[Any]) -> None:
    """By a process that never read its conversation."""
    store = ConversationStore(cp)
    talk = Conversation(conversation_id="a", messages=turn(1) + turn(2))
    entries = await store.save(talk)
    assert await ConversationStore(cp).read_entry(entries[1].id) == entries[1]

    with pytest.raises(KeyError):
        await store.read_entry("nowhere")


async def test_a_save_whose_answer_is_lost_is_stored_once(
    cp: MemoryCheckpointer[Any],
) -> None:
    """The caller does not take its own save for another writer's."""
    losing = LosesAnAnswer(cp)
    store = ConversationStore(losing)
    talk = Conversation(conversation_id="a", messages=turn(1))
    assert len(await store.save(talk)) == 2
    assert losing.is_lost
    assert len(await cp.read(conversation_thread("a"))) == 2
    await store.save(talk)  # the revision is the stored one


async def test_an_id_that_is_too_long_is_refused(cp: MemoryCheckpointer[Any]) -> None:
    """It would not fit into the id of a thread."""
    with pytest.raises(InvalidId):
        await ConversationStore(cp).load("a" * 500)
