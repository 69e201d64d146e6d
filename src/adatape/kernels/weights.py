"""A custom operator that returns the weights from `select_tokens` and gives them the gradient of
`atr.recompute_weights`."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adatape.atr import UPDATE, weighted_sum
from adatape.kernels.select import HAS_TRITON, power_of_two


def tape_weights(
    query: Float[Tensor, "b h"],
    keys: Float[Tensor, "b t k h"],
    weight: Float[Tensor, "b t k"],
    length: Int[Tensor, "b"],
    temperature: float,
    average: bool,
) -> Float[Tensor, "b t k"]:
    """Returns `weight`, differentiable with respect to query and selected keys as in `atr.recompute_weights`."""
    return _tape_weights(query, keys, weight.detach(), length, temperature, average)


TENSORS = "Tensor query, Tensor keys, Tensor weight, Tensor length"
SETTINGS = "float temperature, bool average"


@torch.library.custom_op("adatape::tape_weights", mutates_args=(), schema=f"({TENSORS}, {SETTINGS}) -> Tensor")
def _tape_weights(
    query: Tensor, keys: Tensor, weight: Tensor, length: Tensor, temperature: float, average: bool
) -> Tensor:
    return weight.clone()


@_tape_weights.register_fake
def _(query: Tensor, keys: Tensor, weight: Tensor, *_: object) -> Tensor:
    return torch.empty_like(weight)


@torch.library.custom_op(
    "adatape::tape_weights_backward",
    mutates_args=(),
    schema=f"({TENSORS}, Tensor grad, {SETTINGS}) -> (Tensor, Tensor)",
)
def _tape_weights_backward(
    query: Tensor,
    keys: Tensor,
    weight: Tensor,
    length: Tensor,
    grad: Tensor,
    temperature: float,
    average: bool,
) -> tuple[Tensor, Tensor]:
    if query.is_cuda and HAS_TRITON:
        return backward_triton(query, keys, weight, length, grad, temperature, average)
    return backward_by_definition(query, keys, weight, grad, temperature, average)


@_tape_weights_backward.register_fake
def _(query: Tensor, keys: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query, memory_format=torch.contiguous_format), torch.empty_like(
        keys, memory_format=torch.contiguous_format
    )


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    query, keys, weight, length = ctx.saved_tensors
    grads = _tape_weights_backward(query, keys, weight, length, grad, ctx.temperature, ctx.average)
    return *grads, None, None, None, None


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, keys, weight, length, ctx.temperature, ctx.average = inputs
    ctx.save_for_backward(query, keys, weight, length)


_tape_weights.register_autograd(_backward, setup_context=_setup_context)


def backward_by_definition(
    query: Tensor, keys: Tensor, weight: Tensor, grad: Tensor, temperature: float, average: bool
) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b t k h"]]:
    """The backward pass of `atr.recompute_weights`; hidden steps have zero weights and so zero gradients."""
    queries = [query]
    for w, k in zip(weight.unbind(1), keys.unbind(1), strict=True):
        queries.append(UPDATE["average" if average else "replace"](queries[-1], weighted_sum(w, k)))
    grad_next, grad_keys = torch.zeros_like(query), torch.empty_like(keys, memory_format=torch.contiguous_format)
    for step in reversed(range(weight.shape[1])):
        q, k, w = queries[step], keys[:, step], weight[:, step]
        grad_s = grad_next / 2 if average else grad_next
        grad_w = grad[:, step] + (k * grad_s[:, None]).sum(-1)
        grad_d = w * (grad_w - (w * grad_w).sum(-1, keepdim=True)) / temperature
        grad_keys[:, step] = w[..., None] * grad_s[:, None] + grad_d[..., None] * q[:, None]
        grad_next = weighted_sum(grad_d, k) + (grad_s if average else 0)
    return grad_next.contiguous(), grad_keys


def backward_triton(
    query: Tensor, keys: Tensor, weight: Tensor, length: Tensor, grad: Tensor, temperature: float, average: bool
) -> tuple[Float[Tensor, "b h"], Float[Tensor, "b t k h"]]:
    from adatape.kernels.triton_weights import tape_weights_backward

    b, t, k, h = keys.shape
    query, keys = query.contiguous(), keys.contiguous()
    grad_query, grad_keys = torch.empty_like(query), torch.zeros_like(keys)
    tape_weights_backward[(b,)](
        query, keys, weight.contiguous(), length, grad.contiguous(), query.new_empty(b, t, h), grad_query, grad_keys,
        t, h, temperature, AVERAGE=average, MERGE=k, SLOTS=max(2, power_of_two(k)), WIDTH=max(16, power_of_two(h)),
        num_warps=2,
    )  # fmt: skip
    return grad_query, grad_keys
