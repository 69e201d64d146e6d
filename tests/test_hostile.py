"""Hostile clients of a server: answers are tested here, times only in benchmarks/serve_hostile.py."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from PIL import Image
from small_runs import QUIET
from test_serve import (
    _few_timings,
    drawn,
    files,
    finished,
    folder,
    inside,
    listening,
    one,
    png,
    served,
    slowed,
    wait_until,
    write_run,
)

from adatape.serve import connections, decoding
from adatape.serve.app import create_app
from adatape.serve.bodies import Bodies, BodyLimit
from adatape.serve.fair import Client, Room, Shares, Turns, client_at
from adatape.serve.limits import host_name
from adatape.serve.served import ServedModel, load_served
from adatape.serve.server import TOKEN, read_token, run_server
from adatape.serve.service import Limits

A, B = Client("one", "a"), Client("two", "b")
FORM = "multipart/form-data; boundary=x"
HEAD = f"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: {FORM}\r\n"
PART = b'--x\r\ncontent-disposition: form-data; name="image"; filename="a"\r\n\r\n'


__all__ = ["_few_timings", "folder", "served"]  # fixtures, which pytest finds by name


def connected(address: str, source: str) -> socket.socket:
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    return socket.create_connection(place, timeout=120, source_address=(source, 0))


def said(peer: socket.socket) -> bytes:
    """All that the server sends until it closes."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while more := peer.recv(1 << 16):
            told += more
    return told


@contextlib.contextmanager
def hostile(address: str, each: int) -> Iterator[list[socket.socket]]:
    """So many of every kind, each kind from an address of its own."""
    large = png(Image.new("1", (3000, 3000)))
    form = httpx.Request("POST", "http://localhost/v1/classify", files=files(*[large] * 8))
    dear = f"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: {form.headers['content-type']}\r\n".encode()
    dear += f"content-length: {len(form.read())}\r\n\r\n".encode() + form.read()
    kinds = [
        b"GET /v1/model HTTP/1.1\r\nhost: loc",
        f"{HEAD}content-length: 90000\r\n\r\n".encode() + PART,
        f"{HEAD}content-length: 90000\r\n\r\n".encode() + PART.ljust(89_999, b"a"),
        dear,
        b"GET /v1/examples?count=100 HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20,
        b"",
    ]
    with contextlib.ExitStack() as stack:
        opened = []
        for kind, sent in enumerate(kinds):
            for _ in range(each):
                peer = stack.enter_context(connected(address, f"127.0.{kind + 1}.1"))
                peer.sendall(sent)
                opened.append(peer)
        yield opened


def test_good_clients_are_all_answered_beside_thirty_hostile_connections(served: ServedModel) -> None:
    app = create_app(served, limits=Limits(queue=64, bodies=400_000, body=100_000))
    with listening(app) as (address, _, _), hostile(address, each=5) as opened:
        assert len(opened) == 30
        content, statuses = files(png(drawn(0))), []
        with httpx.Client(base_url=address, timeout=60) as client:
            wait_until(lambda: app.state.service.bodies.room.used > 150_000)
            for _ in range(30):
                statuses.append(client.post("/v1/classify", files=content).status_code)
            statuses += [client.get(path).status_code for path in ("/healthz", "/readyz", "/v1/model")]
    assert statuses == [200] * 33


def test_exit_waits_for_no_unfinished_body_and_no_unread_answer(served: ServedModel) -> None:
    app = create_app(served)
    with listening(app) as (address, server, thread), hostile(address, each=2) as opened:
        server.config.timeout_graceful_shutdown = 3600  # what accepted requests are given, far more than is waited here
        wait_until(lambda: len(app.state.service.bodies.arriving) >= 4)
        server.handle_exit(signal.SIGTERM, None)
        thread.join(240)
        assert not thread.is_alive()
        assert b"503" in said(opened[2])[:20]


def asked(app: Any, chunks: list[bytes], client: str = "127.0.0.1", last: bool = False) -> tuple[int, str]:
    """An upload as ASGI messages, after which the client stays and sends nothing more."""
    told: list[Any] = []
    waiting = [{"type": "http.request", "body": chunk, "more_body": True} for chunk in chunks]
    if last:
        waiting[-1]["more_body"] = False

    async def receive() -> Any:
        return waiting.pop(0) if waiting else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        told.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/classify",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", FORM.encode())],
        "client": (client, 1),
    }
    finished(asyncio.wait_for(app(scope, receive, send), 20))
    return told[0]["status"], json.loads(told[1]["body"])["detail"]


