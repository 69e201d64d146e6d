"""A run served over HTTP until the process is told to stop."""

from __future__ import annotations

import gc
import ipaddress
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from adatape.config import Budget
from adatape.evaluate.device import pick_device
from adatape.evaluate.result import Result
from adatape.serve.app import create_app
from adatape.serve.connections import IDLE, MOST, Connection, Connections
from adatape.serve.served import load_served
from adatape.serve.service import Limits, Service

GRACE = 30  # seconds to answer what was accepted
BACKLOG = 2048  # connections that wait in the kernel
ACCEPTED = 4  # connections that are accepted in one turn of the event loop
SWITCH = 0.0005  # seconds that a thread of the model or a decoder may keep the event loop waiting; a tenth of Python's
UNREAD = UNSENT = 1 << 17  # bytes that the kernel keeps of a connection each way; its own choice goes up to megabytes
GARBAGE = (20_000, 20, 100)  # objects between collections: each goes through all connections, which are many
MOST_TOKEN = 4096
OTHER_FILES = 256  # open files that are no connections
TOKEN = "ADATAPE_TOKEN"


class Server(uvicorn.Server):
    """uvicorn's, which refuses new work as soon as it is told to stop, and then ends as a command does."""

    def __init__(self, app: FastAPI) -> None:
        self.connections = Connections(most_connections())
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, self.connections),  # type: ignore[arg-type]
                ws="none",
                log_level="error",  # anyone can cause a warning, as often as they like
                access_log=False,
                server_header=False,
                proxy_headers=False,  # anyone on this machine could pass for someone else
                backlog=ACCEPTED,
                timeout_keep_alive=IDLE,
                timeout_graceful_shutdown=GRACE,
            )
        )
        self.service: Service = app.state.service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            each.listen(BACKLOG)  # asyncio takes one number for both, and would accept 2,048 before anything else

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stop()
        self.connections.draining = True
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Not the parent's, which would raise the signal anew once all is answered."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self.service.batcher.refuse()


@dataclass(frozen=True)
class Started(Result):
    """A server that is about to answer."""

    name: str
    device: str
    address: str
    latency: dict[int | None, float]
    """milliseconds for one sample by budget"""
    default: Budget | None
    """of requests that name none: the one stored in the run, else the trained one"""


@dataclass(frozen=True)
class Served(Result):
    """What a server has done until it was stopped."""

    name: str
    address: str
    latency_ms: dict[str, float]
    samples: int
    batches: int


def run_server(
    folder: Path | None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    queue: int = 256,
    batch: int = 32,
    device: str = "auto",
    hosts: Collection[str] = (),
    trust: bool = False,
    on_start: Callable[[Started], None] = lambda _: None,
) -> Served:
    """Serves a run, or without one the street scenes of the package, until SIGINT or SIGTERM."""
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ValueError("token is empty or not printable ASCII; a header could not carry it")
    # Beyond the trained threshold is each request's own choice, and a text for each would fill the registry.
    warnings.filterwarnings("ignore", message=r".*the model was built, and perhaps trained")
    sys.setswitchinterval(SWITCH)
    with _bound(host, port, token is not None) as listening:
        served, limits = load_served(folder, trust), Limits(queue=queue, batch=batch)
        app = create_app(served, device=pick_device(device), token=token, limits=limits, hosts={host, *hosts})
        address = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}"
        thresholds = gc.get_threshold()
        gc.set_threshold(*GARBAGE)
        gc.collect()
        gc.freeze()  # a full collection would otherwise go through all that was imported, and stop the server meanwhile
        listening.listen(BACKLOG)  # who comes as soon as the address is printed waits, and is not refused
        service: Service = app.state.service
        about = service.served.name, str(service.engine.device), address, dict(service.latency)
        on_start(Started(*about, default=service.engine.default))
        try:
            Server(app).run(sockets=[listening])
        finally:
            gc.unfreeze()
            gc.set_threshold(*thresholds)
    latency = {str(steps): ms for steps, ms in service.latency.items()}
    return Served(service.served.name, address, latency, int(service.samples), int(service.batches))


def read_token(file: Path | None) -> str | None:
    """From a file or the environment: what stands on a command line is shown to every user of the machine."""
    if file is None:
        return os.environ.get(TOKEN)
    with file.open("rb") as source:
        content = source.read(MOST_TOKEN + 1)
    if len(content) > MOST_TOKEN:
        raise ValueError(f"{file} has more than {MOST_TOKEN:,} bytes; it must hold a token and nothing else")
    return content.decode("latin-1").strip()


def _bound(host: str, port: int, guarded: bool) -> socket.socket:
    if not 0 <= port <= 65535:
        raise ValueError(f"port is {port}; it must be 0 (any that is free) to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"host is {host!r}; it is no address of this machine: {error.strerror}") from error
    family, kind, protocol, _, place = found[0]
    if not (guarded or _is_loopback(str(place[0]))):
        wanted = f"give one with --token-file or in {TOKEN}"
        raise ValueError(f"host is {host!r}, which other machines can reach, and there is no token; {wanted}")
    # With its protocol named, asyncio sends at once; without, each answer would wait 40 ms for the client's receipt.
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, UNREAD)  # each connection's is like it
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNSENT)
        listening.bind(place)
    except OSError as error:
        listening.close()
        raise OSError(f"port {port} of {host} cannot be had: {error.strerror}; choose another --port") from error
    return listening


def _is_loopback(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def most_connections() -> int:
    """As many as the system lets a process open: asyncio stops accepting for a second where one cannot be opened."""
    try:
        import resource
    except ImportError:  # no Unix
        return MOST
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return MOST if soft == resource.RLIM_INFINITY else min(MOST, max(soft - OTHER_FILES, 1))
