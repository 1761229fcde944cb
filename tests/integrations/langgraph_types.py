"""A type of an application, which is not on LangGraph's list."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Plan:
    text: str
