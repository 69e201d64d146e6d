"""Algorithm 2 of the paper, Adaptive Tape Reading, batched; no row depends on another.

"Departure n" refers to `docs/departures.md`, which lists where the paper and its released code disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adatape.config import Ponder, Update, merge_of
from adatape.cuda_graphs import may_look_at
from adatape.packing import pad_tape
from adatape.records import Tape

Choose = Callable[[Tensor, int], Tensor]


def highest(d: Float[Tensor, "b c"], k: int) -> Int[Tensor, "b k"]:
    """Indices of the k highest scores, best first, the lowest index first among equals (`topk` leaves ties open)."""
    d = d.detach()
    if k < d.shape[-1] and may_look_at(d):
        top = d.topk(k + 1)  # one pass instead of k, exact without ties; not on a GPU, where the test would synchronise
        if not bool((top.values[:, 1:] == top.values[:, :-1]).any()):
            return top.indices[:, :k]
    chosen = [d.argmax(-1, keepdim=True)]
    for _ in range(k - 1):
        d = d.scatter(-1, chosen[-1], -math.inf)
        chosen.append(d.argmax(-1, keepdim=True))
    return torch.cat(chosen, -1)


def read_tape(
    query: Float[Tensor, "b d"],
    bank: Float[Tensor, "c d"] | Float[Tensor, "b c d"],
    steps: int = 10,
    threshold: float = 2.0,
    merge: int | None = None,
    query_width: int = 64,
    taken: Bool[Tensor, "b c"] | None = None,
    update: Update = "average",
    ponder: Ponder = "gini",
    ponder_at_halt: bool = True,
    *,
    choose: Choose = highest,
    temperature: float | None = None,
    check: bool = True,
) -> Tape:
    """Reads up to `steps` tokens from the bank for each row, until the largest weights sum to `threshold`.

    Each tape token is a weighted sum of the `merge` best-scoring bank tokens not read before; None means
    steps / threshold. `taken` hides bank tokens from the start. Scores are divided by `temperature`, by default
    √query_width, before the softmax. Scores are float32 or better for any input dtype, also under autocast; the next
    query is computed in float64 where the device supports it, as in the kernel, so that both read the same tokens.
    `check` also tests values (all finite, enough bank tokens left), which synchronises a GPU.
    """
    h, merge = query_width, merge_of(steps, threshold, merge)
    temperature = h**0.5 if temperature is None else temperature
    _check_shapes(query, bank, h, taken)
    _check_settings(steps, threshold, merge, temperature, update, ponder)
    _check_bank_size(bank.shape[-2], steps, merge)
    if check and not torch.compiler.is_compiling():
        _check_values(query, bank, taken, steps, merge)

    with without_autocast(query):
        dtype = at_least_float32(query).dtype
        q, keys = as_float64(at_least_float32(query[:, :h])), as_float64(at_least_float32(bank[..., :h]))
        if taken is None:
            taken = torch.zeros(query.shape[0], bank.shape[-2], dtype=torch.bool, device=query.device)
        halting = loss = q.new_zeros(q.shape[0])
        index: list[Tensor] = []
        weight, mask = [], []
        for _ in range(steps):  # T bounds the loop: departure 10
            running = halting < threshold  # line 2
            if index and may_look_at(running) and not bool(running.any()):
                break  # what follows would be hidden
            d = scores(q, keys, dtype)  # line 3
            d = d.masked_fill(taken, -math.inf)  # line 4; departure 4 says why not a product
            i = choose(d, merge)  # line 5
            w = d.gather(-1, i).to(q.dtype)  # line 6
            w = (w / temperature).softmax(-1)  # line 7
            s = weighted_sum(w, take(keys, i))  # line 8, only the coordinates that the next query uses
            index.append(i)  # line 9; the halting token stays: departure 6
            weight.append(w)
            mask.append(running)
            p = w.amax(-1)
            counted = running if ponder_at_halt else running & (halting + p < threshold)  # lines 10-12; departure 7
            halting = halting + p * running  # line 13; `>=` halts: departure 5
            loss = loss + PONDER[ponder](w, halting) * counted  # line 14
            taken = taken.scatter(-1, i, True)  # line 15
            q = UPDATE[update](q, s)  # line 16

        visible, i, w = torch.stack(mask, 1), torch.stack(index, 1), torch.stack(weight, 1)
        w = w.to(dtype) * visible[..., None]
        tokens = weighted_sum(w, at_least_float32(take(bank, i)))  # lines 8-9 in full width, one gather for all steps
    tape = Tape(
        tokens=tokens.to(bank.dtype),
        mask=visible,
        index=i.masked_fill(~visible[..., None], -1),
        weight=w,
        length=visible.sum(-1),
        ponder=loss.to(dtype),
    )
    return pad_tape(tape, steps)


def recompute_weights(
    query: Float[Tensor, "b d"],
    keys: Float[Tensor, "b t k h"],
    visible: Bool[Tensor, "b t"],
    temperature: float,
    update: Update = "average",
) -> Float[Tensor, "b t k"]:
    """Weights of already selected tokens, differentiable: Algorithm 2 without lines 4, 5 and 15."""
    q, weight = at_least_float32(query[:, : keys.shape[-1]]), []
    for found in at_least_float32(keys).unbind(1):
        w = ((q[:, None] * found).sum(-1) / temperature).softmax(-1)  # lines 3, 6 and 7
        weight.append(w)
        q = UPDATE[update](q, weighted_sum(w, found))  # lines 8 and 16
    return torch.stack(weight, 1) * visible[..., None]


def ponder_of(
    w: Float[Tensor, "b t k"], visible: Bool[Tensor, "b t"], threshold: float, ponder: Ponder, ponder_at_halt: bool
) -> Float[Tensor, "b"]:
    """The ponder loss of a tape, from all its weights at once; weights of hidden tokens must be 0."""
    up_to = torch.ones(w.shape[1], w.shape[1], device=w.device, dtype=w.dtype).tril()
    halting = (up_to * w.amax(-1)[:, None]).sum(-1)  # line 13; cumsum is not deterministic on a GPU
    counted = visible if ponder_at_halt else visible & (halting < threshold)  # lines 10-12; departure 7
    return (PONDER[ponder](w, halting) * counted).sum(1)  # line 14


PONDER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "gini": lambda w, _: 1 - w.square().sum(-1),
    "max": lambda w, _: 1 - w.amax(-1),
    "collect": lambda _, halting: halting,
}
UPDATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "average": lambda q, s: (q + s) / 2,
    "replace": lambda _, s: s,
}


def scores(
    q: Float[Tensor, "b h"], keys: Float[Tensor, "*b c h"], dtype: torch.dtype | None = None
) -> Float[Tensor, "b c"]:
    """Inner products in `dtype`; equal keys get equal scores at every bank position and in every batch.

    A matmul in the result's dtype does not guarantee this, since its tiles sum in different orders. A matmul in float64
    rounded once does. Where keys already have the result's dtype, an elementwise product and sum is used instead.
    """
    dtype, q = dtype or q.dtype, q.to(keys.dtype)
    if keys.dtype == dtype:
        return (q[:, None] * keys).sum(-1)
    d = q @ keys.mT if keys.dim() == 2 else (keys @ q[..., None]).squeeze(-1)
    return d.to(dtype)


def as_float64(keys: Float[Tensor, "*b c h"]) -> Float[Tensor, "*b c h"]:
    """Keys in float64, for `scores`; unchanged on MPS, which has no float64."""
    return keys if keys.device.type == "mps" else keys.double()


def take(bank: Float[Tensor, "*b c d"], index: Int[Tensor, b * t]) -> Float[Tensor, "b *t d"]:
    """The bank tokens at `index`, from one bank for all rows (c, d) or one per row (b, c, d)."""
    if bank.dim() == 2:
        return F.embedding(index, bank)
    flat = index.flatten(1)[..., None].expand(-1, -1, bank.shape[-1])
    return bank.gather(1, flat).unflatten(1, index.shape[1:])


def weighted_sum(w: Float[Tensor, "*b k"], tokens: Float[Tensor, "*b k d"]) -> Float[Tensor, "*b d"]:
    return (w[..., None] * tokens).sum(-2)


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Disables autocast on the device of `x`; the meta device has none."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def at_least_float32(x: Tensor) -> Tensor:
    """Casts to float32; float64 is unchanged."""
    return x if x.dtype == torch.float64 else x.float()


def _check_settings(steps: int, threshold: float, merge: int, temperature: float, update: str, ponder: str) -> None:
    numbers = {"steps": steps, "threshold": threshold, "merge": merge, "temperature": temperature}
    for name, value in numbers.items():
        if not value > 0:
            raise ValueError(f"{name} is {value}; it must be positive")
    for name, choice, known in (("update", update, UPDATE), ("ponder", ponder, PONDER)):
        if choice not in known:
            raise ValueError(f"{name} is {choice!r}; it must be one of {', '.join(known)}")


def _check_shapes(query: Tensor, bank: Tensor, h: int, taken: Tensor | None) -> None:
    if query.dim() != 2 or bank.dim() not in (2, 3):
        shapes = f"query has shape {tuple(query.shape)} and bank {tuple(bank.shape)}"
        raise ValueError(f"{shapes}; they must be (b, d) and (c, d) or (b, c, d)")
    (b, d), c = query.shape, bank.shape[-2]
    if bank.shape[-1] != d:
        raise ValueError(f"query has width {d} and bank {bank.shape[-1]}; they must be equal")
    if bank.dim() == 3 and bank.shape[0] != b:
        raise ValueError(f"query has {b} rows and bank {bank.shape[0]}; they must be equal")
    if not 0 < h <= d:
        raise ValueError(f"query_width is {h}; it must be between 1 and the bank's width {d}")
    if taken is not None and taken.shape != (b, c):
        raise ValueError(f"taken has shape {tuple(taken.shape)}; it must be {(b, c)}")
    if taken is not None and taken.dtype != torch.bool:
        raise ValueError(f"taken has dtype {taken.dtype}; it must be torch.bool")


def _check_bank_size(size: int, steps: int, merge: int, hidden: int = 0) -> None:
    if size < steps * merge + hidden:
        has = f"bank has {size} tokens" + (f", {hidden} of them hidden by taken" if hidden else "")
        raise ValueError(f"{has}; steps × merge needs {steps * merge}")


def _check_values(query: Tensor, bank: Tensor, taken: Tensor | None, steps: int, merge: int) -> None:
    for name, x in (("query", query), ("bank", bank)):
        bad = int((~x.isfinite()).sum())
        if bad:
            raise ValueError(f"{name} has {bad} non-finite values of {x.numel()}; it must have none")
    if taken is not None and taken.numel():
        _check_bank_size(bank.shape[-2], steps, merge, hidden=int(taken.sum(-1).max()))
