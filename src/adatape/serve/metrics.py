"""Figures for Prometheus, in a registry of their own so that two servers in one process stay apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
LENGTHS = (0, 1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 64)
REASONS = {408: "slow", 413: "body", 429: "queue", 503: "busy"}


class Metrics:
    """What the server counts."""

    def __init__(self, depth: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "adatape", "registry": self.registry}
        self.requests = Counter("requests", "requests by path and status", ["path", "status"], **shared)
        self.rejected = Counter("rejected", "requests refused for lack of room", ["reason"], **shared)
        self.seconds = Histogram("request_seconds", "from request to answer", ["path"], buckets=SECONDS, **shared)
        self.batch = Histogram("batch_size", "samples that ran together", buckets=SIZES, **shared)
        self.length = Histogram("tape_length", "tape tokens read by a sample", buckets=LENGTHS, **shared)
        Gauge("queue_depth", "samples accepted and not yet answered", **shared).set_function(depth)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class Counted:
    """Counts and times requests; unknown paths share one label, so that nobody can make up new ones."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, began = 500, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            self._count(scope["path"], status, time.perf_counter() - began)

    def _count(self, path: str, status: int, seconds: float) -> None:
        path = path if path in self.paths else "other"
        self.metrics.requests.labels(path, str(status)).inc()
        self.metrics.seconds.labels(path).observe(seconds)
        if status in REASONS and path != "/readyz":
            self.metrics.rejected.labels(REASONS[status]).inc()
