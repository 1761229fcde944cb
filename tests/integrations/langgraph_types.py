"""A type of an application, which LangGraph does not know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Plan:
    text: str
