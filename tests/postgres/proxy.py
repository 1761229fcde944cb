"""The suite's relay, in front of the server of a URL."""

from __future__ import annotations

from urllib.parse import urlsplit

from conformance.proxy import Fault
from conformance.proxy import Proxy as Relay

__all__ = ["Proxy"]


class Proxy(Relay):
    """A relay to the server of a URL, open while its context is."""

    def __init__(self, server_url: str) -> None:
        place = urlsplit(server_url)
        super().__init__(place.hostname or "127.0.0.1", place.port or 5432)
        self._server_url = server_url

    @property
    def url(self) -> str:
        port = urlsplit(self._server_url).port
        return self._server_url.replace(f":{port}", f":{self.port}")

    def lose_answer(self) -> None:
        """Cut the connection in place of the next answer."""
        self.lose(Fault("answer", "cut"), trip=0)
