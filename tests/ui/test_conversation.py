"""A conversation says what waits, what it took, and shows each thing once."""

from __future__ import annotations

from typing import Any

import pytest

from cpkit import ToolCall
from cpkit.effects import EffectLedger, EffectTimeout
from cpkit.lease import thread_lease
from cpkit.toolcalls.usage import Usage, total_of, usage_of
from tests.ui.checks import assert_inert
from tests.ui.conftest import Client
from tests.ui.stocked import stock
from tests.ui.test_guard import form_of

MAIL = "Dear Ann,\n\nyour <b>order</b> is on its way.\n\nThe shop"


async def test_a_conversation_shows_what_it_waits_for(cp: Any, client: Client) -> None:
    """With the request; the menu of every page has the total."""
    await stock(cp)

    async with client(cp) as http:
        page = await http.get("/thread?id=order-1042")
        assert "This thread waits for a decision" in page.text
        assert any("choose=approve" in link for link in assert_inert(page).links)
        data = (await http.get("/thread.json?id=order-1042")).json()
        assert [one["tool"] for one in data["requests"]] == ["refund"]
        assert (
            "waits for a decision" not in (await http.get("/thread?id=chat-001")).text
        )
        total = '<span id="total" data-live><span class="badge issued">2</span></span>'

        for path in ("/threads", "/store", "/thread?id=chat-001", "/waiting/calls"):
            assert total in (await http.get(path)).text

        answer = await http.post("/waiting/decide", data=await form_of(http))
        assert total.replace("2", "1") in answer.text
        page = await http.get("/thread?id=order-1042")
        assert "waits for a decision" not in page.text


async def test_a_call_without_a_result_says_what_the_ledger_knows(
    cp: Any, client: Client
) -> None:
    """That it failed, and how, or that it was decided and no run has followed."""
    calls = [{"id": f"c{n}", "name": name, "args": {}} for n, name in enumerate("abc")]
    await cp.append("t", [{"role": "assistant", "content": "", "tool_calls": calls}])
    ledger = EffectLedger(cp, requires_approval=lambda effect: effect.tool == "b")

    def fail(_: Any) -> None:
        raise RuntimeError("the server refused <it>")

    with pytest.raises(RuntimeError):
        await ledger.run("t", "a", {}, fail, tool_call_id="c0")

    with pytest.raises(EffectTimeout):
        await ledger.run("t", "b", {}, fail, tool_call_id="c1", approval_timeout=0)

    async with client(cp) as http:
        page = (await http.get("/thread?id=t")).text
        assert "RuntimeError: the server refused &lt;it&gt;" in page
        assert page.count("waits for a decision") > 1
        assert page.count("no result on this page") == 1
        (request,) = await ledger.pending("t")
        await ledger.approve(request.key)
        page = (await http.get("/thread?id=t")).text
        assert "approved, not run yet" in page
        data = (await http.get("/thread.json?id=t")).json()["ledger"]
        assert data["calls"]["c0"]["state"] == "failure"
        assert data["verdicts"] == {"b": "approved"}


async def test_a_run_waits_for_a_request_of_another_thread(
    cp: Any, client: Client
) -> None:
    """The conversation of the run has it, and the request shows that conversation."""
    await cp.append("chat", [{"role": "user", "content": "pay Ann"}])
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)

    async with client(cp) as http:
        async with thread_lease(cp, "chat"):
            with pytest.raises(EffectTimeout):
                await ledger.begin("books", "pay", {}, approval_timeout=0)

        for name in ("chat", "books"):
            data = (await http.get(f"/thread.json?id={name}")).json()
            assert [one["tool"] for one in data["requests"]] == ["pay"]

        found = (await http.get("/threads.json?state=waits")).json()["threads"]
        assert [one["thread_id"] for one in found] == ["chat"]
        assert found[0]["waits"] == {"approvals": 1, "calls": 0}
        place = await form_of(http)
        place = {"id": place["id"], "request": place["request"]}
        assert "pay Ann" in (await http.get("/waiting/decide", params=place)).text


async def test_a_request_shows_why_the_agent_asks(cp: Any, client: Client) -> None:
    """The newest messages stand beside the form."""
    await stock(cp)
    more = [{"role": "user", "content": f"word {n}"} for n in range(30)]
    await cp.append("order-1042", more)

    async with client(cp) as http:
        form = await form_of(http)
        place = {"id": form["id"], "request": form["request"]}
        page = await http.get("/waiting/decide", params=place)
        assert "word 29" in page.text
        assert "word 17" not in page.text
        assert "The last 12 of 35 messages" in page.text