@pytest.mark.parametrize("chunks", [[], [PART], [PART, b"a" * 500_000]], ids=["nothing", "little", "much"])
def test_a_body_that_stops_coming_is_refused_however_much_it_has_brought(
    served: ServedModel, chunks: list[bytes]
) -> None:
    app = create_app(served, limits=Limits(grace=0.1, least_rate=1000))
    status, detail = asked(app, chunks)
    assert (status, detail) == (408, "the body came in at less than 1,000 bytes a second for 0.1 s")
    assert app.state.service.bodies.room.used == 0
    assert not app.state.service.bodies.arriving


def test_unfinished_bodies_of_one_client_leave_room_for_another() -> None:
    bodies = Bodies(most=100, total=100, least_rate=1, grace=60)

    async def reads_all(_: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b'{"detail": ""}'})

    app = BodyLimit(reads_all, bodies)
    bodies.room.take(client_at("127.0.0.2"), 45)  # of bodies under way
    assert asked(app, [b"x" * 20], "127.0.0.2", last=True)[0] == 429
    assert asked(app, [b"x" * 20], "127.0.0.3", last=True)[0] == 200
    bodies.room.take(client_at("127.0.0.4"), 25)
    bodies.room.take(client_at("127.0.0.5"), 15)
    assert asked(app, [b"x" * 20], "127.0.0.3", last=True)[0] == 503
    assert bodies.room.used == 85


def test_where_many_clients_hold_all_there_is_the_greediest_gives_way(served: ServedModel) -> None:
    app = create_app(served, limits=Limits(bodies=200_000, body=100_000, grace=60))
    with listening(app) as (address, _, _), contextlib.ExitStack() as stack:
        for number in range(40):
            peer = stack.enter_context(connected(address, f"127.0.1.{number % 20 + 1}"))
            peer.sendall(f"{HEAD}content-length: 90000\r\n\r\n".encode() + PART.ljust(60_000, b"a"))
        wait_until(lambda: app.state.service.bodies.room.free < 25_000)
        large = files(png(drawn(0, (100, 100), "RGB")))
        replies = [httpx.post(f"{address}/v1/classify", files=large, timeout=120) for _ in range(10)]
    assert [reply.status_code for reply in replies] == [200] * 10


def test_where_many_clients_fill_the_queue_the_greediest_gives_way(served: ServedModel) -> None:
    app, go_on = create_app(served, limits=Limits(queue=32, requests=2)), threading.Event()
    batcher, good, statuses = app.state.service.batcher, client_at("127.0.0.1"), []
    quick = batcher.run
    batcher.run = lambda *arguments: quick(*arguments) if go_on.wait(20) else []
    form = httpx.Request("POST", "http://localhost", files=files(png(drawn(0))))
    request = f"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: {form.headers['content-type']}\r\n"
    request += f"content-length: {len(form.read())}\r\n\r\n"

    def ask(address: str) -> None:
        content = files(png(drawn(1)))
        statuses.append(httpx.post(f"{address}/v1/classify", files=content, timeout=120).status_code)

    with listening(app) as (address, _, _), contextlib.ExitStack() as stack:
        for number in range(60):
            peer = stack.enter_context(connected(address, f"127.0.1.{number % 12 + 1}"))
            peer.sendall(request.encode() + form.read())
        wait_until(lambda: batcher.room.free <= 2)
        asking = [threading.Thread(target=ask, args=(address,)) for _ in range(2)]
        for each in asking:
            each.start()
        wait_until(lambda: batcher.room.held(good) == 2 or bool(statuses))
        go_on.set()
        for each in asking:
            each.join(120)
    assert statuses == [200, 200]


def test_whatever_is_taken_there_is_always_something_left_for_another_client() -> None:
    draws = random.Random(0)
    for _ in range(50):
        room, clients = Room(draws.randint(1, 200)), [Client("n", str(n)) for n in range(draws.randint(1, 8))]
        held = [(client, 1) for _ in range(300) if room.take(client := draws.choice(clients))]
        assert room.used == len(held) <= room.total
        if room.total >= 2 ** len(clients):
            assert room.take(Client("n", "new"))
            room.give(Client("n", "new"))
        for client, amount in held:
            room.give(client, amount)
        assert (room.used, room.free) == (0, room.total)


