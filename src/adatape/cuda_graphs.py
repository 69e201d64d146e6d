"""CUDA graph capture of a function, and tests for whether code is being compiled, captured or exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

WARM_UP_CALLS = 3
Tensors = tuple[Tensor, ...]


def is_exporting() -> bool:
    """As `torch.compiler.is_exporting`, which torch 2.11 also makes true under torch.compile."""
    return bool(torch.compiler._is_exporting_flag)


def is_compiling_or_capturing() -> bool:
    """Whether code is being compiled or captured, so that control flow must not depend on tensor values."""
    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def in_torch_func(x: Tensor) -> bool:
    """Whether `x` is transformed by `torch.func` (vmap, grad, …), which our own operators do not support."""
    return not torch.compiler.is_compiling() and is_functorch_wrapped_tensor(x)


def may_look_at(x: Tensor) -> bool:
    """Whether control flow may depend on the values of `x` at no cost: on a CPU, not compiled, nor in `torch.func`."""
    return x.is_cpu and not torch.compiler.is_compiling() and not in_torch_func(x)


@contextmanager
def raised_recompile_limit(forwards: int) -> Iterator[None]:
    """Raises dynamo's recompile limit to `forwards`; beyond the default of 8 it silently runs eagerly.

    All models share one `forward`, so their graphs count together.
    """
    from torch._dynamo import config

    limit = max(config.recompile_limit, forwards)
    with config.patch(recompile_limit=limit, fail_on_recompile_limit_hit=True):
        yield


def cuda_graphed(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
    """`function` of GPU tensors, run eagerly WARM_UP_CALLS times, then captured as a CUDA graph and replayed.

    All calls must have the shapes of the first.
    """
    static_inputs: list[Tensor] = []
    graph: list[tuple[torch.cuda.CUDAGraph, Tensors]] = []
    calls = 0

    def run(*given: Tensor) -> Tensors:
        nonlocal calls
        if not static_inputs:
            static_inputs.extend(torch.empty_like(each) for each in given)
        for mine, theirs in zip(static_inputs, given, strict=True):
            mine.copy_(theirs)
        calls += 1
        if calls <= WARM_UP_CALLS:
            return _on_side_stream(function, static_inputs)
        if not graph:
            recorded = torch.cuda.CUDAGraph()
            # Checkpoints are saved by another thread, whose CUDA calls would invalidate a capture in the global mode.
            with torch.cuda.graph(recorded, capture_error_mode="thread_local"):
                result = function(*static_inputs)
            graph.append((recorded, result))
        recorded, result = graph[0]
        recorded.replay()
        return tuple(each.clone() for each in result)

    return run


def _on_side_stream(function: Callable[..., Tensors], given: list[Tensor]) -> Tensors:
    """Runs on a side stream, as CUDA graph capture requires of its warm-up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = function(*given)
    torch.cuda.current_stream().wait_stream(side)
    return result