USAGES: dict[str, tuple[Any, Usage]] = {
    "session": (
        {
            "type": "message",
            "timestamp": "2025-11-20T23:33:50.804Z",
            "message": {
                "role": "assistant",
                "model": "m",
                "usage": {
                    "input": 5,
                    "output": 7,
                    "cacheRead": 100,
                    "cacheWrite": 20,
                    "cost": {"input": 1, "total": 0.25},
                },
            },
        },
        Usage("2025-11-20T23:33:50.804000+00:00", "m", 125, 7, 0.25),
    ),
    "openai": (
        {
            "created": 1763681581,
            "model": "m",
            "usage": {"prompt_tokens": 5, "completion_tokens": 7},
        },
        Usage("2025-11-20T23:33:01+00:00", "m", 5, 7),
    ),
    "anthropic": (
        {
            "model": "m",
            "usage": {
                "input_tokens": 5,
                "cache_read_input_tokens": 10,
                "cache_creation_input_tokens": None,
                "output_tokens": 7,
            },
        },
        Usage(None, "m", 15, 7),
    ),
    "langchain": (
        {
            "response_metadata": {"model_name": "m"},
            "usage_metadata": {"input_tokens": 5, "output_tokens": 7},
        },
        Usage(None, "m", 5, 7),
    ),
    "pydantic-ai": (
        {
            "kind": "response",
            "model_name": "m",
            "timestamp": "2025-11-20T23:33:01+01:00",
            "usage": {"input_tokens": 5, "cache_read_tokens": 3, "output_tokens": 7},
        },
        Usage("2025-11-20T22:33:01+00:00", "m", 5, 7),
    ),
    "cpkit": (
        {"metadata": {"cost": 0.5, "timestamp": 1763681581544}},
        Usage("2025-11-20T23:33:01.544000+00:00", cost=0.5),
    ),
    "odd": (
        {
            "timestamp": 10**400,
            "created": "0001-01-01T00:00:00+14:00",
            "model": 7,
            "usage": {"input": True, "output": -1, "cost": {"total": float("inf")}},
        },
        Usage(),
    ),
    "text": ("hello", Usage()),
}


@pytest.mark.parametrize("form", USAGES)
def test_a_message_says_what_it_took(form: str) -> None:
    """In each known form; what is not a time or a number is left out."""
    message, expected = USAGES[form]
    assert usage_of(message) == expected


def test_what_is_not_known_is_not_summed() -> None:
    """A sum without a number is unknown, not zero."""
    assert total_of([Usage(), Usage()]) == Usage()
    found = total_of([Usage(model="a", cost=1), Usage(model="a", cost=2), Usage()])
    assert found == Usage(model="a", cost=3)


async def chat(cp: Any) -> None:
    """Fill thread ``t`` with two turns that cost 3 dollars."""
    await cp.append(
        "t",
        [
            {"role": "system", "content": "You are careful.\n" * 20},
            {"role": "user", "content": "first", "timestamp": 1763681581000},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "I send it."},
                    {
                        "type": "tool_call",
                        "id": "call_12345",
                        "name": "send_mail",
                        "args": {"to": "ann", "body": MAIL, "copies": 2},
                    },
                ],
                "model": "model-x",
                "timestamp": 1763681584000,
                "usage": {"input": 1200, "output": 7, "cost": {"total": 1}},
            },
            {
                "role": "tool",
                "tool_call_id": "call_12345",
                "content": "sent",
                "timestamp": 1763681585000,
            },
            {"role": "user", "content": "second", "timestamp": 1763681591000},
            {
                "role": "assistant",
                "content": "done",
                "model": "model-x",
                "timestamp": 1763681592000,
                "usage": {"input": 2000, "output": 3, "cost": {"total": 2}},
            },
        ],
    )


async def test_a_conversation_shows_each_thing_once(cp: Any, client: Client) -> None:
    """A result is beside its call, a prompt is folded, a text is text."""
    await chat(cp)

    async with client(cp) as http:
        page = await http.get("/thread?id=t")
        assert_inert(page)
        assert page.text.count("data-row") == 5
        assert "shown beside its call" not in page.text
        assert "<summary>System prompt" in page.text
        assert f">{MAIL.replace('<', '&lt;').replace('>', '&gt;')}</pre>" in page.text
        assert "<dt><bdi>copies</bdi></dt><dd><code>2</code>" in page.text
        assert "<bdi>call_12345" not in page.text
        assert "1,200 tokens in, 7 out" in page.text
        assert "$1.00" in page.text
        assert "3,200 tokens in, 10 out" in page.text


