"""The saver's own serializer: LangGraph's, without pickle and without imports.

LangGraph's default serializer imports and calls any class that stored data names. This
one loads a class of the application only if the graph's schema or the caller allows it,
or if it is a class of data that the application has imported already: a pydantic model,
a dataclass, a named tuple, an enum, or a class derived from a plain value. With
``LANGGRAPH_STRICT_MSGPACK`` the second rule does not apply.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import is_dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any
from uuid import UUID

from langgraph.checkpoint.serde.event_hooks import (
    SerdeEvent,
    register_serde_event_listener,
)
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.store.base import Item
from pydantic import SecretBytes, SecretStr

from cpkit.integrations.langgraph.errors import TypeRefused

__all__ = ["DefaultSerializer"]

Name = tuple[str, ...]

_DATA = (
    *(Enum, set, frozenset, deque, date, time, timedelta),
    *(Decimal, UUID, Path, SecretStr, SecretBytes, Item),
)
"""Libraries derive classes from these: asyncpg has a UUID of its own, for instance."""

_blocked: ContextVar[set[Name] | None] = ContextVar("_blocked", default=None)


class DefaultSerializer(JsonPlusSerializer):
    """Loads the types that are allowed; raises ``TypeRefused`` for others."""

    def __init__(self, allowed: frozenset[Name] = frozenset()) -> None:
        super().__init__(
            pickle_fallback=False, allowed_msgpack_modules=tuple(allowed) or None
        )
        self._allowed = allowed
        strict = os.getenv("LANGGRAPH_STRICT_MSGPACK", "")
        self._is_strict = strict.lower() in ("1", "true", "yes")
        self._wider: DefaultSerializer = self

    def with_msgpack_allowlist(
        self, extra_allowlist: Iterable[Name | type]
    ) -> DefaultSerializer:
        """Return a serializer that allows these types too."""
        names = {
            (one.__module__, one.__name__) if isinstance(one, type) else tuple(one)
            for one in extra_allowlist
        }
        return (
            self if names <= self._allowed else DefaultSerializer(self._allowed | names)
        )

    def loads_typed(self, data: tuple[str, bytes]) -> Any:
        """Load a value; raises ``TypeRefused`` if it has a type that is not allowed."""
        while True:
            blocked: set[Name] = set()
            token = _blocked.set(blocked)

            try:
                value = super(DefaultSerializer, self._wider).loads_typed(data)
            finally:
                _blocked.reset(token)

            if not blocked:
                return value

            for name in sorted(blocked):
                if self._is_strict or not _is_loaded_data(*name):
                    raise TypeRefused(".".join(name))

            self._wider = self._wider.with_msgpack_allowlist(blocked)


def _is_loaded_data(module: str, name: str) -> bool:
    """Return whether the application has this class of data, without importing it."""
    if module not in sys.modules:
        return False

    # LangGraph loads plain data if the module does not have the name.
    found = getattr(sys.modules[module], name, None)
    return found is None or (
        isinstance(found, type)
        and (
            is_dataclass(found)
            or issubclass(found, _DATA)
            or hasattr(found, "model_validate")
            or hasattr(found, "parse_obj")
            or (hasattr(found, "_asdict") and hasattr(found, "_fields"))
        )
    )


def _note(event: SerdeEvent) -> None:
    blocked = _blocked.get()

    if blocked is not None and event["kind"] == "msgpack_blocked":
        blocked.add((event["module"], event["name"]))


def _must_be_reported(record: logging.LogRecord) -> bool:
    """Drop LangGraph's warning where this serializer loads the type or raises."""
    return _blocked.get() is None or "Blocked" not in str(record.msg)


register_serde_event_listener(_note)
logging.getLogger("langgraph.checkpoint.serde.jsonplus").addFilter(_must_be_reported)
