"""A sample of every part that pydantic-ai has, with its optional fields given."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, get_args

from pydantic_ai import messages as m

FILE: dict[str, Any] = {"vendor_metadata": {"a": 1}, "identifier": "invoice-7"}
URL: dict[str, Any] = {
    "url": "https://example.org/download",
    "force_download": True,
    **FILE,
}
MODEL: dict[str, Any] = {
    "id": "id-1",
    "provider_name": "p",
    "provider_details": {"b": [1.5]},
}
IMAGE = m.BinaryContent(bytes(range(256)), media_type="image/png", **FILE)
SOUND = m.BinaryContent(b"wav", media_type="audio/wav", identifier="sound-1")
CONTENTS: list[Any] = [
    "text",
    m.TextContent("text", metadata={"c": 1}),
    m.StructuredContent({"d": 1}, tag="state", description="what it is"),
    m.ImageUrl(media_type="image/webp", **URL),
    m.AudioUrl(media_type="audio/mpeg", **URL),
    m.VideoUrl(media_type="video/mp4", **URL),
    m.DocumentUrl(media_type="application/pdf", **URL),
    m.DocumentUrl(url="https://example.org/of-unknown-type"),
    IMAGE,
    m.UploadedFile("file-1", "openai", media_type="text/csv", **FILE),
    m.CachePoint(ttl="1h"),
]
ERRORS: list[Any] = [
    {"type": "missing", "loc": ("a", 0), "msg": "required", "input": {"x": 1}}
]
CALL: dict[str, Any] = {"args": {"queries": ["a"]}, "tool_call_id": "call-1", **MODEL}
FOUND: dict[str, Any] = {
    "content": {"discovered_tools": [{"name": "look", "description": "d"}]}
}
RETURN: dict[str, Any] = {
    "tool_call_id": "call-1",
    "metadata": {"e": 1},
    "outcome": "failed",
}
NATIVE: dict[str, Any] = {**RETURN, "provider_name": "p", "provider_details": {"f": 1}}
OWN_ID = m.InstructionId(m.ToolsetInstructionSource("weather"), name="limits")

REQUEST: list[Any] = [
    m.SystemPromptPart("be kind", dynamic_ref="ref", context_id="c", metadata={"g": 1}),
    m.UserPromptPart(CONTENTS),
    m.SpeechPart(
        speaker="user",
        transcript="hi",
        audio=SOUND,
        interrupted_at_ms=5,
        timestamps=[m.SpeechTimestamp(text="hi", start_ms=0, duration_ms=5)],
        **MODEL,
    ),
    m.ToolSearchReturnPart(**FOUND, **RETURN),
    m.LoadCapabilityReturnPart(content={"instructions": "use it"}, **RETURN),
    m.ToolReturnPart(
        "look",
        {"files": CONTENTS[3:10], "text": [1, None]},
        **RETURN,
        retry=m.RetryInfo("model_retry", attempt=1, max_retries=2),
    ),
    m.RetryFeedbackPart(ERRORS, retry=m.RetryInfo("validation_error", attempt=1)),
    m.ToolAvailabilityDeltaPart(tools_added=["look"], tool_call_id="call-1"),
    m.CapabilityLoadDeltaPart(loaded=["search"], tool_call_id="call-1"),
    m.ModelSettingsDeltaPart(settings={"thinking": "low"}, top_level=True),
    m.InstructionDeltaPart(id=OWN_ID, content="new", base_hash="h"),
    m.InstructionBaselinePart(
        instructions=[m.InstructionPart("be brief", dynamic=True, id=OWN_ID)]
    ),
    m.CompactionPart("summary", metadata={"h": 1}),
]
RESPONSE: list[Any] = [
    m.TextPart(
        "let me see",
        citations=[
            m.Citation(
                [
                    m.WebCitationSource("https://example.org", excerpts=["e"]),
                    m.DocumentCitationSource(document_id="d", title="t"),
                ],
                anchor=m.ContentCitationAnchor(start=0, end=3),
            )
        ],
        **MODEL,
    ),
    m.ToolSearchCallPart(**CALL),
    m.LoadCapabilityCallPart(args='{"id":"search"}', tool_call_id="call-1"),
    m.ToolCallPart("look", {"deep": [1, 2.5, None, "é"]}, "call-1", **MODEL),
    m.NativeToolSearchCallPart(**CALL),
    m.NativeToolCallPart("web", '{"as": "text"}', "call-2", **MODEL),
    m.NativeToolSearchReturnPart(**FOUND, **NATIVE),
    m.NativeToolReturnPart("web", {"file": CONTENTS[6]}, **NATIVE),
    m.ThinkingPart("hm", signature="sig", **MODEL),
    m.CompactionPart("summary", **MODEL),
    m.FilePart(IMAGE, **MODEL),
    m.SpeechPart(speaker="assistant", audio=SOUND),
]
MESSAGES: list[m.ModelMessage] = [
    m.ModelRequest(REQUEST, instructions="be brief", run_id="run-1", metadata={"i": 1}),
    m.ModelResponse(RESPONSE, model_name="model", finish_reason="tool_call"),
]


def kinds_without_sample() -> set[str]:
    """Return the names of pydantic-ai's parts and contents that no sample has."""
    samples = {type(one) for one in [*REQUEST, *RESPONSE, *CONTENTS]}
    unions = (m.ModelRequestPart, m.ModelResponsePart, m.UserContent)
    # A RetryPromptPart is deprecated and loads as one of the two newer parts.
    return {
        kind.__name__
        for union in unions
        for kind in _members(union)
        if kind not in samples and kind is not m.RetryPromptPart
    }


def _members(union: Any) -> list[type]:
    if isinstance(union, type) and is_dataclass(union):
        return [union]

    return [kind for part in get_args(union) for kind in _members(part)]
