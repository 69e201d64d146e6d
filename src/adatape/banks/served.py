"""An index on another process or machine: a small HTTP server of one index folder, and the client of it.

Arrays travel as .npy and .npz without pickled objects. There is no authentication: serve inside a trusted network.
"""

from __future__ import annotations

import http.client
import io
import json
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from jaxtyping import Float32, Int64, Shaped
from numpy import ndarray

from adatape.banks.index import IndexFolder, parse_facts

BIGGEST = 64 * 2**20  # bytes of a request
SECONDS = 60.0  # that a request may take


class ServedIndex:
    """The client of an index server, with the methods of `IndexFolder`."""

    def __init__(self, address: str) -> None:
        self.name = address
        self.host, self.port = host_and_port(address)
        self.facts = parse_facts(self._ask("GET", "/facts").decode(), address)

    def search(
        self, query: Float32[ndarray, "n h"], count: int, least: int, probes: int | None
    ) -> tuple[Float32[ndarray, "n m"], Int64[ndarray, "n m"]]:
        given = f"/search?count={count}&least={least}&probes={probes or 0}"
        found = np.load(io.BytesIO(self._ask("POST", given, _packed(query))), allow_pickle=False)
        return found["scores"], found["rows"]

    def search_above(self, query: Float32[ndarray, "1 h"], floor: float) -> Int64[ndarray, " m"]:
        return _unpacked(self._ask("POST", f"/above?floor={floor!r}", _packed(query)))

    def take(self, rows: Int64[ndarray, " n"]) -> Shaped[ndarray, "n d"]:
        return _unpacked(self._ask("POST", "/take", _packed(rows)))

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=SECONDS)
        try:
            connection.request(method, path, body)
            answer = connection.getresponse()
            said = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise ConnectionError(f"the index server {self.name} does not answer: {error}") from error
        finally:
            connection.close()
        if answer.status != 200:
            raise ConnectionError(f"the index server {self.name} refuses {path}: {said.decode(errors='replace')}")
        return said


def host_and_port(address: str) -> tuple[str, int]:
    wrong = f"address is {address!r}; it must be like http://127.0.0.1:8700"
    try:
        at = urlsplit(address)
        port = at.port or 80
    except ValueError as error:
        raise ValueError(f"{wrong}: {error}") from error
    if at.scheme != "http" or not at.hostname or at.path not in ("", "/"):
        raise ValueError(wrong)
    return at.hostname, port


def index_server(folder: str | Path, host: str = "127.0.0.1", port: int = 8700) -> ThreadingHTTPServer:
    """A server of an index folder; call its `serve_forever`. Port 0 takes a free one."""
    opened = IndexFolder(folder)
    described = json.dumps(asdict(opened.facts)).encode()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = SECONDS

        def do_GET(self) -> None:
            self._answer(*((200, described) if self.path == "/facts" else (404, b"there is only /facts")))

        def do_POST(self) -> None:
            size = self.headers.get("Content-Length", "")
            if not size.isdigit() or int(size) > BIGGEST:
                self.close_connection = True
                return self._answer(413, f"a request must say its size, at most {BIGGEST} bytes".encode())
            try:
                return self._answer(200, answer(opened, self.path, self.rfile.read(int(size))))
            except (ValueError, KeyError, IndexError, EOFError, TypeError) as error:
                return self._answer(400, str(error).encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Prints nothing."""

    return ThreadingHTTPServer((host, port), Handler)


def answer(index: IndexFolder, path: str, body: bytes) -> bytes:
    """The body of the answer to a request; a ValueError says what is wrong with it."""
    at, array, facts = urlsplit(path), _unpacked(body), index.facts
    given = {name: values[-1] for name, values in parse_qs(at.query).items()}
    if at.path == "/take":
        if array.ndim != 1 or array.dtype != np.int64 or not ((array >= 0) & (array < facts.rows)).all():
            raise ValueError(f"rows must be int64 from 0 to {facts.rows - 1}")
        return _packed(index.take(array))
    if array.ndim != 2 or array.shape[1] != facts.query_width or array.dtype != np.float32:
        raise ValueError(f"queries are {array.shape}, {array.dtype}; they must be float32 of width {facts.query_width}")
    if at.path == "/above" and facts.kind == "exact" and len(array) == 1:
        return _packed(index.search_above(array, float(given["floor"])))
    if at.path == "/search":
        count, least, probes = (int(given[name]) for name in ("count", "least", "probes"))
        if not 0 < least <= count:
            raise ValueError(f"count is {count} and least is {least}; they must be positive, count at least as large")
        scores, rows = index.search(array, count, least, probes or None)
        file = io.BytesIO()
        np.savez(file, scores=scores, rows=rows)
        return file.getvalue()
    raise ValueError(f"there is no {at.path} for an index of kind {facts.kind}")


def _packed(array: ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def _unpacked(body: bytes) -> ndarray:
    return np.load(io.BytesIO(body), allow_pickle=False)
