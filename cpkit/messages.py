"""Message types for programs that do not define their own.

A store that is opened with ``message_type=cpkit.messages.Message`` takes and returns
these models. ``role`` selects the class of a message, and ``type`` that of a content
block. Unknown fields are kept, so an older program does not drop the fields of a
newer one.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

__all__ = [
    "AssistantMessage",
    "ContentBlock",
    "ImageBlock",
    "Message",
    "ReasoningBlock",
    "SystemMessage",
    "TextBlock",
    "ToolCallBlock",
    "ToolResultMessage",
    "UserMessage",
]


class _Open(BaseModel):
    """A model that keeps unknown fields."""

    # JSON has no infinity. pydantic would store it as null.
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class TextBlock(_Open):
    """Visible text."""

    type: Literal["text"] = "text"
    text: str


class ReasoningBlock(_Open):
    """The model's thinking; pass ``signature`` back to the provider."""

    type: Literal["reasoning"] = "reasoning"
    text: str
    signature: str | None = None


class ToolCallBlock(_Open):
    """A call that the model requests; the model chooses ``id`` and may repeat it."""

    type: Literal["tool_call"] = "tool_call"
    id: str
    name: str
    args: dict[str, JsonValue] = Field(default_factory=dict)


class ImageBlock(_Open):
    """An image: base64 ``data`` of ``media_type``, or a ``url``."""

    type: Literal["image"] = "image"
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


ContentBlock = Annotated[
    TextBlock | ReasoningBlock | ToolCallBlock | ImageBlock,
    Field(discriminator="type"),
]


class _Message(_Open):
    content: str | list[ContentBlock]
    metadata: dict[str, JsonValue] = Field(default_factory=dict)


class SystemMessage(_Message):
    """Instructions to the model."""

    role: Literal["system"] = "system"


class UserMessage(_Message):
    """A message of the user."""

    role: Literal["user"] = "user"


class AssistantMessage(_Message):
    """A message of the model: its text, its thinking and its tool calls."""

    role: Literal["assistant"] = "assistant"
    model: str | None = None


class ToolResultMessage(_Message):
    """The result of the tool call with this id."""

    role: Literal["tool"] = "tool"
    tool_call_id: str
    tool_name: str | None = None
    is_error: bool = False


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolResultMessage,
    Field(discriminator="role"),
]
