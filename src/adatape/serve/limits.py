"""What surrounds the application: who may ask, and how much they may send. Plain ASGI, so that chunks are seen."""

from __future__ import annotations

import hmac
import json
from collections.abc import Collection

from starlette.types import ASGIApp, Message, Receive, Scope, Send

DISCARDED = 8  # times the limit that is read and thrown away, so that a client hears the reason and not a reset


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


class BodyLimit:
    """Refuses bodies over `most` bytes, announced or counted, and more than `held` bytes of all requests together."""

    def __init__(self, app: ASGIApp, most: int, held: int) -> None:
        self.app, self.most, self.held = app, most, held
        self.now = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(receive, self)
        announced = header(scope, b"content-length")
        try:
            if announced.isdigit() and int(announced) > self.most:
                raise TooLarge
            await self.app(scope, body.receive, send)
        except TooLarge:
            await body.discard(self.most * DISCARDED)
            await refuse(send, 413, f"the body is over {self.most:,} bytes, which is the limit")
        except TooMuch:
            await body.discard(self.most)
            await refuse(send, 503, "too many uploads at once; try again", [(b"retry-after", b"1")])
        finally:
            self.now -= body.counted


class _Body:
    """One request's body as it arrives."""

    def __init__(self, receive: Receive, limit: BodyLimit) -> None:
        self._receive, self.limit = receive, limit
        self.counted, self.ended = 0, False

    async def receive(self) -> Message:
        message = await self._receive()
        size = len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        self.counted += size
        self.limit.now += size
        if self.counted > self.limit.most:
            raise TooLarge
        if self.limit.now > self.limit.held:
            raise TooMuch
        return message

    async def discard(self, most: int) -> None:
        """Reads on without keeping; never past the end, where nothing would come any more."""
        while not self.ended and most > 0:
            message = await self._receive()
            self.ended = not message.get("more_body", False)
            most -= len(message.get("body", b""))


class TooLarge(Exception):  # noqa: N818
    """One body is over the limit."""


class TooMuch(Exception):  # noqa: N818
    """All bodies together are."""


def header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


async def refuse(send: Send, status: int, detail: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    body = json.dumps({"detail": detail}, ensure_ascii=False).encode()
    shared = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": shared + (headers or [])})
    await send({"type": "http.response.body", "body": body})
