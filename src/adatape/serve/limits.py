"""What surrounds the application: who may ask, under which name, and what a browser may do with the answer."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY, CLOSE = (b"retry-after", b"1"), (b"connection", b"close")
# The page loads its own scripts and styles, shows images as data: URLs, and talks to this server alone.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SAFE = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]


class SafeHeaders:
    """Adds to every answer what keeps a browser from using it in another place."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def adding(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", []), *SAFE]}
            await send(message)

        await self.app(scope, receive, adding)


class Hosts:
    """Answers under known names only, so that no web page reaches the server by a name of its own (DNS rebinding).

    Known are loopback, the address that the connection came in on, and `names`.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self.app, self.names = app, {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = header(scope, b"host").decode("latin-1")
        name = host_name(given)
        if not name:
            await refuse(send, 400, f"the Host header is {given[:80]!r}; it must name this server")
        elif name in self.names or self._is_own(name, scope):
            await self.app(scope, receive, send)
        else:
            await refuse(send, 421, f"the Host header is {given[:80]!r}, which is no name of this server")

    @staticmethod
    def _is_own(name: str, scope: Scope) -> bool:
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or name == (scope.get("server") or ("",))[0]


def host_name(given: str) -> str:
    """Of a Host header, without its port and the brackets of IPv6; empty where it is none."""
    name, colon, port = given.rpartition(":")
    if not colon or given.endswith("]"):
        name, port = given, ""
    bracketed = name.startswith("[") and name.endswith("]")
    bad = (":" in name and not bracketed) or (port and not port.isdigit())
    return "" if bad else name.strip("[]").rstrip(".").lower()


class Token:
    """Asks for a bearer token everywhere but on open paths."""

    def __init__(self, app: ASGIApp, token: str, open_paths: Collection[str]) -> None:
        self.app, self.wanted, self.open_paths = app, f"Bearer {token}".encode(), open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self.open_paths or self._known(scope):
            await self.app(scope, receive, send)
        else:
            headers = [(b"www-authenticate", b"Bearer")]
            await refuse(send, 401, "this server asks for its token: Authorization: Bearer …", headers)

    def _known(self, scope: Scope) -> bool:
        return hmac.compare_digest(header(scope, b"authorization"), self.wanted)


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


async def refuse(send: Send, status: int, detail: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = json.dumps({"detail": detail}, ensure_ascii=False).encode()
    shared = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": shared + (headers or [])})
    await send({"type": "http.response.body", "body": body})
