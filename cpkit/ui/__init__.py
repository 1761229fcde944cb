"""The page of a store: threads, conversations, calls, and what waits for a person.

`app` is an ASGI application to mount behind the login of a service. ``cpkit ui`` serves
it on localhost. Needs ``pip install 'cpkit[ui]'``.
"""

from __future__ import annotations

from cpkit.registry import needs_extra

with needs_extra("cpkit.ui", "ui"):
    from cpkit.ui.asgi import app

__all__ = ["app"]
