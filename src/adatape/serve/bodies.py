"""Bodies as they arrive: how large, how fast, and how much of all together is kept. Plain ASGI, so chunks are seen."""

from __future__ import annotations

import asyncio
import random

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from adatape.serve.fair import Client, Room, client_of
from adatape.serve.limits import CLOSE, RETRY, header, refuse

DISCARDED = 8  # times the limit that is read and thrown away, so that a client hears the reason and not a reset
REST = 256_000  # bytes that are read for the same reason where there is no room: more would be what the refusal spares


class Refused(Exception):  # noqa: N818
    """Why a body is not read to its end, and how many bytes more are read before its sender is told."""

    def __init__(self, status: int, reason: str, *headers: tuple[bytes, bytes], discarded: int = 0) -> None:
        self.status, self.reason, self.headers, self.discarded = status, reason, list(headers), discarded


class Bodies:
    """What is kept of all bodies: at most `most` bytes of one, `total` of all, none slower than `least_rate`."""

    def __init__(self, most: int, total: int, least_rate: float, grace: float) -> None:
        self.most, self.least_rate, self.grace = most, least_rate, grace
        self.room = Room(total)
        self.stopped = False
        self.arriving: set[_Body] = set()

    def make_room(self, client: Client, size: int) -> bool:
        """Gives up the largest unfinished body of whoever holds most, unless that is no more than the client would."""
        kept = [body for body in self.arriving if body.kept]
        if not kept:
            return False
        largest = max(kept, key=lambda body: (self.room.held(body.client), body.kept))
        if self.room.held(client) + size >= self.room.held(largest.client):
            return False
        largest.give_up()
        return True

    def stop(self) -> None:
        """Ends every body that has not arrived in full; those who sent them are told."""
        self.stopped = True
        for body in self.arriving:
            body.interrupt()


class BodyLimit:
    """Gives the application no more of a body than `bodies` allows, and answers for it where that is too much."""

    def __init__(self, app: ASGIApp, bodies: Bodies) -> None:
        self.app, self.bodies = app, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = _Body(receive, client_of(scope), self.bodies)
        announced = header(scope, b"content-length")
        try:
            body.check_size(int(announced) if announced.isdigit() else 0)
            await self.app(scope, body.receive, send)
        except Refused as refused:
            await body.discard(refused.discarded)
            await refuse(send, refused.status, refused.reason, refused.headers)
        finally:
            body.forget()


class _Body:
    """One request's body. Its patience is in seconds: waiting spends it, bytes earn it back up to the grace period."""

    def __init__(self, receive: Receive, client: Client, bodies: Bodies) -> None:
        self._receive, self.client, self.bodies = receive, client, bodies
        self.size, self.kept, self.ended, self.given_up = 0, 0, False, False
        # Bodies that came together must not all end in the same moment: answering them would hold up the others.
        self._patience = self._grace = bodies.grace * random.uniform(1, 1.5)
        self._timeout: asyncio.Timeout | None = None
        self._alone = not bodies.room.held(client)
        bodies.arriving.add(self)

    def check_size(self, size: int) -> None:
        most = self.bodies.most
        if size > most:
            raise Refused(413, f"the body is over {most:,} bytes, which is the limit", discarded=most * DISCARDED)

    async def receive(self) -> Message:
        message = await self._next()
        size = len(message.get("body", b""))
        self.size += size
        self.check_size(self.size)
        while not self.bodies.room.take(self.client, size):
            if not self.bodies.make_room(self.client, size):
                raise self._too_much()
        self.kept += size
        return message

    async def discard(self, most: int) -> None:
        """Reads on without keeping; never past the end, where nothing would come any more."""
        self._give_back()
        self.given_up = False
        try:
            while not self.ended and most > 0:
                most -= len((await self._next()).get("body", b""))
        except Refused:
            return

    def give_up(self) -> None:
        self._give_back()
        self.given_up = True
        self.interrupt()

    def interrupt(self) -> None:
        if self._timeout is not None:
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def forget(self) -> None:
        self._give_back()
        self.bodies.arriving.discard(self)

    def _give_back(self) -> None:
        self.bodies.room.give(self.client, self.kept)
        self.kept = 0

    def _check(self) -> None:
        if self.bodies.stopped:
            raise Refused(503, "the server is shutting down", RETRY, CLOSE)
        if self.given_up:
            raise self._too_much()

    def _too_much(self) -> Refused:
        """All bodies together are over the limit, or those of one client over what is left for the others."""
        own = self.given_up or not self._alone
        status, whose = (429, "too many uploads of yours") if own else (503, "too many uploads")
        return Refused(status, f"{whose} at once; try again", RETRY, CLOSE, discarded=REST)

    async def _next(self) -> Message:
        if self.ended:  # what comes next is that the client leaves, for which it has all the time
            return await self._receive()
        self._check()
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._patience) as self._timeout:
                message = await self._receive()
        except TimeoutError as error:
            self._check()
            least = f"less than {self.bodies.least_rate:,.0f} bytes a second for {self.bodies.grace:g} s"
            raise Refused(408, f"the body came in at {least}", CLOSE) from error
        finally:
            self._timeout = None
        waited = asyncio.get_running_loop().time() - began
        earned = len(message.get("body", b"")) / self.bodies.least_rate
        self._patience = min(self._grace, self._patience - waited + earned)
        self.ended = not message.get("more_body", False)
        if self.ended:
            self.bodies.arriving.discard(self)
        return message
