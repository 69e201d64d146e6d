"""Attention that is kept from the hidden tail of each sample by its length instead of a bias.

    python research/tail_attention.py results/tail_attention.jsonl                         on a GPU: checked, then timed
    python research/tail_attention.py results/tail_attention.jsonl --shapes 256x12x207 --tiles 128,64,8,3

Two candidates for `adatape.ragged_attention.PaddingMask`, which passes a bias to cuDNN:

- kernels of our own, as above. Loops over keys end at a sample's length, so hidden keys cost nothing, and neither do
  blocks of hidden queries, whose rows are 0. The gradient has two passes, first of queries, then of keys and values,
  and no atomic sums, so that it is the same in every run.
- `edges`: PyTorch's `varlen_attn` on the padded rows as they lie, where a sample is two sequences, its visible rows
  and its tail, which attends to itself and is looked at by nobody. Nothing moves, and shapes do not depend on lengths.

Rows of the file: microseconds of the kernels by their tiles, `edges`, `bias` (what the package does) and `none` (no
mask at all), forward and with the gradient, for tapes that may fill a tenth of the sequence.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from rows import Row, add_rows
from torch import Tensor
from triton_tail import forward, keys_backward, queries_backward

from adatape.ragged_attention import PaddingMask, batched_rows, flat_rows, varlen
from adatape.train.folder import environment


class Tiles(NamedTuple):
    """How a kernel is launched."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD, BACKWARD = Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)


