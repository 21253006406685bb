"""The web page's requests: a page without secrets, and behind a token what it shows. WSGI; called in threads.

It answers only to addresses of this machine, so that no other site's page can have a browser ask it (DNS rebinding).
A token is taken from one header alone, which a browser never sends by itself.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from http import HTTPStatus
from importlib import resources
from typing import Any, Final

import structlog

from mig_agent.core.errors import RefusedError
from mig_agent.daemon.httpserver import BEGIN_STREAM
from mig_agent.daemon.web.access import Access
from mig_agent.daemon.web.feed import Feed
from mig_agent.engine.callers import Role

PAGE, EVENTS, USAGE = "/", "/api/v1/events", "/api/v1/usage"
_METHODS = ("GET", "HEAD")
_LOOPBACK = re.compile(r"(?:localhost|127(?:\.[0-9]{1,3}){3}|\[::1\])(?::([0-9]{1,5}))?", re.ASCII | re.IGNORECASE)
"""Hosts that name this machine, and no name that somebody else could have resolved to it. Any port: a tunnel may begin
at another one."""
_PORTS = range(1, 65536)
_BEARER = re.compile(r"Bearer ([0-9a-f]{64})", re.ASCII)
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)
_RETRY_SECONDS = "10"
_HEADERS: Final = (
    ("Server", "mig-agent"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
_TEXT, _JSON, _HTML, _STREAM = "text/plain", "application/json", "text/html", "text/event-stream"
_UNAUTHORIZED = (
    "cannot show this without a valid token\n"
    "send the header `Authorization: Bearer TOKEN`, with the token from the file beside the agent's socket"
)

Start = Callable[[str, list[tuple[str, str]]], object]

_log = structlog.get_logger(__name__)


class _CannotAnswerError(Exception):
    """A request that gets a message in place of what it asked for."""

    def __init__(self, status: HTTPStatus, message: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class WebApplication:
    """Answers requests; it reads, and changes nothing."""

    def __init__(self, access: Access, feed: Feed) -> None:
        self._access = access
        self._feed = feed
        self._page = (resources.files(__package__) / "page.html").read_bytes()
        self._policy = content_policy(self._page)

    def __call__(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """Answer one request."""
        try:
            return self._answer(environ, start)
        except _CannotAnswerError as error:
            failure = error
        except RefusedError as error:
            failure = _CannotAnswerError(HTTPStatus.SERVICE_UNAVAILABLE, error.refusal.message)
        except TimeoutError:
            failure = _CannotAnswerError(
                HTTPStatus.SERVICE_UNAVAILABLE, "cannot answer in time: the agent is busy; try again later"
            )
        except Exception:  # noqa: BLE001 -- the reader gets a message, the log gets the traceback
            _log.exception("a request of the web page failed unexpectedly", path=str(environ.get("PATH_INFO"))[:80])
            failure = _CannotAnswerError(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "cannot answer: the agent failed in a way that it did not expect; its log tells more",
            )
        return self._send(
            start,
            _TEXT,
            f"{failure}\n".encode(),
            status=failure.status,
            headers=failure.headers,
            body=environ.get("REQUEST_METHOD") != "HEAD",
        )

    def has_token(self, authorization: str) -> bool:
        """Return True if a header Authorization has a valid token."""
        return self._role_of(authorization) is not None

    def _answer(self, environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        """Answer one request. Raises _CannotAnswerError, RefusedError and TimeoutError."""
        method, path = environ.get("REQUEST_METHOD", ""), environ.get("PATH_INFO", "")
        host = _LOOPBACK.fullmatch(environ.get("HTTP_HOST", ""))
        if host is None:
            raise _CannotAnswerError(
                HTTPStatus.FORBIDDEN,
                "cannot answer under this name: use 127.0.0.1, localhost or [::1] (through `ssh -L` from elsewhere)",
            )
        if host[1] is not None and int(host[1]) not in _PORTS:
            raise _CannotAnswerError(
                HTTPStatus.BAD_REQUEST,
                f"cannot understand the header Host: ports are from {_PORTS[0]} to {_PORTS[-1]}",
            )
        if method not in _METHODS:
            allowed = ("Allow", ", ".join(_METHODS))
            raise _CannotAnswerError(
                HTTPStatus.METHOD_NOT_ALLOWED, "cannot do that here: the page is for reading", (allowed,)
            )
        if path not in {PAGE, EVENTS, USAGE}:
            raise _CannotAnswerError(HTTPStatus.NOT_FOUND, f"cannot find that: there are {PAGE}, {EVENTS} and {USAGE}")
        body = method != "HEAD"
        if path == PAGE:
            return self._send(start, _HTML, self._page, body=body)
        role = self._role(environ)
        if path == EVENTS:
            return self._stream(environ, start, role) if body else self._stream_head(start)
        return self._send(start, _JSON, self._feed.account(role), body=body)

    def _role(self, environ: dict[str, Any]) -> Role:
        role = self._role_of(environ.get("HTTP_AUTHORIZATION", ""))
        if role is None:
            raise _CannotAnswerError(HTTPStatus.UNAUTHORIZED, _UNAUTHORIZED, (("WWW-Authenticate", "Bearer"),))
        return role

    def _role_of(self, authorization: str) -> Role | None:
        given = _BEARER.fullmatch(authorization)
        return None if given is None else self._access.role(given[1])

    def _stream(self, environ: dict[str, Any], start: Start, role: Role) -> Iterable[bytes]:
        stream = self._feed.stream(role)
        if stream is None:
            raise _CannotAnswerError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "cannot follow: as many pages are open as there may be; close others, or try again later",
                (("Retry-After", _RETRY_SECONDS),),
            )
        try:
            environ[BEGIN_STREAM]()
            self._stream_head(start)
        except BaseException:
            stream.close()
            raise
        return stream

    def _stream_head(self, start: Start) -> Iterable[bytes]:
        start("200 OK", [("Content-Type", f"{_STREAM}; charset=utf-8"), *self._headers()])
        return ()

    def _send(
        self,
        start: Start,
        kind: str,
        content: bytes,
        *,
        status: HTTPStatus = HTTPStatus.OK,
        headers: Sequence[tuple[str, str]] = (),
        body: bool = True,
    ) -> Iterable[bytes]:
        """Send an answer; without its body for HEAD."""
        size = [("Content-Type", f"{kind}; charset=utf-8"), ("Content-Length", str(len(content)))]
        start(f"{status.value} {status.phrase}", [*size, *headers, *self._headers()])
        return (content,) if body else ()

    def _headers(self) -> list[tuple[str, str]]:
        return [*_HEADERS, ("Content-Security-Policy", self._policy)]


def content_policy(page: bytes) -> str:
    """Return the Content-Security-Policy: nothing but the page's own script and style, and requests to the agent."""
    hashes: dict[str, str] = {}
    for kind, text in _INLINE.findall(page):
        hashes[kind.decode()] = base64.b64encode(hashlib.sha256(text).digest()).decode()
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src 'sha256-{hashes['script']}'",
            f"style-src 'sha256-{hashes['style']}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