async def test_a_time_line_has_turns_and_what_they_took(
    cp: Any, client: Client
) -> None:
    """In the order of time, with the thread's sum."""
    await chat(cp)
    await cp.record_issued("t", ToolCall("c", "send_mail", {}, "k"))

    async with client(cp) as http:
        data = (await http.get("/thread/calls.json?id=t")).json()
        assert data["usage"]["cost"] == 3
        turns = data["turns"]
        assert [one["text"] for one in turns] == ["first", "second"]
        assert [one["seconds"] for one in turns] == [4, 1]
        assert [one["cost"] for one in turns] == [1, 2]
        assert turns[0]["left"] == 0
        page = await http.get("/thread/calls?id=t")
        assert_inert(page)
        assert page.text.index(">second<") < page.text.index("<bdi>send_mail")
        assert "$3.00" in page.text


async def test_the_ledgers_envelope_is_hidden(cp: Any, client: Client) -> None:
    """Arguments are arguments, results are results; ids are folded."""
    ledger = EffectLedger(cp)
    await ledger.run("t", "pay", {"amount": 5}, lambda effect: "receipt 7")

    async with client(cp) as http:
        page = (await http.get("/thread/calls?id=t")).text
        assert "stale_after" not in page
        assert "<dt><bdi>amount</bdi></dt><dd><code>5</code>" in page
        assert 'dir="auto">receipt 7</pre>' in page
        assert page.index("<summary>Ids</summary>") < page.index("effect:")
        (call,) = (await http.get("/thread/calls.json?id=t")).json()["calls"]
        assert call["args"]["args"] == {"amount": 5}


async def test_arguments_are_decided_as_they_are(cp: Any, client: Client) -> None:
    """A number and its text look different; long texts are whole."""
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)
    args: dict[str, Any] = {"one": 1, "text": "1", "mail": MAIL, "many": "x" * 50_000}

    with pytest.raises(EffectTimeout):
        await ledger.begin("t", "send", args, approval_timeout=0)

    async with client(cp) as http:
        form = await form_of(http)
        place = {"id": form["id"], "request": form["request"]}
        page = (await http.get("/waiting/decide", params=place)).text
        assert "<bdi>one</bdi></dt><dd><code>1</code>" in page
        assert "<bdi>text</bdi></dt><dd><code>&#34;1&#34;</code>" in page
        assert "x" * 50_000 in page


@pytest.mark.parametrize("decision", ["deny", "withdraw"])
async def test_a_person_asks_again(decision: str, cp: Any, client: Client) -> None:
    """A denied or withdrawn request is asked again by a button."""
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)

    with pytest.raises(EffectTimeout):
        await ledger.begin("t", "pay", {"amount": 5}, approval_timeout=0)

    async with client(cp) as http, client(cp, read_only=True) as reader:
        form = await form_of(http)
        assert (await http.post("/waiting/again", data=form)).status_code == 200
        answer = await http.post("/waiting/decide", data=form | {"decision": decision})
        assert "Ask again" in answer.text
        assert await ledger.requests() == []
        assert (await reader.post("/waiting/again", data=form)).status_code == 403
        wrong = await http.post("/waiting/again", data=form | {"shown": "x"})
        assert wrong.status_code == 409
        answer = await http.post("/waiting/again", data=form)
        assert "request 2 of this effect" in answer.text
        assert [one.number for one in await ledger.requests()] == [2]
        form = await form_of(http)
        assert (await http.post("/waiting/decide", data=form)).status_code == 200
        answer = await http.post("/waiting/again", data=form)
        assert answer.status_code == 409
        assert "is approved already" in answer.text


async def test_a_request_names_its_thread_where_it_is_another(
    cp: Any, client: Client
) -> None:
    """In the list, with a link to why it was asked; not in its own conversation."""
    await stock(cp)

    async with client(cp) as http:
        listed = assert_inert(await http.get("/waiting"))
        assert "/thread?id=order-977" in listed.links
        (why,) = [one for one in listed.links if "977" in one and one.endswith("#why")]
        assert '<h2 id="why">' in (await http.get(why)).text
        own = assert_inert(await http.get("/thread?id=order-977"))
        assert own.links.count("/thread?id=order-977") == 1, "the tab"
        assert not any(one.endswith("#why") for one in own.links)


async def test_a_failure_is_not_drawn_as_a_success(cp: Any, client: Client) -> None:
    """A final failure is a completed call; what a turn does not have is not a row."""

    async def fail(effect: Any) -> None:
        raise ValueError("no such card")

    await cp.append("t", [{"role": "user", "content": "pay"}])

    with pytest.raises(ValueError, match="no such card"):
        await EffectLedger(cp).run("t", "charge", {}, fail)

    async with client(cp) as http:
        page = (await http.get("/thread/calls?id=t")).text
        assert '<rect class="failed"' in page
        assert '<rect class="completed"' not in page
        assert '<td data-label="Time" class="none">' in page
