"""What is scarce, shared among clients: the next turn goes to who had least, and nobody takes what others need."""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import NamedTuple

from starlette.types import Scope

REMEMBERED = 4096  # names whose use is kept before those that no longer matter are dropped


class Client(NamedTuple):
    """Who asks. One machine may have many addresses, so that turns are shared among networks first."""

    network: str
    address: str


LOCAL = Client("", "")


@lru_cache(REMEMBERED)
def client_at(address: str) -> Client:
    """IPv4 by address in its /24; IPv6 by /64, which is one household, in its /48."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return Client(address, address)
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped:
        ip = ip.ipv4_mapped
    wide, narrow = (24, 32) if ip.version == 4 else (48, 64)
    network, own = (str(ipaddress.ip_network((ip, prefix), strict=False)) for prefix in (wide, narrow))
    return Client(network, own)


def client_of(scope: Scope) -> Client:
    return client_at(scope["client"][0]) if scope.get("client") else LOCAL


class Room:
    """An amount for all. A client may hold no more than is left free: one can take half, another half of the rest."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._held: Counter[Client] = Counter()

    @property
    def free(self) -> int:
        return self.total - self.used

    def held(self, client: Client) -> int:
        return self._held.get(client, 0)

    def greediest(self) -> Client:
        """Who holds most; what a client with less needs is taken from there."""
        return max(self._held, key=self._held.__getitem__, default=LOCAL)

    def fits(self, client: Client, amount: int = 1) -> bool:
        return self.held(client) + amount <= self.free

    def take(self, client: Client, amount: int = 1) -> bool:
        if not self.fits(client, amount):
            return False
        self._held[client] += amount
        self.used += amount
        return True

    def give(self, client: Client, amount: int = 1) -> None:
        self.used -= amount
        self._held[client] -= amount
        if not self._held[client]:
            del self._held[client]


class _Level:
    """Use by name. Who was away is counted as having had what the last one served had: absence earns nothing."""

    def __init__(self) -> None:
        self.used: dict[str, float] = {}
        self.floor = 0.0

    def of(self, name: str) -> float:
        return max(self.used.get(name, 0.0), self.floor)

    def charge(self, name: str, cost: float) -> None:
        self.floor = self.of(name)
        self.used[name] = self.floor + cost
        if len(self.used) > REMEMBERED:
            self.used = {each: used for each, used in self.used.items() if used > self.floor}


class Shares:
    """Ranks clients by what they have had: the least first, by network and within it by address."""

    def __init__(self) -> None:
        self._networks = _Level()
        self._addresses: dict[str, _Level] = {}

    def rank(self, client: Client) -> tuple[float, float]:
        within = self._addresses.get(client.network)
        return self._networks.of(client.network), within.of(client.address) if within else 0.0

    def least(self, clients: Iterable[Client]) -> Client:
        return min(clients, key=self.rank)

    def charge(self, client: Client, cost: float = 1.0) -> None:
        """Counts what the client that came first is given."""
        self._networks.charge(client.network, cost)
        self._addresses.setdefault(client.network, _Level()).charge(client.address, cost)
        if len(self._addresses) > REMEMBERED:
            self._addresses = {name: self._addresses[name] for name in self._networks.used if name in self._addresses}


class Turns:
    """So many at once, of each network as many as `Room` allows; the others wait, who has had least goes next."""

    def __init__(self, total: int) -> None:
        self.room = Room(total)
        self._shares = Shares()
        self._waiting: dict[Client, deque[tuple[asyncio.Future[None], float]]] = {}

    @asynccontextmanager
    async def turn(self, client: Client, cost: float = 1.0) -> AsyncIterator[None]:
        grant: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append((grant, cost))
        self._wake()
        try:
            await grant
            yield
        finally:
            if grant.done() and not grant.cancelled() and grant.exception() is None:  # else it was never granted
                self.room.give(_network(client))
                self._wake()

    def drop(self, client: Client, error: Exception) -> bool:
        """Ends the wait of the client's last request with an error; False where none waits."""
        waiting = [grant for grant, _ in self._waiting.get(client, ()) if not grant.done()]
        if waiting:
            waiting[-1].set_exception(error)
        return bool(waiting)

    def _wake(self) -> None:
        while fitting := [client for client in self._waiting if self.room.fits(_network(client))]:
            client = self._shares.least(fitting)
            grant, cost = self._waiting[client].popleft()
            if not self._waiting[client]:
                del self._waiting[client]
            if not grant.done():  # done: its request was cancelled
                self.room.take(_network(client))
                self._shares.charge(client, cost)
                grant.set_result(None)


def _network(client: Client) -> Client:
    return Client(client.network, "")
