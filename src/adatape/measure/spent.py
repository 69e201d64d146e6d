"""What each sample really cost, from what its `Output` says was read, repeated or kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from adatape.measure.cost import block_macs, cost, input_tokens, total
from adatape.models.adaptive import Adaptive
from adatape.models.adatape import AdaTape
from adatape.models.avit import AViT, tokens_per_layer
from adatape.models.ponder import PonderNet
from adatape.models.universal import Universal, UViT
from adatape.records import Output


def spent_macs(model: nn.Module, output: Output) -> Tensor:
    """Multiply-adds of each sample, (b,) int64: the cost formula at its own tape length, depth, or tokens per layer."""
    if isinstance(model, AdaTape) and output.tape is not None:
        return _by_count(output.tape.length, lambda tape: total(cost(model, tape)).macs)
    if isinstance(model, AViT) and output.steps is not None:
        return _avit(model, output.steps.weight)
    if isinstance(model, PonderNet | Universal | UViT) and output.steps is not None:
        return _by_count(steps_taken(model, output), lambda steps: _at_depth(model, steps))
    return torch.full((output.logits.shape[0],), total(cost(model)).macs)


def _by_count(counts: Tensor, macs: Callable[[int], int]) -> Tensor:
    """The formula is asked once for each count that occurs."""
    table = {count: macs(count) for count in counts.unique().tolist()}
    return torch.tensor([table[count] for count in counts.tolist()])


def _at_depth(model: PonderNet | Universal | UViT, steps: int) -> int:
    budget = model.steps
    try:
        model.steps = steps
        return total(cost(model)).macs
    finally:
        model.steps = budget


def _avit(model: AViT, weight: Tensor) -> Tensor:
    """Tokens that have halted are gone: each block costs what its remaining tokens cost."""
    blocks, all_tokens = model.vit.blocks, input_tokens(model.vit)
    rest = total(cost(model)).macs - sum(block_macs(block, all_tokens, 0) for block in blocks)
    left = tokens_per_layer(weight).long().tolist()
    return torch.tensor(
        [rest + sum(block_macs(block, n, 0) for block, n in zip(blocks, row, strict=True)) for row in left]
    )


def steps_taken(model: nn.Module, output: Output) -> Tensor:
    """Tape tokens of each sample, or the steps until it halted; PonderNet's are expected ones."""
    if output.tape is not None:
        return output.tape.length
    if output.steps is None:
        return torch.zeros_like(output.logits[:, 0], dtype=torch.int64)
    weight = output.steps.weight
    if isinstance(model, PonderNet):
        numbers = torch.arange(1, weight.shape[1] + 1, device=weight.device)
        return ((weight * numbers).sum(1) + 0.5).long()
    taken = (weight > 0).sum(1)  # where tokens halt apart, the sample runs as long as any of them
    return taken.flatten(1).amax(1) if taken.dim() > 1 else taken


@torch.no_grad()
def typical_gflops(model: Adaptive, samples: int = 8, seed: int = 0) -> float:
    """The mean over noise images: before training, what halting alone would save."""
    channels, (height, width) = model.vit.in_chans, model.vit.patch_embed.img_size
    noise = torch.randn(samples, channels, height, width, generator=torch.Generator().manual_seed(seed))
    return spent_macs(model, model.eval()(noise, output=True)).double().mean().item() / 1e9
