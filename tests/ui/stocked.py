"""Fill a store with what the page shows: chats, a session, calls, requests, a lease."""

from __future__ import annotations

from typing import Any

from cpkit.effects import Effect, EffectLedger, EffectTimeout
from cpkit.records import JsonValue, ToolCall
from cpkit.sessions import SessionLog

__all__ = ["HOSTILE", "stock", "stock_hostile"]

HOSTILE = [
    "<script>document.title='owned'</script>",
    "<img src=x onerror=\"document.title='owned'\">",
    "<svg onload=\"document.title='owned'\"><script>alert(1)</script></svg>",
    "[click](javascript:document.title='owned') ![x](https://tracker.example/x.png)",
    '[data](data:text/html;base64,PHNjcmlwdD4=) <https://example.com/"onmouseover=x>',
    "\x1b[31mred\x1b[0m \x00 \x07",
    "\u202egnp.exe \u2066hidden\u2069 \u200b zero",
    "{{ 7 * 7 }} {% raw %} </textarea></script><!--",
    "x" * 200_000,
    '\'" style="background:url(https://tracker.example)" ',
]
"""Texts that must be shown, and never run."""


async def stock(cp: Any) -> None:
    """Fill the store with the work of a support agent and of a coding agent."""
    await cp.append(
        "order-1042",
        [
            {"role": "system", "content": "You are the support agent of a shop."},
            {
                "role": "user",
                "content": "My order **#1042** arrived broken. I want my money back.",
            },
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "reasoning",
                        "text": "The customer asks for a refund. Look at the order.",
                    },
                    {"type": "text", "text": "Let me look at that order."},
                    {
                        "type": "tool_call",
                        "id": "call_1",
                        "name": "find_order",
                        "args": {"order": 1042},
                    },
                ],
            },
            {
                "role": "tool",
                "tool_call_id": "call_1",
                "tool_name": "find_order",
                "content": '{"total": "89.90 EUR", "state": "delivered"}',
            },
            {
                "role": "assistant",
                "content": "Order 1042 was delivered yesterday:\n\n"
                "| item | price |\n|---|---:|\n| Lamp | 79.90 |\n"
                "| Shipping | 10.00 |\n\n"
                "I ask a colleague to approve the refund of `89.90 EUR`.",
            },
        ],
        extra={"plan": ["find the order", "ask for approval", "refund"], "budget": 120},
    )
    ledger = EffectLedger(cp, requires_approval=lambda effect: True)
    await _request(
        ledger, "order-1042", "refund", {"order": 1042, "amount": "89.90 EUR"}
    )
    await _request(
        ledger, "order-977", "send_voucher", {"customer": "c-31", "value": "20 EUR"}
    )
    free = EffectLedger(cp)

    async def found(effect: Effect) -> dict[str, JsonValue]:
        return {"order": 1042, "total": "89.90 EUR"}

    await free.run("order-1042", "find_order", {"order": 1042}, found)
    await cp.record_issued(
        "order-1042", ToolCall("charge-1", "charge", {"amount": "5 EUR"}, "charge-1042")
    )
    await cp.record_result("order-1042", "charge-1", "card declined", success=False)
    await cp.record_issued(
        "order-1042", ToolCall("charge-2", "charge", {"amount": "5 EUR"}, "charge-1042")
    )

    for number in range(60):
        await cp.append(f"chat-{number:03}", [{"role": "user", "content": "hello"}])

    await _session(cp)


async def stock_hostile(cp: Any) -> None:
    """Put every hostile text into every field that a page shows."""
    for text in HOSTILE:
        short = text.replace("\x00", "")[:100]
        thread = f"evil {short}"
        await cp.append(
            thread,
            [
                {"role": text, "content": text},
                {"role": "assistant", "content": [{"type": text, "text": text}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "text": text},
                        {
                            "type": "tool_call",
                            "id": text,
                            "name": text,
                            "args": {text: text},
                        },
                        {"type": "image", "url": text},
                        {"type": "image", "media_type": "image/svg+xml", "data": text},
                    ],
                },
                {"role": "tool", "tool_call_id": text, "content": text},
                text,
            ],
            extra={text[:80]: text},
        )
        ledger = EffectLedger(cp, requires_approval=lambda effect: True)
        await _request(ledger, thread, short, {"text": text})
        await cp.record_issued(thread, ToolCall(short, short, {text: text}, thread))
        log = await SessionLog.open(cp, f"session {short}", cwd=text)
        root = await log.append_message({"role": "user", "content": text})
        await log.append_message({"role": "assistant", "content": text})
        await log.label(root, text)
        await log.set_name(text)


async def _request(ledger: EffectLedger, thread: str, tool: str, args: Any) -> None:
    """Leave an undecided request, as an agent that was killed does."""
    try:
        await ledger.begin(thread, tool, args, approval_timeout=0)
    except EffectTimeout:
        return

    raise AssertionError("the request did not wait for a decision")


async def _session(cp: Any) -> None:
    log = await SessionLog.open(cp, "session-parser", cwd="/home/anna/parser")
    await log.set_name("Fix the parser")
    await log.append_message(
        {"role": "user", "content": "The parser fails on empty input."}
    )
    await log.append_state(plan=["reproduce", "fix", "test"], budget=40)
    await log.append_message(
        {
            "role": "assistant",
            "model": "a-model",
            "provider": "a-provider",
            "content": [
                {"type": "text", "text": "I read the parser first."},
                {
                    "type": "toolCall",
                    "id": "t1",
                    "name": "read",
                    "arguments": {"path": "parser.py"},
                },
            ],
        }
    )
    fork = await log.append_message(
        {
            "role": "toolResult",
            "toolCallId": "t1",
            "toolName": "read",
            "content": [
                {"type": "text", "text": "def parse(text):\n    return text[0]"}
            ],
        }
    )
    await log.append_message(
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "Return None for empty input."}],
        }
    )
    await log.label(fork, "before the fix")
    await log.move_to(fork)
    await log.append_message({"role": "user", "content": "Raise an error instead."})
    await log.append_state(budget=25)
    await log.append_message(
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "It raises `ValueError` now."}],
        }
    )
