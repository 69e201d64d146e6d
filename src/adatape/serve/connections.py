"""Connections below the application: how many there are, whose turn it is to be read, and which have taken too long."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from adatape.serve.fair import LOCAL, Client, Room, Shares, client_at
from adatape.serve.limits import SAFE

MOST, MOST_OF_ONE = 4096, 128  # connections of all, and of one address
HEADERS = 10  # seconds from a request's first byte to the end of its headers
IDLE = 30  # seconds that a silent connection is kept
WRITING = 10  # seconds that a client may leave its answer unread
LEAVING = 1  # the same, once the server shuts down
AT_ONCE = 1 << 16  # bytes that are read in one turn
READ = 8192  # bytes that cost as much as another request
CROWD = 32  # connections of one network above which it waits for networks with fewer
SHARE = 0.5  # of one core: how busy the server may be with what crowds ask, while others ask too
CONTENDED = 0.2  # seconds that a crowd stays bound to it after others have asked
LONGEST_WAIT = 0.02  # seconds between two reads of crowds, however little time is left for them
SHORT_WAIT, MOST_SHORT_WAIT = 0.01, 0.25  # seconds, for each read in a row that brought little and ended no request
SWEEP = 0.5  # seconds between two looks at all connections
HELD = 1.0  # seconds before a connection too many is told so: who comes again at once would cost more than it gets


class Connections:
    """What the connections of one server share. One read of one connection is handled in each turn of the event loop.

    A read that has to wait leaves its connection unread, so that a client who sends more than its share is slowed
    down by TCP and costs nothing; whoever has been read least goes first. While anyone else asks, networks with a
    crowd of connections are read only as fast as leaves the process idle half of the time: an answer takes some twenty
    turns of the loop and many more of Python's lock, and would otherwise wait for a read of the crowd at each.
    """

    def __init__(self, most: int = MOST) -> None:
        self.room, self.most_of_one = Room(most), MOST_OF_ONE
        self.draining = False
        self.open: set[Connection] = set()
        self._shares = Shares()
        self._waiting: dict[Client, deque[Connection]] = {}
        self._networks: Counter[str] = Counter()
        self._busy = self._sweeping = self._delayed = False
        self._others_until = self._crowd_read_at = self._crowd_read_cpu = 0.0

    def enter(self, connection: Connection) -> bool:
        held = self.room.held(connection.who)
        if held >= self.most_of_one or not (self.room.take(connection.who) or self._make_room(connection.who)):
            return False
        self.open.add(connection)
        self._networks[connection.who.network] += 1
        if not self._sweeping:
            self._sweeping = True
            connection.loop.call_later(SWEEP, self._sweep, connection.loop)
        return True

    def _make_room(self, client: Client) -> bool:
        """Closes a connection without a request, of whoever has most of them, for a client with fewer."""
        greediest = self.room.greediest()
        if self.room.held(client) + 1 < self.room.held(greediest):
            for other in self.open:
                if other.who == greediest and other.unused():
                    self.leave(other)
                    other.transport.abort()
                    return self.room.take(client)
        return False

    def leave(self, connection: Connection) -> None:
        if connection in self.open:
            self.open.discard(connection)
            self.room.give(connection.who)
            self._networks[connection.who.network] -= 1
            if not self._networks[connection.who.network]:
                del self._networks[connection.who.network]

    def may_read(self, connection: Connection, size: int) -> bool:
        """Whether this turn of the loop is free; where not, the connection is called back in its turn."""
        crowded = self._is_crowd(connection.who)
        wait = self._crowd_wait(connection.loop) if crowded else 0.0
        if not self._busy and wait <= 0 and not (crowded and self._waiting):
            self._take_turn(connection, size)
            return True
        self._waiting.setdefault(connection.who, deque()).append(connection)
        if not self._busy:
            self._delay(connection.loop, wait)
        return False

    def _is_crowd(self, client: Client) -> bool:
        return self._networks[client.network] > CROWD

    def _crowd_wait(self, loop: asyncio.AbstractEventLoop) -> float:
        """Seconds until a crowd may be read, by how busy the process has been since it last was."""
        now = loop.time()
        if now > self._others_until:
            return 0.0
        spent = time.process_time() - self._crowd_read_cpu
        return self._crowd_read_at + min(spent / SHARE, LONGEST_WAIT) - now

    def _take_turn(self, connection: Connection, size: int) -> None:
        self._busy = True
        self._shares.charge(connection.who, 1 + size / READ)
        if self._is_crowd(connection.who):
            self._crowd_read_at, self._crowd_read_cpu = connection.loop.time(), time.process_time()
        else:
            self._others_until = connection.loop.time() + CONTENDED
        connection.loop.call_soon(self._turn_ended, connection.loop)

    def _turn_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        self._busy = False
        self._next_turn(loop)

    def _delay(self, loop: asyncio.AbstractEventLoop, wait: float) -> None:
        if not self._delayed:
            self._delayed = True
            loop.call_later(max(wait, 0.0), self._delay_ended, loop)

    def _delay_ended(self, loop: asyncio.AbstractEventLoop) -> None:
        self._delayed = False
        self._next_turn(loop)

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting and not self._busy:
            few = [client for client in self._waiting if not self._is_crowd(client)]
            if not few and (wait := self._crowd_wait(loop)) > 0:
                self._delay(loop, wait)
                return
            client = self._shares.least(few or self._waiting)
            connection = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            if connection in self.open:
                self._take_turn(connection, connection.unread)
                connection.read_on()

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for connection in list(self.open):
            connection.look(now)
        self._sweeping = bool(self.open)
        if self._sweeping:
            loop.call_later(SWEEP, self._sweep, loop)


class Connection(H11Protocol):
    """uvicorn's, which reads in its turn and is closed when it takes too long."""

    def __init__(self, shared: Connections, **given: Any) -> None:
        super().__init__(**given)
        self.shared = shared
        self.who = LOCAL
        self._unread = bytearray()
        self._queued = self._pipelined = False
        self._short = 0
        self._silent_since = self.loop.time()
        self._headers_since: float | None = None
        self._unwritten_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own would read, and the loop then handle, 256 kB at once
            transport.max_size = AT_ONCE
        self.who = client_at(self.client[0]) if self.client else LOCAL
        if not self.shared.enter(self):
            transport.pause_reading()
            self.loop.call_later(HELD, self._refuse, 429, "too many connections of yours; try again")

    def connection_lost(self, exc: Exception | None) -> None:
        self.shared.leave(self)
        self._unread.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._headers_since is None and not self._asked():
            self._headers_since = self.loop.time()
        if self._queued or not self._has_turn(len(data)):
            self._unread += data
            self.transport.pause_reading()
        else:
            self._read(data)
            self._wait_if_short(len(data))

    @property
    def unread(self) -> int:
        return len(self._unread)

    def read_on(self) -> None:
        """Its turn has come."""
        data = bytes(self._unread)
        self._unread.clear()
        self._queued = False
        self._read(data)
        if not self._wait_if_short(len(data)):
            self._resume()

    def _wait_if_short(self, size: int) -> bool:
        """Whether reading pauses: who sends a request byte by byte is read seldom, and then all that came meanwhile."""
        ended = self._asked() and not self.cycle.more_body
        self._short = 0 if ended or size >= READ else self._short + 1
        if self._short <= 2:
            return False
        self.transport.pause_reading()
        self.loop.call_later(min(SHORT_WAIT * self._short, MOST_SHORT_WAIT), self._resume)
        return True

    def _resume(self) -> None:
        if not self._queued and not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def on_response_complete(self) -> None:
        self._silent_since, self._headers_since = self.loop.time(), None
        self._pipelined = self.flow.read_paused
        super().on_response_complete()

    def handle_events(self) -> None:
        """Requests that came along with the one just answered take turns like any other."""
        if self._pipelined:
            self._pipelined = False
            if not self._has_turn(0):
                self.transport.pause_reading()
                return
        super().handle_events()

    def pause_writing(self) -> None:
        self._unwritten_since = self.loop.time()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unwritten_since = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg)

    def look(self, now: float) -> None:
        """Closes a connection whose client neither asks, nor goes on asking, nor takes its answer."""
        if self._stalled(now):
            self.transport.abort()
        elif self.transport.is_closing() or self._asked() or self._queued:
            return
        elif self._headers_since is not None:
            if now - self._headers_since > HEADERS:
                self._refuse(408, f"the request's headers took more than {HEADERS} s")
        elif now - self._silent_since > IDLE:
            self.transport.close()

    def _has_turn(self, size: int) -> bool:
        self._queued = not self.shared.may_read(self, size)
        return not self._queued

    def _read(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        if data:
            self.conn.receive_data(data)
        self.handle_events()
        if self._asked():
            self._headers_since = None

    def unused(self) -> bool:
        return not self._asked() and not self._queued

    def _asked(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _stalled(self, now: float) -> bool:
        if self.transport.is_closing() and self._unwritten_since is None and self.transport.get_write_buffer_size():
            self._unwritten_since = now
        patience = LEAVING if self.shared.draining else WRITING
        return self._unwritten_since is not None and now - self._unwritten_since > patience

    def _refuse(self, status: int, reason: str) -> None:
        """Answered without the application, which knows nothing of this connection yet."""
        if self.transport.is_closing():
            return
        body = json.dumps({"detail": reason}).encode()
        headers = [*SAFE, (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = h11.Response(status_code=status, headers=[*headers, (b"connection", b"close")])
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