def test_who_asks_for_more_gets_no_more_than_the_others_and_absence_earns_nothing() -> None:
    shares, greedy, served = Shares(), Client("one", "a"), []
    for _ in range(100):
        shares.charge(greedy)
    for _ in range(60):
        client = shares.least([greedy, B])
        shares.charge(client)
        served.append(client)
    assert served[:20].count(B) in (10, 11)
    assert served.count(B) in (30, 31)


def test_many_addresses_of_one_network_count_as_one() -> None:
    shares, many = Shares(), [Client("one", str(n)) for n in range(50)]
    served = []
    for _ in range(100):
        client = shares.least([*many, B])
        shares.charge(client)
        served.append(client)
    assert served.count(B) == 50
    assert len(set(served)) == 51  # and within the network all had their turn


def test_turns_are_taken_in_order_of_what_each_client_has_had_and_are_given_back_when_cancelled() -> None:
    async def work() -> list[str]:
        turns, order = Turns(1), []

        async def one_turn(client: Client) -> None:
            async with turns.turn(client):
                order.append(client.address)
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(one_turn(client)) for client in (A, A, A, A, B, B)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert turns.room.used == 0
        await one_turn(A)
        return order

    assert finished(work()) == ["a", "b", "a", "b", "a", "a"]


def test_clients_are_addresses_in_their_networks() -> None:
    assert client_at("127.0.1.7") == client_at("::ffff:127.0.1.7") == Client("127.0.1.0/24", "127.0.1.7/32")
    assert client_at("2001:db8:1:2::3") == Client("2001:db8:1::/48", "2001:db8:1:2::/64")
    assert client_at("fe80::1%eth0").address == "fe80::/64"
    assert client_at("testclient") == Client("testclient", "testclient")


