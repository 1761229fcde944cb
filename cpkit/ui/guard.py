"""Who may see the page, and which requests may change something.

Each request passes, in this order: the Host header (against DNS rebinding), the login,
and for a POST the origin and a token in the form (against forged requests). Each answer
carries a policy that lets the browser run and load only the page's own files.
"""

from __future__ import annotations

import hmac
import inspect
import secrets
from collections.abc import Awaitable, Callable, Collection
from hashlib import sha256
from urllib.parse import parse_qsl, urlencode, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Authorize", "Guard", "TokenLogin", "form_of"]

Authorize = Callable[[Request], "Awaitable[str | None] | str | None"]
"""Returns the name of the person who asks, or ``None`` to refuse the request."""

_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    ]
)

_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With no-referrer a browser sends "Origin: null" with the page's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_LARGEST_FORM = 64 * 1024


class Guard:
    """The ASGI middleware around every page.

    ``allowed_hosts`` are values of the Host header, with the port if there is one;
    ``None`` leaves the check to the service in front of the page.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authorize: Authorize,
        allowed_hosts: Collection[str] | None,
        secret: bytes,
    ) -> None:
        self._app = app
        self._authorize = authorize
        self._hosts = (
            None if allowed_hosts is None else {host.lower() for host in allowed_hosts}
        )
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)

                for name, value in _HEADERS.items():
                    headers[name] = value

                headers.setdefault("Cache-Control", "no-store")

            await send(message)

        request = Request(scope, receive)
        refusal = await self._refusal(request)
        app = self._app if refusal is None else refusal
        await app(scope, receive, send_with_policy)

    async def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that must not reach the page."""
        host = request.headers.get("host", "").lower()

        if self._hosts is not None and host not in self._hosts:
            return _refused(
                f"this page is not served under the host {host[:200]!r}; open the "
                "link that cpkit ui printed, or start it with --allow-host HOST",
                421,
            )

        answer = self._authorize(request)
        person = await answer if inspect.isawaitable(answer) else answer

        if person is None:
            return _refused(
                "you are not logged in: open the link with the token that cpkit ui "
                "printed in the terminal",
                403,
            )

        token = self._form_token(person)
        request.state.person = person
        request.state.form_token = token

        if request.method in ("GET", "HEAD"):
            return TokenLogin.without_token(request)

        origin = request.headers.get("origin")
        site = request.headers.get("sec-fetch-site", "same-origin")

        if (origin is not None and _host_of(origin) != host) or site != "same-origin":
            return _refused("this form was sent by another site", 403)

        request.state.form = await form_of(request)
        sent = request.state.form.get("form_token", "")

        if not hmac.compare_digest(sent.encode(), token.encode()):
            return _refused(
                "this form is not valid any more: load the page again and decide "
                "again; nothing was changed",
                403,
            )

        return None

    def _form_token(self, person: str) -> str:
        return hmac.new(self._secret, person.encode(), sha256).hexdigest()


class TokenLogin:
    """A login by a secret link: the token in the link becomes a cookie.

    The person's name is the name of the user that started the page.
    """

    def __init__(self, token: str, person: str, port: int) -> None:
        self._token = token
        self._person = person
        # Browsers share cookies between the ports of a host.
        self._cookie = f"cpkit_ui_{port}"

    def __call__(self, request: Request) -> str | None:
        if self._is_token(request.query_params.get("token", "")):
            request.state.new_cookie = (self._cookie, self._token)
            return self._person

        if self._is_token(request.cookies.get(self._cookie, "")):
            return self._person

        return None

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self._token.encode())

    @staticmethod
    def without_token(request: Request) -> Response | None:
        """Return the redirect that sets the cookie and hides the token, if due."""
        cookie = getattr(request.state, "new_cookie", None)

        if cookie is None:
            return None

        rest = [
            (name, value)
            for name, value in request.query_params.multi_items()
            if name != "token"
        ]
        path = request.scope["path"] + (f"?{urlencode(rest)}" if rest else "")
        # A path that starts with two slashes would be another host.
        response = RedirectResponse("/" + path.lstrip("/\\"), 303)
        name, value = cookie
        # Lax: a link in a chat may open the page. A form of another site may not.
        response.set_cookie(name, value, httponly=True, samesite="lax")
        return response

    @staticmethod
    def new_token() -> str:
        """Return a token that cannot be guessed."""
        return secrets.token_urlsafe(24)


def _host_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:  # for instance "http://["
        return None


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form; of a form with too much in it, none."""
    body = b""

    async for part in request.stream():
        body += part

        if len(body) > _LARGEST_FORM:
            return {}

    text = body.decode("utf-8", errors="replace")

    try:
        return dict(parse_qsl(text, keep_blank_values=True, max_num_fields=50))
    except ValueError:
        return {}


def _refused(text: str, status: int) -> Response:
    return PlainTextResponse(text + "\n", status)
