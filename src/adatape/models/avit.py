"""A-ViT (Yin et al. 2022): each token of a ViT halts by a score computed from its first coordinate."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.act import advance, begin, ponder_cost
from adatape.config import SIZES
from adatape.macs import block_macs, input_tokens, total
from adatape.models.base import Adaptive, BlocksOutput, OnBlock, ignore_block
from adatape.models.registry import register, split
from adatape.packing import (
    Packing,
    PendingPacking,
    full_packing,
    key_mask,
    launch_packing,
    nonzero_padded,
    packs,
    unpack,
)
from adatape.ragged_attention import PackedMask
from adatape.records import Output, Steps


class AViT(Adaptive):
    """Wraps a ViT without additional parameters; each token halts at its own layer.

    After each block a token's score is sigmoid(gamma · first coordinate + beta). It halts where the sum of its scores
    exceeds 1 - epsilon, or at the last layer; later blocks neither attend to it nor change it. Its output is the sum of
    its states weighted by ACT; the class token's output is classified. `ponder` is the mean over tokens of N + r.

    In training, `prior_weight` times the distribution prior is added to every sample's ponder, so that
    `alpha_p · ponder.mean()` is the paper's two terms when `prior_weight` is alpha_d / alpha_p. `prior_mean` is the
    layer, counted from 0, around which tokens should halt, at most the last but one.
    """

    adapts: ClassVar[str | None] = "tokens"
    no_budget: ClassVar[str] = "each token halts by its trained score"

    def __init__(
        self,
        vit: VisionTransformer,
        *,
        gamma: float = 5.0,
        beta: float = -10.0,
        epsilon: float = 0.01,
        prior_mean: float = 8.0,
        prior_weight: float = 0.0,
    ) -> None:
        super().__init__(vit)
        _check(vit, gamma, epsilon, prior_weight)
        self.gamma, self.beta, self.epsilon = gamma, beta, epsilon
        self.prior_mean, self.prior_weight = prior_mean, prior_weight
        self.packed: bool | None = None

    def set_packed(self, packed: bool | None = True) -> None:
        """Sets whether inference removes halted tokens instead of masking them; results are the same.

        Running tokens are concatenated into one row. Shapes then depend on the data: blocks may be compiled with
        dynamic=True; a model compiled as a whole and training use masks. None, as built, removes them from large
        samples on a CPU in eager inference, where that is faster; not where hooks look at blocks.
        """
        self.packed = packed

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:  # noqa: ARG002
        tokens = self.embed(x)
        removes = not self.training and packs(self.packed, tokens, self.vit.blocks)
        return self._forward_packed(tokens, on_block) if removes else self._forward_masked(tokens, on_block)

    def actual_macs(self, output: Output) -> Tensor:
        """Multiply-adds with halted tokens removed: each block counts its running tokens only."""
        if output.steps is None:
            return super().actual_macs(output)
        blocks, inputs = self.vit.blocks, input_tokens(self.vit)
        rest = total(self.cost()).macs - sum(block_macs(block, inputs) for block in blocks)
        left = tokens_per_layer(output.steps.weight).long().tolist()
        return torch.tensor(
            [rest + sum(block_macs(block, n) for block, n in zip(blocks, row, strict=True)) for row in left],
            dtype=torch.int64,
        )

    def never_halt(self) -> None:
        self.beta = -math.inf

    def _forward_masked(self, tokens: Tensor, on_block: OnBlock) -> BlocksOutput:
        """Runs every block on all tokens; halted ones are masked as keys and keep their state."""
        last, act = len(self.vit.blocks) - 1, begin(tokens[..., 0].float())
        out = torch.zeros_like(tokens, dtype=torch.float32)
        weights, scores, running = [], [], []
        for layer, block in enumerate(self.vit.blocks):
            tokens = self._masked_step(block, tokens, act.running) if layer else self.run_block(block, tokens)
            score = halting_score(tokens, self.gamma, self.beta)
            running.append(act.running)
            weight, act = advance(act, score, last=layer == last, epsilon=self.epsilon)
            out = out + weight[..., None] * tokens
            weights.append(weight)
            scores.append(score)
            on_block(layer, tokens)
        ponder = ponder_cost(act).mean(1)
        if self.training and self.prior_weight > 0:
            ponder = ponder + self.prior_weight * self._prior(torch.stack(scores, 1), torch.stack(running, 1))
        return BlocksOutput(out.to(tokens.dtype), ponder, steps=Steps(torch.stack(weights, 1)))

    def _masked_step(self, block: nn.Module, tokens: Tensor, running: Tensor) -> Tensor:
        # Where all tokens of a sample have halted, none is masked: attention to no key is NaN. Its rows are not used.
        seen = running | ~running.any(1, keepdim=True)
        stepped = self.run_block(block, tokens, attn_mask=key_mask(seen))
        return torch.where(running[..., None], stepped, tokens)

    def _forward_packed(self, tokens: Tensor, on_block: OnBlock) -> BlocksOutput:
        """Runs every block on the running tokens only; a token's weighted sum is written to `out` when it halts."""
        last, act = len(self.vit.blocks) - 1, begin(tokens[..., 0].float())
        shape, rows, packing = (tokens.shape[0], tokens.shape[1]), tokens.flatten(0, 1), full_packing(act.running)
        mixed, weights = torch.zeros_like(rows, dtype=torch.float32), []
        states, out = rows, torch.zeros_like(mixed)
        for layer, block in enumerate(self.vit.blocks):
            rows = self._packed_step(block, rows, packing)
            score = unpack(halting_score(rows, self.gamma, self.beta)[None], packing, shape)
            weight, act = advance(act, score, last=layer == last, epsilon=self.epsilon)
            left = launch_packing(act.running) if layer < last else None
            mixed = torch.addcmul(mixed, weight.flatten()[packing.indices, None], rows)
            weights.append(weight)
            if on_block is not ignore_block:
                states = states.index_copy(0, packing.indices, rows.to(states.dtype))
                on_block(layer, states.view_as(tokens))
            if left is not None:
                packing, rows, mixed = _drop_halted(act.running, left, packing, rows, mixed, out)
        out = out.index_copy_(0, packing.indices, mixed).view_as(tokens)
        return BlocksOutput(out.to(rows.dtype), ponder_cost(act).mean(1), steps=Steps(torch.stack(weights, 1)))

    def _packed_step(self, block: nn.Module, rows: Float[Tensor, "n d"], packing: Packing) -> Float[Tensor, "n d"]:
        if not rows.shape[0]:
            return rows
        mask = None if packing.is_uniform else PackedMask(packing)
        return self.run_block(block, rows.unflatten(0, packing.shape), attn_mask=mask).flatten(0, 1)

    def _prior(self, scores: Tensor, running: Tensor) -> Tensor:
        depth = scores.shape[1]
        target = gaussian_target(depth, min(self.prior_mean, depth - 2.0), scores.device)
        return distribution_prior(halting_mean(scores, running), target)


