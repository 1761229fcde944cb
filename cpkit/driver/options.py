"""The options that every driver has."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

__all__ = ["MAX_APPEND", "MAX_PAYLOAD", "DriverOptions", "ServerOptions"]

MAX_PAYLOAD = 16 * 1024 * 1024
MAX_APPEND = 64 * 1024 * 1024


class DriverOptions(BaseModel):
    """What every driver can be told, in the URL's query or by keyword.

    A driver adds its own by a subclass. ``max_payload`` (bytes of JSON) bounds one
    message, extra value, args or result; ``max_append`` (bytes of JSON) bounds one
    append with its extra, and one ``save_extra``. ``strict_roundtrip`` refuses typed
    messages that would come back different. ``poll`` is how many seconds a watched
    thread's change can stay unnoticed where its notification is lost. Without
    ``notify`` the handle neither sends nor receives notifications: a watch only polls.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_payload: PositiveInt = MAX_PAYLOAD
    max_append: PositiveInt = MAX_APPEND
    strict_roundtrip: bool = False
    poll: float = Field(default=1.0, gt=0, le=86_400)
    notify: bool = True


class ServerOptions(DriverOptions):
    """The options of a driver that talks to a server, in seconds.

    ``timeout`` limits every operation with its retries. ``connect_timeout`` is for how
    long an operation retries while the server cannot be reached.
    """

    timeout: float = Field(default=30.0, gt=0, le=86_400)
    connect_timeout: float = Field(default=10.0, gt=0, le=86_400)
