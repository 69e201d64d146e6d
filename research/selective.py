"""An alternative to the paper's reader: a trained gate for every bank token, in one step.

model = build_selective(img_size=32, patch_size=8, bank_patch=4, embed_dim=192, num_heads=3, steps=12)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.atr import at_least_float32, take
from adatape.banks import Bank
from adatape.config import ReaderConfig
from adatape.counter_rng import keys_of, uniform
from adatape.macs import linear_macs
from adatape.models.adatape import AdaTape
from adatape.models.build import BankName, build, default_reader_config, wrap
from adatape.models.execution import BlocksInput
from adatape.models.join import TapeJoin
from adatape.reader import TapeReader
from adatape.records import Tape

FLOOR = 0.5


class SelectiveReader(TapeReader):
    """Reads the bank tokens whose gates exceed `floor`, unmerged, best first.

    A token's gate is the sigmoid of its score: an inner product of trained projections of query and token, plus a
    linear function of the query. At most `steps` tokens are read, until the gates sum to `threshold`, and always the
    best one; for a model from scratch the default threshold is never reached. log g is added to the scores of the
    token's key (`token_bias`), so that the gate gets a gradient from every block; a factor on the token itself would be
    divided out by the first LayerNorm. Ponder is the sum of the gates read.

    In training, each sample's floor is uniform between 0 and twice `floor`, so that tokens below the floor get a
    gradient too, and one model can be used with any floor.
    """

    use_kernels, always_full = False, False

    def __init__(self, width: int, reading: ReaderConfig, bank_size: int, floor: float = FLOOR) -> None:
        super().__init__(width, dataclasses.replace(reading, bank_dropout=0.0), bank_size)
        self.reading = reading  # hidden tokens only make a gated tape shorter
        self.built_floor = floor
        self.set_floor()
        self.ask, self.answer = nn.Linear(width, reading.query_width), nn.Linear(width, reading.query_width, bias=False)
        self.need = nn.Linear(width, 1)
        for layer in (self.ask, self.answer):
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(self.ask.bias)
        nn.init.zeros_(self.need.weight)
        nn.init.ones_(self.need.bias)  # initial gates are 0.73 on average, so that all tokens can be read

    @staticmethod
    def tokens_needed(reading: ReaderConfig) -> int:
        return reading.steps

    def set_floor(self, floor: float | None = None) -> None:
        """Sets the smallest gate that is read; without an argument, as built."""
        floor = self.built_floor if floor is None else floor
        _check_floor(floor)
        self.floor = floor

    def read(self, query: Tensor, bank: Tensor, taken: Tensor | None, key: Tensor | None = None) -> Tape:
        score = self._scores(query, bank)
        if taken is not None:
            score = score.masked_fill(taken, -math.inf)
        index = most_worth(score, self.steps)
        gate = score.gather(1, index).sigmoid()
        floor = self._drawn_floor(query, key) if self.training else self.floor
        visible = (gate > floor) & (_sum_before(gate) < self.threshold)
        visible = torch.cat([torch.ones_like(visible[:, :1]), visible[:, 1:]], 1)
        return Tape(
            tokens=take(bank, index) * visible[..., None],
            mask=visible,
            index=index[..., None].masked_fill(~visible[..., None], -1),
            weight=(gate * visible)[..., None],
            length=visible.sum(1),
            ponder=(gate * visible).sum(1),
        )

    def export_refusal(self) -> str:
        return "reader is selective; its gates weigh attention, which exported graphs do not take yet"

    def macs(self, bank_size: int, tape: int) -> int:
        """Multiply-adds of projecting query and bank, and of one score per bank token."""
        asked = linear_macs(self.ask) + linear_macs(self.need)
        return asked + bank_size * (linear_macs(self.answer) + self.reading.query_width) if tape else 0

    def _scores(self, query: Float[Tensor, "b d"], bank: Float[Tensor, "*b c d"]) -> Float[Tensor, "b c"]:
        asked, answers = at_least_float32(self.ask(query)), at_least_float32(self.answer(bank))
        d = asked @ answers.mT if answers.dim() == 2 else (answers @ asked[..., None]).squeeze(-1)
        return d / self.reading.query_width**0.5 + at_least_float32(self.need(query))

    def _drawn_floor(self, like: Float[Tensor, "b d"], key: Int[Tensor, "b"] | None) -> Float[Tensor, "b 1"]:
        if key is None:
            return 2 * self.floor * torch.rand(like.shape[0], 1, device=like.device)
        return 2 * self.floor * uniform(keys_of(4, key), 1)


def _sum_before(gate: Float[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """For each gate the sum of those before it; cumsum is not deterministic on a GPU."""
    ahead = torch.ones(gate.shape[1], gate.shape[1], device=gate.device, dtype=gate.dtype).tril(-1)
    return (ahead * gate[:, None]).sum(-1)


def _check_floor(floor: float) -> None:
    if not 0 < floor < 1:
        raise ValueError(f"floor is {floor}; it must be above 0 and below 1")


def most_worth(score: Float[Tensor, "b c"], k: int) -> Int[Tensor, "b k"]:
    """As `atr.highest`, by one stable sort, since k may be large here."""
    return score.detach().sort(descending=True, stable=True).indices[:, :k]


def token_bias(visible: Bool[Tensor, "b m"], weight: Float[Tensor, "b t"]) -> Float[Tensor, "b 1 1 m"]:
    """The attention bias: 0 for inputs, the log-weight for tape rows, -∞ for hidden rows."""
    inputs = weight.new_ones(visible.shape[0], visible.shape[1] - weight.shape[1])
    seen = torch.where(visible, torch.cat([inputs, weight], 1), 1.0)  # log(0) of a hidden row would make gradients NaN
    return seen.log().masked_fill(~visible, -math.inf)[:, None, None]


class SelectiveAdaTape(AdaTape):
    """AdaTape with the selective reader: gates weight attention to tape rows, which are not pooled."""

    def __init__(
        self, vit: VisionTransformer, bank: Bank, reading: ReaderConfig, join: TapeJoin, floor: float = FLOOR
    ) -> None:
        super().__init__(vit, bank, dataclasses.replace(reading, bank_dropout=0.0), join)
        self.reader = SelectiveReader(vit.embed_dim, reading, bank.size, floor)
        self.pooled = False

    def attention_masks(self, blocks_input: BlocksInput, tape: Tape) -> Sequence[Any]:
        """Biases of the tokens' gates, and of the heads' gates if there are any."""
        own = token_bias(blocks_input.visible, tape.weight.squeeze(-1)).to(blocks_input.rows.dtype)
        masks = super().attention_masks(blocks_input, tape)
        return [own] * len(masks) if self.gate is None else [bias + own for bias in masks]


def build_selective(floor: float = FLOOR, bank: BankName = "input", **options: Any) -> SelectiveAdaTape:
    """A model from scratch with the options of `adatape.models.build.build`; by default without a threshold."""
    bank_dropout = options.get("bank_dropout", default_reader_config(bank).bank_dropout)
    return _selective(build(bank=bank, **_settled(options)), floor, bank_dropout)


def wrap_selective(
    vit: VisionTransformer, floor: float = FLOOR, bank: BankName | Bank = "input", **options: Any
) -> SelectiveAdaTape:
    """Wraps an existing ViT with the options of `adatape.wrap`."""
    bank_dropout = options.get("bank_dropout", default_reader_config(bank).bank_dropout)
    made = _selective(wrap(vit, bank, **_settled(options)), floor, bank_dropout)
    made.to(next(vit.parameters())).train(vit.training)
    return made


def _settled(options: dict[str, Any]) -> dict[str, Any]:
    """Default options: a threshold of `steps`, which gates of at most 1 never reach, and no check of hidden tokens."""
    return {"threshold": float(options.get("steps", ReaderConfig.steps)), "merge": 1, **options, "bank_dropout": 0.0}


def _selective(made: AdaTape, floor: float, bank_dropout: float) -> SelectiveAdaTape:
    reading = dataclasses.replace(made.reader.reading, bank_dropout=bank_dropout)
    return SelectiveAdaTape(made.vit, made.bank, reading, made.join, floor)