def _rows_last(like: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
    """Empty, in the order (b, n, h, d), as the layer after attention wants it."""
    b, h, n, d = like.shape
    return like.new_empty(b, n, h, d).transpose(1, 2)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(itertools.chain(*(x.stride()[:3] for x in tensors)))


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _scale(q: Tensor) -> float:
    """Of scores in powers of two."""
    return float(q.shape[-1] ** -0.5 / math.log(2))


@torch.library.custom_op("tail::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tiles: list[int]) -> tuple[Tensor, Tensor]:
    """(b, h, n, d) within the first `lengths` rows of each sample, and the logarithm of each row's sum, to base 2."""
    (b, h, n, d), how = q.shape, Tiles(*tiles[:4])
    out, lse = _rows_last(q), q.new_empty(b, h, n, dtype=torch.float32)
    forward[(-(-n // how.queries), b * h)](
        q, k, v, lengths, out, lse, h, n, _scale(q), *_strides(q, k, v, out),
        D=d, QUERIES=how.queries, KEYS=how.keys, PRECISION=_precision(q), num_warps=how.warps, num_stages=how.stages,
    )  # fmt: skip
    return out, lse


@attention.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _rows_last(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tail::attention_backward", mutates_args=())
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, out: Tensor, lse: Tensor, d_out: Tensor, tiles: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    (b, h, n, d), how = q.shape, Tiles(*tiles[4:])
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    d_q, d_k, d_v, delta = _rows_last(q), _rows_last(k), _rows_last(v), torch.empty_like(lse)
    options = {"D": d, "QUERIES": how.queries, "KEYS": how.keys, "PRECISION": _precision(q)}
    options |= {"num_warps": how.warps, "num_stages": how.stages}
    queries_backward[(-(-n // how.queries), b * h)](
        q, k, v, lengths, out, lse, d_out, d_q, delta, h, n, _scale(q), *_strides(q, k, v, out, d_out, d_q), **options
    )
    keys_backward[(-(-n // how.keys), b * h)](
        q, k, v, lengths, lse, d_out, delta, d_k, d_v, h, n, _scale(q), *_strides(q, k, v, d_out, d_k, d_v), **options
    )
    return d_q, d_k, d_v


@attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _rows_last(q), _rows_last(k), _rows_last(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lengths, ctx.tiles = inputs
    ctx.save_for_backward(q, k, v, lengths, *output)


def _gradients(ctx: Any, d_out: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *attention_backward(*ctx.saved_tensors, d_out, ctx.tiles), None, None


attention.register_autograd(_gradients, setup_context=_save)


def tail_attention(
    q: Float[Tensor, "b h n d"],
    k: Float[Tensor, "b h n d"],
    v: Float[Tensor, "b h n d"],
    lengths: Int[Tensor, "b"],
    tiles: tuple[Tiles, Tiles] = (FORWARD, BACKWARD),
) -> Float[Tensor, "b h n d"]:
    return attention(q, k, v, lengths.int(), [*tiles[0], *tiles[1]])[0]


# Checked and timed on a GPU


class Case(NamedTuple):
    qkv: Float[Tensor, "b n 3 h d"]
    lengths: Int[Tensor, "b"]
    gradient: Float[Tensor, "b n h d"]

    @property
    def visible(self) -> Tensor:
        return torch.arange(self.qkv.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v


def drawn(b: int, h: int, n: int, dtype: torch.dtype, device: str, d: int = 64) -> Case:
    """Tapes fill up to a tenth of the sequence."""
    generator = torch.Generator(device).manual_seed(0)
    qkv = torch.randn(b, n, 3, h, d, generator=generator, device=device).to(dtype).requires_grad_()
    lengths = torch.randint(n - n // 10, n + 1, (b,), generator=generator, device=device)
    gradient = torch.randn(b, n, h, d, generator=generator, device=device).to(dtype)
    shown = torch.arange(n, device=device) < lengths[:, None]
    return Case(qkv, lengths, gradient * shown[:, :, None, None])


Attend = Callable[[Case], Tensor]


def with_kernel(tiles: tuple[Tiles, Tiles]) -> Attend:
    return lambda case: tail_attention(*case.heads(), case.lengths, tiles)


def edges_of(lengths: Int[Tensor, "b"], rows: int) -> Int[Tensor, "2*b+1"]:
    """Where sequences begin in a padded batch, if each sample's visible rows are one and its tail is another."""
    starts = torch.arange(len(lengths), device=lengths.device) * rows
    ends = starts.new_full((1,), len(lengths) * rows)
    return torch.cat([torch.stack([starts, starts + lengths], 1).flatten(), ends]).int()


def with_edges(case: Case) -> Tensor:
    q, k, v = map(flat_rows, case.heads())
    rows = case.qkv.shape[1]
    return batched_rows(varlen(q, k, v, edges_of(case.lengths, rows), rows), len(case.lengths))


def with_bias(case: Case) -> Tensor:
    """As the package does it."""
    mask: Any = PaddingMask(case.visible)
    return F.scaled_dot_product_attention(*case.heads(), attn_mask=mask)


def without_mask(case: Case) -> Tensor:
    return F.scaled_dot_product_attention(*case.heads())


def gradients(attend: Attend, case: Case) -> tuple[Tensor, Tensor]:
    case.qkv.grad = None
    out = attend(case).transpose(1, 2)
    out.backward(case.gradient.to(out.dtype))
    assert case.qkv.grad is not None
    return out, case.qkv.grad


def differences(attend: Attend, case: Case) -> tuple[float, float]:
    """Relative errors of the output at visible rows and of the gradient, against float64 with a mask."""
    precise = Case(case.qkv.detach().double().requires_grad_(), case.lengths, case.gradient.double())
    theirs = gradients(
        lambda c: F.scaled_dot_product_attention(*c.heads(), attn_mask=c.visible[:, None, None]), precise
    )
    ours, shown = gradients(attend, case), case.visible
    pairs = ((ours[0][shown], theirs[0][shown]), (ours[1], theirs[1]))
    out, gradient = (float(((x.double() - y).norm() / y.norm()).detach()) for x, y in pairs)
    return out, gradient


def microseconds(calls: dict[str, Callable[[], object]], rounds: int, repeats: int = 20) -> dict[str, float]:
    """Medians over rounds in turns."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for _, (name, call) in itertools.product(range(rounds), calls.items()):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        torch.cuda.synchronize()
        took[name].append(1000 * begin.elapsed_time(end) / repeats)
    return {name: round(statistics.median(each), 1) for name, each in took.items()}


def graphed(call: Callable[[], object]) -> Callable[[], object]:
    """Replayed as a CUDA graph, so that launches do not count."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def measured(shape: tuple[int, int, int], tiles: Sequence[Tiles], rounds: int) -> Row:
    """Errors of the kernel and of the bias, and the times of all tiles, by which both passes are launched."""
    case = drawn(*shape, torch.bfloat16, "cuda")
    row: Row = {"run": "x".join(map(str, shape)), "failed": {}}
    row["kernel_error"] = differences(with_kernel((FORWARD, BACKWARD)), case)
    row["edges_error"], row["bias_error"] = differences(with_edges, case), differences(with_bias, case)
    sides = {str(list(each)): with_kernel((each, each)) for each in tiles}
    sides |= {"edges": with_edges, "bias": with_bias, "none": without_mask}
    calls: dict[str, Callable[[], object]] = {}
    for name, attend in sides.items():
        try:
            calls |= {f"{name} forward": graphed(no_gradient(attend, case))}
            calls |= {f"{name} with gradient": graphed(partial(gradients, attend, case))}
        except Exception as error:  # tiles that do not fit
            row["failed"][name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return row | {"microseconds": microseconds(calls, rounds), "environment": environment("cuda")}


def no_gradient(attend: Attend, case: Case) -> Callable[[], object]:
    return torch.no_grad()(lambda: attend(case))


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["256x12x207", "64x12x207", "256x12x60", "256x3x207"])
    parser.add_argument("--tiles", nargs="+", help="queries,keys,warps,stages; a grid unless given")
    parser.add_argument("--rounds", type=int, default=5)
    how = parser.parse_args(given)
    grid = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    tiles = [Tiles(*map(int, each.split(","))) for each in how.tiles] if how.tiles else [Tiles(*each) for each in grid]
    for shape in how.shapes:
        b, h, n = map(int, shape.split("x"))
        row = measured((b, h, n), tiles, how.rounds)
        add_rows(how.out, [row])
        print(shape, {name: row[name] for name in row if name.endswith("error")})
        timed = sorted((took, name) for name, took in row["microseconds"].items())
        print("\n".join(f"{took:10.1f} {name}" for took, name in timed), row["failed"], sep="\n", flush=True)


if __name__ == "__main__":
    main()
