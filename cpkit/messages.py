"""Ready-made message types, for those who have none of their own.

Open a store with ``message_type=cpkit.messages.Message`` and it takes and returns
these models; they are told apart by ``role``, content blocks by ``type``. Unknown
fields are kept, so what a newer program wrote passes through an older one.
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
    """A model that keeps the fields it does not know."""

    # JSON has no infinity: a field that holds one is refused, never turned to null.
    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class TextBlock(_Open):
    """Text that is shown."""

    type: Literal["text"] = "text"
    text: str


class ReasoningBlock(_Open):
    """The model's thinking; ``signature`` is the provider's, to be passed back."""

    type: Literal["reasoning"] = "reasoning"
    text: str
    signature: str | None = None


class ToolCallBlock(_Open):
    """A call that the model asks for; ``id`` is the model's and may repeat."""

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
    """What the user said."""

    role: Literal["user"] = "user"


class AssistantMessage(_Message):
    """What the model said, thought and asked for."""

    role: Literal["assistant"] = "assistant"
    model: str | None = None


class ToolResultMessage(_Message):
    """What a tool answered to the call of that id."""

    role: Literal["tool"] = "tool"
    tool_call_id: str
    tool_name: str | None = None
    is_error: bool = False


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolResultMessage,
    Field(discriminator="role"),
]
