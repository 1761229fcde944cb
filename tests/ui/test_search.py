"""The list of threads begins with what changed last, and can be searched."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cpkit import ToolCall
from cpkit.effects import EffectLedger
from cpkit.ui import newest, search
from tests.ui.checks import assert_inert
from tests.ui.conftest import Client
from tests.ui.stocked import stock


async def names(http: Any, query: str) -> list[str]:
    """Return the ids that a search lists."""
    data = (await http.get(f"/threads.json?{query}")).json()
    return [one["thread_id"] for one in data["threads"]]


async def test_the_newest_thread_is_the_first(cp: Any, client: Client) -> None:
    """By default, page by page, and by id on demand."""
    for name in ["b", "c", "a"]:
        await cp.append(name, [{}])

    await cp.save_extra("c", {"changed": True})

    async with client(cp) as http:
        assert await names(http, "") == ["c", "a", "b"]
        page = (await http.get("/threads.json?limit=2")).json()
        assert page["later"] == 2
        assert await names(http, "limit=2&start=2") == ["b"]
        assert await names(http, "order=id") == ["a", "b", "c"]
        assert await names(http, "after=a") == ["b", "c"]


async def test_every_id_is_searched(
    cp: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of threads whose content is too old to be searched."""
    monkeypatch.setattr("cpkit.ui.threads.LOOKED_AT", 3)
    monkeypatch.setattr(newest, "_LISTED", 10)
    await cp.append("Old-Needle", [{"text": "a needle"}])
    await cp.append("old", [{"text": "a needle"}])

    for number in range(600):
        await cp.append(f"chat-{number:04}", [{"text": "hay"}])

    await cp.append("chat-0000", [{"text": "this is a Needle"}])

    async with client(cp) as http:
        assert await names(http, "q=needle") == ["chat-0000", "Old-Needle"]
        page = await http.get("/threads?q=needle")
        assert "All ids were searched" in page.text
        assert "of the 3 threads that changed last" in page.text


@pytest.mark.parametrize("text", ['the "quoted" word', "line\nbreak", "ünïcode", "<b>"])
async def test_a_text_is_found_as_it_was_written(
    text: str, cp: Any, client: Client
) -> None:
    """JSON's escapes are not a part of it; the words around it are shown."""
    before = [{"role": "user", "content": "no"}] * 3
    parts = [{"type": "text", "text": f"so {text} was said " + "again " * 99}]
    await cp.append("t", [*before, {"role": "user", "content": parts}, before[0]])
    await cp.append("other", before)

    async with client(cp) as http:
        query = {"q": text}
        data = (await http.get("/threads.json", params=query)).json()
        (found,) = data["threads"]
        assert found["match"]["message"] == 3
        assert found["match"]["text"].startswith(f"so {' '.join(text.split())} was")
        page = await http.get("/threads", params=query)
        assert "/thread?id=t&start=1" in assert_inert(page).links


