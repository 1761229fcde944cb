"""What a run reports to OpenTelemetry and to the log."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from conformance.slowdown import slowdown
from cpkit import JsonValue, open_checkpointer
from cpkit.effects import EffectFailed, tracing
from cpkit.effects.attempts import Heartbeat
from tests.effects.shop import Shop, quick

ARGS: dict[str, JsonValue] = {"card": "visa 4242"}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Collect the spans of this test; the global provider can be set only once."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    monkeypatch.setattr(tracing, "_has_sdk", lambda: True)
    yield spans
    provider.shutdown()


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


async def test_a_run_is_a_span_with_the_genai_attributes(
    exporter: InMemorySpanExporter,
) -> None:
    """Fresh, replayed and failed runs differ, and no span contains arguments."""
    async with open_checkpointer("memory://") as cp:
        ledger = quick(cp)

        for _ in range(2):
            await ledger.run("t", "pay", ARGS, Shop().charge, tool_call_id="call_0")

        bad = Shop(ValueError("visa 4242 refused"))

        with pytest.raises(ValueError, match="refused"):
            await ledger.run("t", "fail", ARGS, bad.charge)

        with pytest.raises(EffectFailed):
            await ledger.run("t", "fail", ARGS, bad.charge)

    fresh, replay, failed, again = exporter.get_finished_spans()
    assert fresh.name == "execute_tool pay"
    assert fresh.attributes is not None
    assert dict(fresh.attributes) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "pay",
        "gen_ai.tool.call.id": "call_0",
        "gen_ai.conversation.id": "t",
        "cpkit.effect.key": ledger.key("t", "pay", ARGS),
    }
    assert events(fresh) == ["cpkit.effect.claimed", "cpkit.effect.recorded"]
    assert replay.attributes is not None
    assert replay.attributes["cpkit.effect.replayed"] is True
    assert events(replay) == ["cpkit.effect.replayed"]
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "ValueError"
    assert not failed.status.is_ok
    assert again.attributes is not None
    assert again.attributes["error.type"] == "ValueError"
    assert not any(
        "visa 4242" in str(span.to_json()) for span in (fresh, replay, failed)
    )


async def test_takeovers_and_superseded_attempts_are_span_events(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two runs has its own event."""
    shop = Shop("late", gate=asyncio.Event())

    async with open_checkpointer("memory://") as cp:
        # No heartbeat comes before the takeover, so the holder seems paused.
        monkeypatch.setattr(Heartbeat, "start", lambda *_: True)
        slow = asyncio.create_task(
            quick(cp, stale_after=0.05 * slowdown()).run("t", "pay", ARGS, shop.charge)
        )
        await shop.began.wait()
        other = Shop("first")
        await quick(cp, stale_after=0.05 * slowdown()).run(
            "t", "pay", ARGS, other.charge
        )
        assert shop.gate is not None
        shop.gate.set()
        assert await slow == "first"

    taker, superseded = exporter.get_finished_spans()
    assert "cpkit.effect.taken_over" in events(taker)
    assert "cpkit.effect.superseded" in events(superseded)


async def test_the_log_has_the_same_steps(caplog: pytest.LogCaptureFixture) -> None:
    """Ordinary steps are at DEBUG, with tool, key and thread, without arguments."""
    async with open_checkpointer("memory://") as cp:
        with caplog.at_level(logging.DEBUG, "cpkit.effects"):
            await quick(cp).run("t", "pay", ARGS, Shop().charge)

    assert "in thread 't': claimed, attempt=1" in caplog.text
    assert "recorded, attempt=1, status=completed" in caplog.text
    assert "visa 4242" not in caplog.text


def test_opentelemetry_is_optional() -> None:
    """A ledger works without OpenTelemetry."""
    code = """
import asyncio, sys
sys.modules["opentelemetry"] = None
from cpkit import open_checkpointer
from cpkit.effects import EffectLedger

async def main():
    async with open_checkpointer("memory://") as cp:
        print(await EffectLedger(cp).run("t", "pay", {}, lambda effect: 7))

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr
