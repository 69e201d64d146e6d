"""The interface of banks: a bank is opened for a batch, and an opened bank computes the tokens that a reader asks for.

A reader needs only the first coordinates of every token, to score them, and the tokens that it selects. `bank.open`
therefore returns an object that computes either on request.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from adatape.atr import at_least_float32, take
from adatape.config import ReaderConfig
from adatape.cuda_graphs import may_look_at
from adatape.kernels.select import ReadParams, Selection, select_tokens
from adatape.macs import NoCostFormula

NORMED_AT_ONCE = 1024  # tokens; more leave a CPU's cache before their keys are copied


class BankView:
    """An opened bank whose tokens are already computed."""

    searches = False  # whether only `select` finds tokens fast, so that readers use it on every device
    shared = False  # whether all samples read the same tokens
    has_own_keys = False  # whether keys are not the first coordinates of tokens

    def __init__(self, tokens: Float[Tensor, "c d"] | Float[Tensor, "b c d"]) -> None:
        if not isinstance(tokens, Tensor) or tokens.dim() not in (2, 3):
            raise ValueError(f"the bank's tokens are {kind_of(tokens)}; they must be a tensor (c, d) or (b, c, d)")
        self.tokens, self.size, self.shared = tokens, tokens.shape[-2], tokens.dim() == 2

    def all(self) -> Float[Tensor, "*b c d"]:
        return self.tokens

    def take(self, index: Int[Tensor, "b t k"]) -> Float[Tensor, "b t k d"]:
        return take(self.tokens, index)

    def keys(self, norm: nn.LayerNorm | None, width: int) -> Float[Tensor, "*b c width"]:
        """The first `width` coordinates of every token after the reader's norm, without gradient."""
        with torch.no_grad():
            return keys_of(self.tokens, norm, width)

    def keys_read(
        self,
        index: Int[Tensor, "b t k"],  # noqa: ARG002
        tokens: Float[Tensor, "b t k d"],
        width: int,
    ) -> Float[Tensor, "b t k width"]:
        """Keys of the tokens that were read, with gradient; `tokens` are those after the reader's norm."""
        return tokens[..., :width]

    def select(
        self,
        query: Float[Tensor, "b h"],
        norm: nn.LayerNorm | None,
        taken: Bool[Tensor, "b c"] | None,
        params: ReadParams,
    ) -> Selection:
        """Runs Algorithm 2 without gradient on the keys of a normalised query's width."""
        return select_tokens(query, self.keys(norm, query.shape[1]), taken, params)


class Bank(nn.Module):
    """Base class: maps a batch of inputs to tokens, (c, d) for all samples or (b, c, d)."""

    size: int  # tokens per sample (C)
    width: int | None = None  # of tokens (d); None is not checked against the model's

    def open(self, inputs: Tensor, tokens: Float[Tensor, "b n d"], query: Float[Tensor, "b d"]) -> BankView:  # noqa: ARG002
        """Opens the bank for a batch: the model's inputs, their token rows where the tape is read, and the query.

        Subclasses may use all three, and may return a `BankView` that computes tokens on request.
        """
        return BankView(self(inputs))

    def default_reading(self) -> ReaderConfig:
        """The reader's settings where `adatape.wrap` is given none."""
        return ReaderConfig()

    def check(self, width: int, reader: Any) -> None:  # noqa: ARG002
        """Refuses a model of another width, and a reader that cannot read this bank; called when a model is built."""
        if self.width not in (None, width):
            raise ValueError(f"the bank's tokens have width {self.width} and the ViT's {width}; they must be equal")

    def init_from_vit(self, vit: Any) -> None:
        """Initialises the bank from a pretrained ViT; does nothing by default."""

    def size_at(self, image: tuple[int, int]) -> int:  # noqa: ARG002
        """Tokens per sample of images of that height and width; refuses a size that it cannot read."""
        return self.size

    def set_input_size(self, image: tuple[int, int]) -> None:
        """Changes the image size; does nothing by default."""

    def fitted(self, stored: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stored weights for the images that this bank takes, as timm converts a ViT's; unchanged by default."""
        return stored

    def boxes(
        self,
        index: Int[Tensor, "*n"],  # noqa: ARG002
        image: tuple[float, float],  # noqa: ARG002
        read: tuple[int, int] | None = None,  # noqa: ARG002
    ) -> Float[Tensor, "*n 4"] | None:
        """Top, left, height and width in pixels of tokens on an image of that size; None if they lie nowhere on it.

        `read` is the size of the image that was read, where it is not the bank's own.
        """
        return None

    def no_weight_decay(self) -> set[str]:
        return set()

    def export_refusal(self) -> str | None:
        """Why a graph that reads this bank cannot be exported; None where it can."""
        return None

    def scored_tokens(self) -> int:
        """Tokens that a reader scores at each step."""
        return self.size

    def token_macs(self) -> int:
        """Multiply-adds of computing one sample's tokens."""
        raise NoCostFormula(f"no cost formula for the tokens of {type(self).__name__}; define its method token_macs")


class NoBank(Bank):
    """An empty bank, for tapes that are not read from a bank."""

    size = 0

    def forward(self, inputs: Tensor) -> Float[Tensor, "0 0"]:
        return inputs.new_zeros(0, 0)

    def token_macs(self) -> int:
        return 0


def keys_of(tokens: Float[Tensor, "*b c d"], norm: nn.LayerNorm | None, width: int) -> Float[Tensor, "*b c width"]:
    """The first `width` coordinates of tokens after a reader's norm, in float32."""
    if norm is None:
        return tokens[..., :width].float()
    if not may_look_at(tokens) or torch.is_grad_enabled():
        return normed(tokens, norm)[..., :width].float()
    keys = tokens.new_empty(*tokens.shape[:-1], width, dtype=torch.float32)
    for part, out in zip(tokens.split(NORMED_AT_ONCE, -2), keys.split(NORMED_AT_ONCE, -2), strict=True):
        out.copy_(normed(part, norm)[..., :width])
    return keys


def normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """`norm(x)` in float32 or better."""
    if x.shape[-1] != norm.normalized_shape[-1]:
        raise ValueError(
            f"the bank's tokens have width {x.shape[-1]} and the ViT's {norm.normalized_shape[-1]}; they must be equal"
        )
    x = at_least_float32(x)
    return F.layer_norm(x, norm.normalized_shape, norm.weight.to(x.dtype), norm.bias.to(x.dtype), norm.eps)


def kind_of(value: Any) -> str:
    """What a bank of one's own gave, for an error."""
    return f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
