"""Parameters and multiply-adds by part, from shapes alone. One multiply-add counts as 1, as in the paper.

Matmuls, convolutions and attention are counted, as `torch.utils.flop_counter.FlopCounterMode` does; gathers, norms,
softmax and other elementwise work are not. A test holds the two equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import singledispatch
from typing import NamedTuple

from timm.layers import PatchEmbed
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from adatape.ablation import ActReader, FixedTokens, ParallelReader
from adatape.banks import InputBank, LearnedBank, NoBank
from adatape.encoder import TapeBlock, listens
from adatape.models.adaptive import Adaptive
from adatape.models.adatape import AdaTape
from adatape.models.ponder import PonderNet
from adatape.models.sequence import NoTokens, SymbolEmbed
from adatape.models.universal import Universal, UViT
from adatape.models.vit import ThreeFeedForwards
from adatape.reader import TapeReader
from adatape.selective import SelectiveReader


class Part(NamedTuple):
    """One part of a model: what it holds, and what it does for one sample."""

    name: str
    parameters: int
    macs: int


class NoCostFormula(TypeError):  # noqa: N818
    """A kind of model or module whose multiply-adds are not known."""


def cost(model: nn.Module, tape: int | None = None) -> list[Part]:
    """The parts of a model for one sample that reads `tape` tokens; None is the bound, all that its budget allows."""
    if isinstance(model, AdaTape):
        return _adatape(model, model.reader.steps if tape is None else tape)
    if tape is not None:
        raise ValueError(f"tape is {tape}; {type(model).__name__} reads none")
    if isinstance(model, PonderNet):
        return _ponder(model)
    if isinstance(model, Universal):
        return _universal(model, list(model.vit.blocks), model.steps)
    if isinstance(model, UViT):
        return _universal(model, [model.block], model.steps, below=list(model.vit.blocks))
    if isinstance(model, Adaptive):
        return _vit(model.vit)
    if isinstance(model, VisionTransformer):
        return _vit(model)
    known = "timm's VisionTransformer and its wrappers"
    raise NoCostFormula(f"no cost formula for {type(model).__name__}; known are {known}")


def total(parts: Iterable[Part]) -> Part:
    parts = list(parts)
    return Part("total", sum(part.parameters for part in parts), sum(part.macs for part in parts))


def _vit(vit: VisionTransformer) -> list[Part]:
    inputs = input_tokens(vit)
    blocks = sum(block_macs(block, inputs, 0) for block in vit.blocks)
    return [_embedding(vit), Part("blocks", _count(vit.blocks, vit.norm), blocks), _head(vit)]


def _ponder(model: PonderNet) -> list[Part]:
    """Every step that the budget allows, and one answer; with `output=True` each step answers."""
    vit, inputs = model.vit, input_tokens(model.vit)
    return [
        _embedding(vit),
        Part("halting", _count(model.halt), model.steps * _per_token(model.halt)),
        Part("blocks", _count(vit.blocks, vit.norm), model.steps * block_macs(vit.blocks[0], inputs, 0)),
        _head(vit),
    ]


def _adatape(model: AdaTape, tape: int) -> list[Part]:
    vit, reader = model.vit, model.reader
    most = max(reader.steps, reader.reading.steps)
    if not 0 <= tape <= most:
        raise ValueError(f"tape is {tape}; this model reads between 0 and {most} tokens")
    inputs, own_ffns = input_tokens(vit), [model.append_mlp]
    blocks = 0
    for layer, block in enumerate(vit.blocks):
        if model.still <= layer < model.leave and listens(block):
            blocks += listen_macs(block, inputs, tape)
        else:
            blocks += block_macs(block, inputs, tape if model.layer <= layer < model.leave else 0)
        if isinstance(block, TapeBlock):
            own_ffns.append(block.tape_mlp)
    own, gate = _count(*own_ffns), [] if model.gate is None else [model.gate]
    return [
        _embedding(vit),
        Part("bank", _count(model.bank), token_macs(model.bank) if tape else 0),
        Part("reader", _count(reader), _read_macs(model.reader, model.bank.size, tape)),
        *([] if model.guess is None else [_guess(model.guess, reader.steps)]),
        Part("blocks", _count(vit.blocks, vit.norm, *gate) - own + _count(model.append_mlp), blocks),
        Part("tape feed-forwards", own, tape * sum(_per_token(ffn) for ffn in own_ffns)),
        _head(vit),
    ]


def _guess(guess: nn.Module, steps: int) -> Part:
    """Made wherever something might be read."""
    return Part("guess", _count(guess), _per_token(guess) if steps else 0)


def _universal(
    model: Universal | UViT, stage: list[nn.Module], steps: int, below: list[nn.Module] | None = None
) -> list[Part]:
    """The stage's blocks, shared or not, for all the steps that its budget allows, and a ViT's blocks once each."""
    vit, blocks = model.vit, below or []
    inputs = input_tokens(vit)
    repeated = sum(block_macs(stage[t % len(stage)], inputs, 0) for t in range(steps))
    once = sum(block_macs(block, inputs, 0) for block in blocks)
    return [
        _embedding(vit),
        Part("halting", _count(model.stage), steps * inputs * _per_token(model.stage.halt)),
        Part("blocks", _count(*stage, *blocks, vit.norm), repeated + once),
        _head(vit),
    ]


def _read_macs(reader: TapeReader | FixedTokens, bank_size: int, tape: int) -> int:
    """Scores of the whole bank, once or at each step; with ACT a halting score for each token."""
    if isinstance(reader, FixedTokens) or tape == 0:
        return 0
    if isinstance(reader, SelectiveReader):
        asked = _per_token(reader.ask) + _per_token(reader.need)
        return asked + bank_size * (_per_token(reader.answer) + reader.reading.query_width)
    passes = 1 if isinstance(reader, ParallelReader) else tape
    halting = tape * _per_token(reader.halt) if isinstance(reader, ActReader) else 0
    return passes * bank_size * reader.reading.query_width + halting


def _embedding(vit: VisionTransformer) -> Part:
    loose = [vit.pos_embed, vit.cls_token, vit.reg_token]
    parameters = _count(vit.patch_embed, vit.norm_pre) + sum(p.numel() for p in loose if isinstance(p, nn.Parameter))
    return Part("patch embedding", parameters, token_macs(vit.patch_embed))


def _head(vit: VisionTransformer) -> Part:
    return Part("head", _count(vit.head, vit.fc_norm), _per_token(vit.head))


def block_macs(block: Block, inputs: int, tape: int) -> int:
    """Attention over all rows, and timm's feed-forward for the rows that have no other."""
    rows = inputs + tape
    attention = 2 * rows * rows * block.attn.attn_dim
    return rows * _per_token(block.attn) + attention + _fed_macs(block, inputs, tape)