def test_pixels_of_a_request_are_added_up_before_any_large_image_is_decoded(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    monkeypatch.setattr(decoding, "picture", lambda _, name, *__: decoded.append(name))
    large = png(Image.new("1", (6300, 6300)))
    reply = one(create_app(served), "POST", "/v1/classify", files=files(*[large] * 32))
    assert reply.status_code == 422
    detail = "the images have 119,070,000 pixels or more together; at most 100,000,000 are decoded for a request"
    assert (reply.json()["detail"], decoded) == (detail, [])


def test_small_images_are_answered_while_large_ones_wait(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    app, go_on = create_app(served), threading.Event()
    real, large = decoding.picture, png(Image.new("1", (1100, 1100)))

    def waits(opened: Image.Image, *rest: Any) -> Any:
        if opened.size == (1100, 1100):
            assert go_on.wait(20)
        return real(opened, *rest)

    monkeypatch.setattr(decoding, "picture", waits)

    async def work(client: httpx.AsyncClient) -> list[int]:
        dear = [asyncio.create_task(client.post("/v1/classify", files=files(large))) for _ in range(8)]
        small = [(await client.post("/v1/classify", files=files(png(drawn(0))))).status_code for _ in range(5)]
        assert not any(task.done() for task in dear)
        go_on.set()
        return small + [(await task).status_code for task in dear]

    assert inside(app, work) == [200] * 13


def test_an_upload_is_opened_once(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, real = [], Image.open
    monkeypatch.setattr(Image, "open", lambda *given, **named: opened.append(given) or real(*given, **named))
    contents = [png(drawn(0)), png(Image.new("1", (1100, 1100)))]
    assert one(create_app(served), "POST", "/v1/classify", files=files(*contents)).status_code == 200
    assert len(opened) == 2


def test_large_images_of_a_client_that_has_gone_are_not_decoded(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, decoded = create_app(served), []
    monkeypatch.setattr(decoding, "picture", lambda _, name, *__: decoded.append(name))
    file = decoding.File("a", png(Image.new("1", (1100, 1100))))

    async def gone() -> bool:
        return True

    with pytest.raises(Exception, match="400"):
        finished(app.state.service.decoders.pictures([file], A, gone))
    assert decoded == []


def test_one_clients_samples_leave_room_in_the_queue_for_anothers(served: ServedModel) -> None:
    app = create_app(served, limits=Limits(queue=8, batch=1))
    slowed(app, 0.05)
    content = png(drawn(0))
    with listening(app) as (address, _, _), contextlib.ExitStack() as stack:
        form = httpx.Request("POST", f"{address}/v1/classify", files=files(content))
        request = f"POST /v1/classify HTTP/1.1\r\nhost: localhost\r\ncontent-type: {form.headers['content-type']}\r\n"
        request += f"content-length: {len(form.read())}\r\n\r\n"
        for _ in range(12):
            stack.enter_context(connected(address, "127.0.1.1")).sendall(request.encode() + form.read())
        wait_until(lambda: app.state.service.batcher.depth >= 4)
        assert httpx.post(f"{address}/v1/classify", files=files(content), timeout=120).status_code == 200


@pytest.mark.parametrize("kind", ["queue", "bodies", "model"])
def test_readiness_tells_what_is_exhausted_and_liveness_stays(served: ServedModel, kind: str) -> None:
    app = create_app(served, token="s3cret")
    service = app.state.service

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        before = await client.get("/readyz")
        match kind:
            case "queue":
                service.batcher.room.used = 256
            case "bodies":
                service.bodies.room.used = 250_000_000
            case "model":
                service.batcher.running_since = -1e9
        return [before, await client.get("/readyz"), await client.get("/healthz")]

    try:
        before, ready, health = inside_without_end(app, work)
    finally:
        service.batcher.room.used = service.bodies.room.used = 0
    assert [before.status_code, ready.status_code, health.status_code] == [200, 503, 200]
    reason = {"queue": "queue of 256 is full", "bodies": "250,000,000 of 256,000,000", "model": "not answered for 30 s"}
    assert reason[kind] in ready.json()["status"]


def inside_without_end(app: FastAPI, work: Any) -> Any:
    """Without the application's end, which waits until its queue is empty."""

    async def run() -> Any:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await work(client)

    return finished(run())


@pytest.mark.parametrize("charset", ["undefined", "idna", "base64", "nonsense", "utf-16", "\x7f"])
def test_an_unknown_charset_is_refused_as_such(served: ServedModel, charset: str) -> None:
    form = httpx.Request("POST", "http://localhost", files=files(png(drawn(0))), data={"steps": "1"})
    kind = form.headers["content-type"]
    app = create_app(served)
    refused = one(
        app, "POST", "/v1/classify", content=form.read(), headers={"content-type": f"{kind}; charset={charset}"}
    )
    assert (refused.status_code, "charset is" in refused.json()["detail"]) == (415, True)


@pytest.mark.parametrize("charset", ["utf-8", "UTF-8", '"utf-8"', "iso-8859-1"])
def test_ordinary_charsets_are_taken(served: ServedModel, charset: str) -> None:
    form = httpx.Request("POST", "http://localhost", files=files(png(drawn(0))))
    kind = {"content-type": f"{form.headers['content-type']}; charset={charset}"}
    assert one(create_app(served), "POST", "/v1/classify", content=form.read(), headers=kind).status_code == 200


def test_every_answer_tells_a_browser_to_keep_it_to_this_page(served: ServedModel) -> None:
    app = create_app(served, token="s3cret", limits=Limits(body=1000))

    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    app.state.service.batcher.run = fails

    async def work(client: httpx.AsyncClient) -> list[httpx.Response]:
        token = {"authorization": "Bearer s3cret"}
        return [
            await client.get("/"),
            await client.get("/nowhere", headers=token),
            await client.get("/v1/model"),
            await client.get("/v1/model", headers={"host": "evil.example"}),
            await client.post("/v1/classify", headers=token, content=b"x" * 2000),
            await client.post("/v1/classify", headers=token, files=files(png(drawn(0)))),
        ]

    replies = inside(app, work)
    assert [reply.status_code for reply in replies] == [200, 404, 401, 421, 413, 500]
    for reply in replies:
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("model.example:443", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("8.8.8.8", 421),
        ("localhost:x", 400),
        ("::1", 400),
        ("", 400),
    ],
)
def test_only_known_names_are_answered(served: ServedModel, given: str, status: int) -> None:
    app = create_app(served, hosts={"model.example"})
    assert one(app, "GET", "/healthz", headers={"host": given}).status_code == status


def test_a_host_header_is_taken_apart() -> None:
    cases = {"a.b:1": "a.b", "A.": "a", "[::1]": "::1", "[::1]:9": "::1", "1.2.3.4": "1.2.3.4", "a:b:c": "", ":80": ""}
    assert {given: host_name(given) for given in cases} == cases


def test_a_token_comes_from_a_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    assert read_token(None) is None
    monkeypatch.setenv(TOKEN, "of the environment")
    assert read_token(None) == "of the environment"
    (tmp_path / "token").write_text("s3cret\n")
    assert read_token(tmp_path / "token") == "s3cret"
    (tmp_path / "token").write_bytes(os.urandom(5000))
    with pytest.raises(ValueError, match=r"token has more than 4,096 bytes"):
        read_token(tmp_path / "token")
    with pytest.raises(OSError, match="nowhere"):
        read_token(tmp_path / "nowhere")
    for bad in ("", " ", "a\nb", "é"):
        with pytest.raises(ValueError, match="token is empty or not printable ASCII"):
            run_server(None, token=bad, port=0)


def test_nothing_beyond_this_machine_is_bound_without_a_token() -> None:
    for host in ("0.0.0.0", "::"):
        with pytest.raises(
            ValueError, match=f"host is '{host}', which other machines can reach, and there is no token"
        ):
            run_server(None, host, 0)
    environment = {name: value for name, value in QUIET.items() if name != TOKEN}
    command = [sys.executable, "-m", "adatape", "serve", "--host", "0.0.0.0", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "there is no token; give one with --token-file or in ADATAPE_TOKEN" in done.stderr


def test_headers_that_do_not_end_and_answers_that_are_not_read_end_the_connection(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HEADERS", "WRITING", "IDLE", "SWEEP"):
        monkeypatch.setattr(connections, name, 0.1)
    with listening(create_app(served)) as (address, server, _):
        with connected(address, "127.0.0.2") as slow, connected(address, "127.0.0.2") as silent:
            slow.sendall(b"GET /healthz HTTP/1.1\r\nhost: loc")
            assert said(slow).startswith(b"HTTP/1.1 408")
            assert said(silent) == b""
        with connected(address, "127.0.0.3") as deaf, contextlib.suppress(OSError):
            deaf.settimeout(5)
            while server.connections.open or not server.connections.room.used:
                deaf.sendall(b"GET /v1/examples?count=100 HTTP/1.1\r\nhost: localhost\r\n\r\n" * 50)
        wait_until(lambda: not server.connections.open)
        assert httpx.get(f"{address}/healthz").status_code == 200


def test_connections_beyond_a_clients_share_are_told_so_and_others_come_in(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HELD", 0.05)
    with listening(create_app(served)) as (address, server, _), contextlib.ExitStack() as stack:
        server.connections.most_of_one = 3
        peers = [stack.enter_context(connected(address, "127.0.0.2")) for _ in range(5)]
        assert [said(peer)[:12] for peer in peers[3:]] == [b"HTTP/1.1 429"] * 2
        assert httpx.get(f"{address}/healthz").status_code == 200
        peers[0].close()
        wait_until(lambda: server.connections.room.held(client_at("127.0.0.2")) == 2)


class Loop:
    """An event loop whose time stands still until it is moved."""

    def __init__(self) -> None:
        self.now, self.soon, self.later = 0.0, [], []

    def time(self) -> float:
        return self.now

    def call_soon(self, function: Any, *arguments: Any) -> None:
        self.soon.append((function, arguments))

    def call_later(self, after: float, function: Any, *arguments: Any) -> None:
        self.later.append((self.now + after, function, arguments))

    def turn(self) -> None:
        due = [each for each in self.later if each[0] <= self.now]
        self.later = [each for each in self.later if each[0] > self.now]
        ready, self.soon = self.soon + [each[1:] for each in due], []
        for function, arguments in ready:
            function(*arguments)


class Peer:
    """A connection that always has something to say."""

    unread = 100

    def __init__(self, shared: connections.Connections, loop: Loop, address: str, read: list[Peer]) -> None:
        self.shared, self.loop, self.who, self.read, self.asks = shared, loop, client_at(address), read, False
        assert shared.enter(self)

    def says(self) -> None:
        self.asks = True
        if self.shared.may_read(self, self.unread):
            self.read.append(self)
        self.asks = False

    def read_on(self) -> None:
        assert not self.asks, "called back before it has kept what it could not read yet"
        self.read.append(self)


def crowd_and_few(monkeypatch: pytest.MonkeyPatch) -> tuple[Loop, list[Peer], list[Peer], list[Peer]]:
    """More connections of one network than are few, and two of another; the server is busy all the time."""
    loop, read = Loop(), []
    shared = connections.Connections()
    monkeypatch.setattr(connections.time, "process_time", lambda: loop.now)
    many = [Peer(shared, loop, f"127.0.1.{n % 4 + 1}", read) for n in range(connections.CROWD + 1)]
    few = [Peer(shared, loop, "127.0.0.1", read) for _ in range(2)]
    loop.later.clear()  # the look at all connections, which these are not made for
    return loop, many, few, read


def test_a_crowd_alone_is_read_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, many, _, read = crowd_and_few(monkeypatch)
    loop.now = 100.0
    for each in many:
        each.says()
    for _ in many:
        loop.turn()
    assert sorted(read, key=id) == sorted(many, key=id)


def test_a_crowd_waits_while_others_ask_and_they_never_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, many, few, read = crowd_and_few(monkeypatch)
    loop.now = 100.0
    for each in many:
        each.says()
    asked = 0
    for step in range(200):
        loop.now += 0.001
        loop.turn()
        if step % 10 == 0:
            before = len(read)
            few[0].says()
            loop.turn()
            asked += 1
            assert few[0] in read[before:]
    of_crowd = [each for each in read if each in many]
    assert read.count(few[0]) == asked
    assert 0.2 / connections.LONGEST_WAIT - 2 <= len(of_crowd) <= 0.2 / connections.LONGEST_WAIT + 2


def test_whoever_waits_is_called_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, many, few, read = crowd_and_few(monkeypatch)
    draws, expected = random.Random(0), []
    for _ in range(2000):
        loop.now += draws.choice([0.0, 0.001, 0.05])
        peer = draws.choice([*many, *few])
        if expected.count(peer) == read.count(peer):  # a connection is paused while it waits
            expected.append(peer)
            peer.says()
        loop.turn()
    for _ in range(200):
        loop.now += 0.02
        loop.turn()
    assert sorted(map(id, read)) == sorted(map(id, expected))


def test_a_request_that_comes_byte_by_byte_is_answered(served: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SHORT_WAIT", 0.001)
    with listening(create_app(served)) as (address, _, _), connected(address, "127.0.0.2") as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n":
            peer.sendall(bytes([byte]))
        assert said(peer).startswith(b"HTTP/1.1 200")


def test_there_are_never_more_connections_than_files_that_may_be_opened() -> None:
    code = "import resource as r; from adatape.serve.server import most_connections as most;"
    code += "r.setrlimit(r.RLIMIT_NOFILE, (512, 1024)); print(most(), r.getrlimit(r.RLIMIT_NOFILE))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=QUIET, check=True)
    assert done.stdout == "768 (1024, 1024)\n"


def test_requests_sent_at_once_are_answered_in_order(served: ServedModel) -> None:
    with listening(create_app(served)) as (address, _, _), connected(address, "127.0.0.2") as peer:
        paths = ["/healthz", "/nowhere", "/v1/model"] * 4
        for path in paths:
            peer.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        peer.sendall(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        told = said(peer)
    assert [int(each[1:4]) for each in told.split(b"HTTP/1.1")[1:]] == [200, 404, 200] * 4 + [200]


def test_what_is_not_http_is_answered_in_one_line(served: ServedModel) -> None:
    with listening(create_app(served)) as (address, _, _), connected(address, "127.0.0.2") as peer:
        peer.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        told = said(peer)
    assert told.startswith(b"HTTP/1.1 400")
    assert b"nosniff" in told


def test_a_sequence_of_megabytes_is_not_parsed(tmp_path: Path) -> None:
    app = create_app(load_served(write_run(tmp_path / "run", "parity adatape")))
    reply = one(app, "POST", "/v1/parity", content=io.BytesIO(b'{"symbols": [' + b"1," * 100_000 + b"1]}").read())
    assert (reply.status_code, "for 8 symbols at most 1,152 are read" in reply.json()["detail"]) == (413, True)
