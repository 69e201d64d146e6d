"""A training step captured as a CUDA graph: small models spend their time launching kernels, a replay launches once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from adatape.data.parity import Batch

WARM_UP_CALLS = 3


def captured(update: Callable[[Batch], Tensor], example: Batch) -> Callable[[Batch], Tensor]:
    """`update`, run eagerly a few times, as lazy state needs, and replayed from then on."""
    held = Batch(*(part.cuda() for part in example))
    graph: list[tuple[torch.cuda.CUDAGraph, Tensor]] = []
    calls = 0

    def run(batch: Batch) -> Tensor:
        nonlocal calls
        for mine, theirs in zip(held, batch, strict=True):
            mine.copy_(theirs)
        calls += 1
        if calls <= WARM_UP_CALLS:
            return _on_side_stream(update, held)
        if not graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                loss = update(held)
            graph.append((recorded, loss))
        recorded, loss = graph[0]
        recorded.replay()
        return loss.clone()

    return run


def _on_side_stream(update: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    """Capture wants its warm-up off the default stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = update(batch)
    torch.cuda.current_stream().wait_stream(side)
    return loss