def listen_macs(block: Block, inputs: int, tape: int) -> int:
    """The inputs' share of a block, and of the tape keys and values."""
    return block_macs(block, inputs, 0) + 2 * tape * block.attn.attn_dim * (block.attn.qkv.in_features + inputs)


def _fed_macs(block: Block, inputs: int, tape: int) -> int:
    if isinstance(block, ThreeFeedForwards):
        first = (inputs - 1) // 2
        fed = ((1, block.mlp), (first, block.mlp_first), (inputs - 1 - first, block.mlp_second))
        return sum(rows * _per_token(mlp) for rows, mlp in fed)
    rows = inputs if isinstance(block, TapeBlock) else inputs + tape
    return rows * _per_token(block.mlp)


def input_tokens(vit: VisionTransformer) -> int:
    return vit.patch_embed.num_patches + vit.num_prefix_tokens


def _per_token(module: nn.Module) -> int:
    return sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, nn.Linear))


def _count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@singledispatch
def token_macs(module: nn.Module) -> int:
    """Multiply-adds of making a sample's tokens."""
    raise NoCostFormula(f"no cost formula for the tokens of {type(module).__name__}")


@token_macs.register
def _(module: PatchEmbed) -> int:
    return module.num_patches * module.proj.weight.numel()


@token_macs.register
def _(module: InputBank) -> int:
    return token_macs(module.h1) + module.size * _per_token(module.h2)


@token_macs.register(LearnedBank)
@token_macs.register(NoBank)
@token_macs.register(NoTokens)
def _(module: nn.Module) -> int:  # noqa: ARG001
    return 0


@token_macs.register
def _(module: SymbolEmbed) -> int:
    return module.size * _per_token(module.proj)