def _drop_halted(
    running: Bool[Tensor, "b n"], left: PendingPacking, packing: Packing, rows: Tensor, mixed: Tensor, out: Tensor
) -> tuple[Packing, Tensor, Tensor]:
    """Repacks the running rows, and writes the weighted sums of those that have halted to `out`."""
    still = running.flatten().index_select(0, packing.indices)
    gone, stay = nonzero_padded(~still), nonzero_padded(still)
    after, before = left.sync(), rows.shape[0]
    count = after.indices.shape[0]
    if count == before:
        return packing, rows, mixed
    gone, stay = gone[: before - count], stay[:count]
    rows = rows.index_select(0, stay)
    out.index_copy_(0, packing.indices.index_select(0, gone), mixed.index_select(0, gone))
    return after, rows, mixed.index_select(0, stay)


def halting_score(tokens: Float[Tensor, "*n d"], gamma: float, beta: float) -> Float[Tensor, "*n"]:
    """h = sigmoid(gamma · e₀ + beta), in float32 also under autocast."""
    return (gamma * tokens[..., 0].float() + beta).sigmoid()


def halting_mean(score: Float[Tensor, "b l n"], running: Bool[Tensor, "b l n"]) -> Float[Tensor, "l"]:
    """The mean score of each layer over all running tokens of the batch but class tokens; 0 if none runs.

    The last layer counts with its own score, not with the 1 that forces it to halt, which would dominate the others.
    """
    score, running = score[..., 1:], running[..., 1:]
    return (score * running).sum((0, 2)) / running.sum((0, 2)).clamp(min=1)


def gaussian_target(depth: int, mean: float, device: torch.device | None = None) -> Float[Tensor, "depth"]:
    """A Gaussian of standard deviation 1 at layers 0 to depth - 1, normalised to sum to 1."""
    return (-0.5 * (torch.arange(depth, device=device) - mean).square()).softmax(0)


def distribution_prior(halting_mean: Float[Tensor, "l"], target: Float[Tensor, "l"]) -> Float[Tensor, ""]:
    """KL(target ‖ H), both normalised over layers and clamped to [0.01, 0.99]."""
    target, halting = _bounded_shares(target), _bounded_shares(halting_mean)
    return (target * (target.log() - halting.log())).sum()


def _bounded_shares(amount: Tensor) -> Tensor:
    """Normalises, clamps to [0.01, 0.99] and normalises again: KL is non-negative only between distributions."""
    share = (amount / amount.sum().clamp(min=torch.finfo(amount.dtype).tiny)).clamp(0.01, 0.99)
    return share / share.sum()


def tokens_per_layer(weight: Float[Tensor, "b l n"]) -> Float[Tensor, "b l"]:
    """The number of tokens of each sample that enter each layer, from `Output.steps.weight`.

    The halting step has a weight of at least epsilon, so a token runs as long as it has weight in this or later layers.
    """
    ahead = weight.flip(1).cumsum(1).flip(1)
    return (ahead > 0).float().sum(2)


def _check(vit: VisionTransformer, gamma: float, epsilon: float, prior_weight: float) -> None:
    if vit.cls_token is None:
        raise ValueError("class_token is False; A-ViT classifies the class token, so it must be True")
    if vit.global_pool != "token":
        raise ValueError(f"global_pool is {vit.global_pool!r}; A-ViT classifies the class token, so it must be 'token'")

    if not gamma > 0:
        raise ValueError(f"gamma is {gamma}; it must be above 0, so that a larger first coordinate halts earlier")
    if not 0 < epsilon < 1:
        raise ValueError(f"epsilon is {epsilon}; it must be above 0 and below 1")
    if not prior_weight >= 0:
        raise ValueError(f"prior_weight is {prior_weight}; it must be at least 0; 0 disables the prior")


OPTIONS = ("gamma", "beta", "epsilon", "prior_mean", "prior_weight")


def build_avit(**options: Any) -> AViT:
    """An A-ViT from scratch; `options` are arguments of AViT and of timm's VisionTransformer."""
    own, vit = split(options, OPTIONS)
    return AViT(VisionTransformer(**vit), **own)


for _size in ("tiny", "small"):
    register(f"avit_{_size}_patch16_224", build_avit, patch_size=16, **SIZES[_size])