async def test_a_store_that_can_searches_every_message(
    sqlite: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only the newest; what it cannot find in time is looked for as before."""
    monkeypatch.setattr("cpkit.ui.threads.LOOKED_AT", 3)
    await sqlite.append("old", [{"text": "a Needle"}, *[{"text": "hay"}] * 50])
    await sqlite.append("numbers", [{"price": 18_990}])
    await sqlite.append("cpkit:own", [{"text": "a needle"}])

    for number in range(9):
        await sqlite.append(f"chat-{number}", [{"text": "hay"}])

    await EffectLedger(sqlite).run("old", "look_up", {}, _nothing)

    async with client(sqlite) as http:
        assert await names(http, "q=needle") == ["old"]
        assert await names(http, "q=needle&internal=1") == ["old", "cpkit:own"]
        assert await names(http, "q=needle&tool=look_up") == ["old"]
        assert await names(http, "q=needle&tool=other") == []
        assert await names(http, "q=needle&prefix=chat") == []
        page = await http.get("/threads?q=needle")
        assert "All ids and messages were searched" in page.text
        assert "/thread?id=old&start=0" in assert_inert(page).links
        assert "a Needle" in page.text
        (found,) = (await http.get("/threads.json?q=1899")).json()["threads"]
        assert found["match"] == {"message": 0, "text": '{"price": 18990}'}
        monkeypatch.setattr(search, "_SECONDS", 0.0)
        await sqlite.append("long", [{"text": "hay"}] * 1_000)
        page = await http.get("/threads?q=needle")
        assert "of the 3 threads that changed last" in page.text


async def _nothing(effect: Any) -> None:
    return None


async def _fail(effect: Any) -> None:
    raise ValueError("no such card")


async def test_threads_are_filtered_by_state(cp: Any, client: Client) -> None:
    """What waits, what is without an outcome, and where a tool failed."""
    await stock(cp)
    ledger = EffectLedger(cp)

    with pytest.raises(ValueError, match="no such card"):
        await ledger.run("order-13", "charge_card", {}, _fail)

    await cp.record_issued("twice", ToolCall("1", "send", {}, "k"))
    await cp.record_result("twice", "1", "busy", success=False)
    await cp.record_issued("twice", ToolCall("2", "send", {}, "k"))
    await cp.record_result("twice", "2", "sent")
    call = {"type": "tool_call", "id": "1", "name": "look_up", "args": {}}
    said = {"role": "tool", "tool_call_id": "1", "content": "Error: user not found"}
    await cp.append("chat-007", [{"role": "assistant", "content": [call]}, said])

    async with client(cp) as http:
        assert set(await names(http, "state=waits")) == {"order-1042", "order-977"}
        assert await names(http, "state=waits&q=977") == ["order-977"]
        assert await names(http, "state=doubt") == ["order-1042"]
        assert await names(http, "state=failed") == ["chat-007", "order-13"]
        data = (await http.get("/threads.json?state=failed")).json()["threads"]
        assert [(one["failed"]["tool"]) for one in data] == ["look_up", "charge_card"]
        page = await http.get("/threads?state=failed")
        links = assert_inert(page).links
        assert "/thread?id=chat-007#m1" in links
        assert "/thread/calls?id=order-13#call-0" in links
        calls = (await http.get("/thread/calls?id=order-13")).text
        assert 'id="call-0"' in calls
        assert "ValueError: no such card" in calls
        assert (await http.get("/threads?state=odd")).status_code == 400


async def test_a_reopened_failure_is_not_listed(cp: Any, client: Client) -> None:
    """A person has said that the effect may run again."""
    ledger = EffectLedger(cp)

    with pytest.raises(ValueError, match="no such card"):
        await ledger.run("t", "charge", {}, _fail)

    await ledger.reopen(ledger.key("t", "charge", {}))

    async with client(cp) as http:
        assert await names(http, "state=failed") == []


async def test_threads_are_filtered_by_tool(cp: Any, client: Client) -> None:
    """Of calls on record, of requests, and of calls in messages."""
    await stock(cp)

    async with client(cp) as http:
        assert await names(http, "tool=charge") == ["order-1042"]
        assert await names(http, "tool=send_voucher") == ["order-977"]
        assert await names(http, "tool=read") == ["session-parser"]
        assert await names(http, "tool=none") == []


async def test_threads_are_filtered_by_age(
    cp: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the last change."""
    await cp.append("t", [{}])

    async with client(cp) as http:
        assert await names(http, "age=hour") == ["t"]
        monkeypatch.setitem(search.AGES, "hour", timedelta(0))
        assert await names(http, "age=hour") == []


async def test_the_order_of_very_many_threads_is_used_again(
    cp: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a while, so that an open page does not list all ids all the time."""
    monkeypatch.setattr(newest, "_ALWAYS", 1)
    monkeypatch.setattr(newest, "_REUSED", timedelta(minutes=1))
    await cp.append("a", [{}])

    async with client(cp) as http:
        assert await names(http, "") == ["a"]
        await cp.append("b", [{}])
        assert await names(http, "") == ["b", "a"]
        await cp.append("c", [{}])
        data = (await http.get("/threads.json")).json()
        assert [one["thread_id"] for one in data["threads"]] == ["b", "a"]
        assert datetime.fromisoformat(data["sorted_at"]) <= datetime.now(UTC)
        monkeypatch.setattr(newest, "_REUSED", timedelta(0))
        assert await names(http, "") == ["c", "b", "a"]
