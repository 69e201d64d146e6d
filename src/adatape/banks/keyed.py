"""KeyedView: an opened bank in which where to look and what is there are two things."""

from __future__ import annotations

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from adatape.atr import take
from adatape.banks.base import BankView, kind_of

MakeTokens = Callable[[Int[Tensor, "b t k"]], Float[Tensor, "b t k d"]]


class KeyedView(BankView):
    """Keys that are not part of tokens, and tokens that are made only where they are read.

    `keys`, (b, c, query_width) or (c, query_width) for all samples, come from a cheap look at every place. They are
    scored as they are, without the reader's norm, and the tape's weights give them their gradient. `make` maps the
    indices that are read, (b, t, k), to tokens, (b, t, k, d).
    """

    has_own_keys = True

    def __init__(self, keys: Float[Tensor, "*b c h"], make: MakeTokens) -> None:
        self.own_keys, self.make = keys, make
        self.size, self.shared = keys.shape[-2], keys.dim() == 2

    def all(self) -> Float[Tensor, "*b c d"]:
        raise ValueError("this bank has keys of its own and makes tokens only where they are read; read it by its keys")

    def take(self, index: Int[Tensor, "b t k"]) -> Float[Tensor, "b t k d"]:
        made = self.make(index)
        if not isinstance(made, Tensor) or made.dim() != index.dim() + 1:
            asked = tuple(index.shape)
            raise ValueError(
                f"make's tokens are {kind_of(made)}; for an index of shape {asked} they must be {(*asked, 'd')}"
            )
        return made

    def keys(self, norm: nn.LayerNorm | None, width: int) -> Float[Tensor, "*b c width"]:  # noqa: ARG002
        if self.own_keys.shape[-1] != width:
            raise ValueError(
                f"the bank's keys have width {self.own_keys.shape[-1]} and query_width is {width}; they must be equal"
            )
        return self.own_keys

    def keys_read(
        self,
        index: Int[Tensor, "b t k"],
        tokens: Float[Tensor, "b t k d"],  # noqa: ARG002
        width: int,  # noqa: ARG002
    ) -> Float[Tensor, "b t k width"]:
        return take(self.own_keys, index)
