"""A function captured as a CUDA graph: small kernels cost less to run than to launch, and a replay launches once.

And whether a graph is being exported, to be run by other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

WARM_UP_CALLS = 3
Tensors = tuple[Tensor, ...]


def exporting() -> bool:
    """`torch.compiler.is_exporting`, which torch 2.11 takes for true in everything that it compiles."""
    return bool(torch.compiler._is_exporting_flag)


def fixed() -> bool:
    """Whether what runs now is recorded to be repeated, so that no value of it may decide what comes next."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@contextmanager
def room_to_compile(forwards: int) -> Iterator[None]:
    """For so many graphs of one function: dynamo keeps eight by itself, and runs the ninth uncompiled without an error.

    All our models share one forward.
    """
    from torch._dynamo import config

    limit = max(config.recompile_limit, forwards)
    with config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        yield


def captured(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """`function` of tensors on a GPU, run eagerly a few times, as lazy state needs, and replayed from then on.

    Shapes must stay what they were at the first call.
    """
    held: list[Tensor] = []
    graph: list[tuple[torch.cuda.CUDAGraph, Tensors]] = []
    calls = 0

    def run(*given: Tensor) -> Tensors:
        nonlocal calls
        if not held:
            held.extend(torch.empty_like(each) for each in given)
        for mine, theirs in zip(held, given, strict=True):
            mine.copy_(theirs)
        calls += 1
        if calls <= WARM_UP_CALLS:
            return _on_side_stream(function, held)
        if not graph:
            recorded = torch.cuda.CUDAGraph()
            with torch.cuda.graph(recorded):
                result = function(*held)
            graph.append((recorded, result))
        recorded, result = graph[0]
        recorded.replay()
        return tuple(each.clone() for each in result)

    return run


def _on_side_stream(function: Callable[..., Tensors], given: list[Tensor]) -> Tensors:
    """Capture wants its warm-up off the default stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = function(*given)
    torch.cuda.current_stream().wait_stream(side)
    return result
