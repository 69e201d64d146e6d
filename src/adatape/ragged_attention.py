"""Objects that are passed to timm's blocks as `attn_mask`: ragged sequences by a faster kernel, gates in float32."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from adatape.atr import without_autocast
from adatape.cuda_graphs import is_exporting
from adatape.packing import Packing, key_bias, key_mask
from adatape.patches import matmul_dtype

HALF = (torch.float16, torch.bfloat16)


class RaggedMask(ABC):
    """An `attn_mask` that intercepts `scaled_dot_product_attention`, as PyTorch's `CausalBias` does.

    Non-fused attention sees it as the mask that it represents.
    """

    dtype = torch.bool  # of the mask

    @abstractmethod
    def mask(self) -> Tensor:
        """The boolean mask, True where a query attends to a key; or a bias."""

    @abstractmethod
    def attend_fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention within each sequence by the fastest GPU kernel, in half precision."""

    @abstractmethod
    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention within each sequence on any device, in any dtype and with any options."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return function(*(each.mask() if isinstance(each, RaggedMask) else each for each in args), **(kwargs or {}))

    def __invert__(self) -> Tensor:
        return ~self.mask()


class PaddingMask(RaggedMask):
    """A padded batch in which only the tail of each sequence is hidden.

    Shapes do not depend on the data, so a GPU is not synchronised. cuDNN's kernel is the fastest that accepts a bias,
    if each sample's bias starts at a multiple of 8 elements.
    """

    def __init__(self, visible: Bool[Tensor, "b n"]) -> None:
        self.visible = visible

    def mask(self) -> Bool[Tensor, "b 1 1 n"]:
        return key_mask(self.visible)

    def attend_fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=aligned_bias(self.visible, q.dtype))

    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(), **options)


class PackedMask(RaggedMask):
    """Sequences of different lengths, concatenated into one row."""

    def __init__(self, packing: Packing) -> None:
        self.cu_seqlens, self.total, self.max_seqlen = packing.cu_seqlens, packing.indices.shape[0], packing.max_seqlen

    def mask(self) -> Bool[Tensor, "1 1 n n"]:
        """The block-diagonal mask, quadratic in the number of tokens of the batch."""
        sample = self._padded_indices() // self.max_seqlen
        return (sample[:, None] == sample)[None, None]

    def attend_fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return batched_rows(varlen(flat_rows(q), flat_rows(k), flat_rows(v), self.cu_seqlens, self.max_seqlen), 1)

    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """On a CPU one sequence after the other; elsewhere each sequence padded to the longest, and unpadded again."""
        if q.is_cpu and not torch.compiler.is_compiling():
            parts = zip(*(x.split(self.cu_seqlens.diff().tolist(), 2) for x in (q, k, v)), strict=True)
            return torch.cat([F.scaled_dot_product_attention(*part, **options) for part in parts], 2)
        places, lengths = self._padded_indices(), self.cu_seqlens.diff()
        q, k, v = (_pad(x, places, lengths.shape[0], self.max_seqlen) for x in (q, k, v))
        visible = torch.arange(self.max_seqlen, device=lengths.device) < lengths[:, None]
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask(visible), **options)
        return batched_rows(flat_rows(attended).index_select(0, places), 1)

    def _padded_indices(self) -> Int[Tensor, "n"]:
        """The index of each row once every sequence is padded to the longest."""
        row = torch.arange(self.total, device=self.cu_seqlens.device)
        sample = torch.bucketize(row, self.cu_seqlens[1:], right=True)
        return sample * self.max_seqlen + row - self.cu_seqlens[sample]


class Float32Bias(RaggedMask):
    """A bias whose attention is computed in float32, for gates that are trained in float16.

    There the weight of a shut gate's key would be rounded to 0, and its gradient with it.
    """

    dtype = torch.float32

    def __init__(self, bias: Float[Tensor, "b h 1 n"]) -> None:
        self.bias = bias

    def mask(self) -> Float[Tensor, "b h 1 n"]:
        return self.bias

    def attend_fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend_masked(q, k, v)

    def attend_masked(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with without_autocast(q):
            attended = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=self.bias, **options)
            return attended.to(v.dtype)


def gate_bias(
    rows: Float[Tensor, "b m d"], visible: Bool[Tensor, "b m"], tape: int, gate: Float[Tensor, "h"]
) -> Float32Bias | Float[Tensor, "b h 1 m"]:
    """`key_bias` as the `attn_mask` of a block on `rows`."""
    bias, trains = key_bias(visible, gate, tape), torch.is_grad_enabled() and not is_exporting()
    return Float32Bias(bias) if trains and matmul_dtype(rows) == torch.float16 else bias.to(rows.dtype)


def padding_mask(visible: Bool[Tensor, "b n"]) -> PaddingMask | Bool[Tensor, "b 1 1 n"]:
    """The `attn_mask` of a padded batch: `PaddingMask`, or a plain boolean mask in an exported graph."""
    return key_mask(visible) if is_exporting() else PaddingMask(visible)


def aligned_bias(visible: Bool[Tensor, "b n"], dtype: torch.dtype) -> Float[Tensor, "b 1 1 n"]:
    """The attention bias, -∞ where hidden, with strides that are a multiple of 8, also in a compiled graph."""
    b, n = visible.shape
    apart = n + -n % 8
    shown = F.pad(visible, (0, apart - n))
    bias = torch.where(shown, torch.zeros((), dtype=dtype, device=shown.device), -math.inf)
    return bias.as_strided((b, 1, 1, n), (apart, apart, apart, 1))


def varlen(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n h d"],
    v: Float[Tensor, "n h d"],
    cu_seqlens: Int[Tensor, "edges"],
    max_seqlen: int,
) -> Float[Tensor, "n h d"]:
    """Attention within each of several concatenated sequences; `cu_seqlens` are their cumulative lengths."""
    attended = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    assert isinstance(attended, Tensor)  # a tuple only with return_aux
    return attended


def has_fast_path(q: Tensor, v: Tensor) -> bool:
    """Whether a fast kernel supports this device, dtype and head width."""
    if not (q.is_cuda and v.dtype in HALF):
        return False
    return q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0 and _has_flash(q.device.index)


@torch.compiler.assume_constant_result
def _has_flash(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: RaggedMask, **options: Any) -> Tensor:
    if any(options.values()) or not has_fast_path(q, v):  # the kernels take no dropout or scale
        return attn_mask.attend_masked(q, k, v, **options)
    return attn_mask.attend_fused(q.to(v.dtype), k.to(v.dtype), v)  # autocast leaves normed queries and keys in float32


def flat_rows(x: Float[Tensor, "b h n d"]) -> Float[Tensor, "b*n h d"]:
    """Merges batch and sequence; a view where q, k and v come from one projection."""
    return x.transpose(1, 2).flatten(0, 1)


def batched_rows(x: Float[Tensor, "m h d"], b: int) -> Float[Tensor, "b h n d"]:
    return x.unflatten(0, (b, -1)).transpose(1, 2)


def _pad(
    x: Float[Tensor, "1 h n d"], places: Int[Tensor, "n"], samples: int, max_seqlen: int
) -> Float[Tensor, "s h m d"]:
    flat = flat_rows(x)
    return batched_rows(flat.new_zeros(samples * max_seqlen, *flat.shape[1:]).index_copy(0, places, flat), samples)
