"""Models with adaptive depth by ACT: Universal Transformer, U2T and UViT."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.act import NEVER_HALT_LOGIT, Act, advance, begin, ponder_cost
from adatape.config import SIZES, Budget
from adatape.cuda_graphs import in_torch_func, is_compiling_or_capturing
from adatape.macs import (
    PartCost,
    block_macs,
    embedding_cost,
    head_cost,
    input_tokens,
    linear_macs,
    parameter_count,
    total,
)
from adatape.models.base import Adaptive, BlocksOutput, BudgetRange, OnBlock, macs_by_count
from adatape.models.registry import register, split
from adatape.reader import whole_steps
from adatape.records import Output, Steps

Level = Literal["sample", "token"]


class UniversalStage(nn.Module):
    """Repeats a transition until ACT halts; the output is the sum of states weighted by ACT.

    `level` is sample, which halts by the mean score of its tokens, or token. `signals` adds sinusoids of position and
    step before every step. Before training, a halting bias of -1 halts all samples at step 4, +1 at step 2.
    """

    def __init__(
        self,
        width: int,
        steps: int,
        *,
        level: Level = "sample",
        signals: bool = True,
        halting_bias: float = -1.0,
        epsilon: float = 0.01,
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ValueError(f"steps is {steps}; it must be at least 1")
        if level not in ("sample", "token"):
            raise ValueError(f"level is {level!r}; it must be sample or token")
        self.steps, self.level, self.signals, self.epsilon = steps, level, signals, epsilon
        self.halt = nn.Linear(width, 1)
        nn.init.zeros_(self.halt.weight)
        nn.init.constant_(self.halt.bias, halting_bias)

    def forward(
        self, x: Float[Tensor, "b n d"], transition: Callable[[int, Tensor], Tensor], steps: int
    ) -> tuple[Float[Tensor, "b n d"], Act, Float[Tensor, "b t *n"]]:
        act, out, weights = None, torch.zeros_like(x), []
        for t in range(steps):
            x = x + self._signal(x, t) if self.signals else x
            p = self._score(x)
            weight, act = advance(act or begin(p), p, last=t == steps - 1, epsilon=self.epsilon)
            x = transition(t, x)
            out = out + x * (weight[..., None] if self.level == "token" else weight[:, None, None]).to(x.dtype)
            weights.append(weight)
            if self._all_halted(act):
                break
        assert act is not None
        return out, act, torch.stack(weights, 1)

    def cost(self, inputs: int, steps: int) -> PartCost:
        return PartCost("halting", parameter_count(self), steps * inputs * linear_macs(self.halt))

    def _score(self, x: Tensor) -> Tensor:
        p = self.halt(x).squeeze(-1).float().sigmoid()
        return p if self.level == "token" else p.mean(1)

    def _signal(self, x: Tensor, t: int) -> Tensor:
        table = sinusoid(max(x.shape[1], self.steps), x.shape[2], x.device).to(x)
        return table[: x.shape[1]] + table[t]

    def _all_halted(self, act: Act) -> bool:
        """Whether to exit early; only in eager inference, since DDP needs every parameter used on every process."""
        fixed = self.training or is_compiling_or_capturing() or in_torch_func(act.running)
        return not fixed and not bool(act.running.any())


def sinusoid(count: int, width: int, device: torch.device | None = None) -> Float[Tensor, "count width"]:
    """P[i, 2j] = sin(i / 10000^(2j/d)), P[i, 2j+1] its cosine; computed on the device, as CUDA graphs need."""
    angle = torch.arange(count, device=device)[:, None] * 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]


class Repeating(Adaptive):
    """Budget and cost of a model that repeats blocks at most `steps` times."""

    adapts: ClassVar[str | None] = "depth"

    def __init__(self, vit: VisionTransformer, steps: int) -> None:
        super().__init__(vit)
        self.built_steps = self.steps = steps  # the maximum as built, and the current one

    @abstractmethod
    def parts(self, steps: int) -> list[PartCost]:
        """Parameters and multiply-adds by part for a sample that takes `steps` steps."""

    def set_budget(self, steps: int | None = None, threshold: float | None = None) -> None:
        """Sets the maximum number of steps of later calls; without arguments, as built."""
        if threshold is not None:
            raise ValueError(f"threshold is {threshold}; {type(self).__name__} has none, so set steps only")
        steps = self.built_steps if steps is None else whole_steps(steps)
        if not 1 <= steps <= self.built_steps:
            limit = f"between 1 and the {self.built_steps} that the model was built for"
            raise ValueError(f"steps is {steps}; it must be {limit}")
        self.steps = steps

    def budget_range(self) -> BudgetRange:
        return BudgetRange(1, self.built_steps, None)

    def budget(self) -> Budget:
        return Budget(self.steps)

    def cost(self, tape: int | None = None) -> list[PartCost]:
        self.refuse_tape(tape)
        return self.parts(self.steps)

    def actual_macs(self, output: Output) -> Tensor:
        if output.steps is None:
            return super().actual_macs(output)
        return macs_by_count(self.length_taken(output), lambda steps: total(self.parts(steps)).macs)


class Universal(Repeating):
    """The ViT's blocks as one universal stage: a Universal Transformer with one shared block, U2T with one per step."""

    def __init__(self, vit: VisionTransformer, steps: int, **options: Any) -> None:
        super().__init__(vit, steps)
        if len(vit.blocks) not in (1, steps):
            raise ValueError(f"the ViT has {len(vit.blocks)} blocks; for {steps} steps it needs 1 (shared) or {steps}")
        self.stage = UniversalStage(vit.embed_dim, steps, **options)

    def prune_intermediate_layers(self, indices: Any = 1, prune_norm: bool = False, prune_head: bool = True) -> Any:
        shared, taken = len(self.vit.blocks) == 1, super().prune_intermediate_layers(indices, prune_norm, prune_head)
        self.steps = self.steps if shared else min(self.steps, len(self.vit.blocks))
        return taken

    def parts(self, steps: int) -> list[PartCost]:
        blocks = list(self.vit.blocks)
        repeated = [blocks[t % len(blocks)] for t in range(steps)]
        return stage_cost(self.vit, self.stage, steps, repeated, blocks)

    def never_halt(self) -> None:
        nn.init.constant_(self.stage.halt.bias, NEVER_HALT_LOGIT)

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:  # noqa: ARG002
        blocks = self.vit.blocks
        shared = len(blocks) == 1

        def transition(t: int, state: Tensor) -> Tensor:
            state = self.run_block(blocks[0 if shared else t], state)
            if not shared:
                on_block(t, state)
            return state

        tokens, act, weights = self.stage(self.embed(x), transition, self.steps)
        if shared:
            on_block(0, tokens)
        return BlocksOutput(tokens, per_sample(ponder_cost(act)), steps=Steps(weights))


class UViT(Repeating):
    """A universal stage of one shared block before a whole ViT, or after it (`above`), which trains unstably."""

    def __init__(
        self, vit: VisionTransformer, block: nn.Module, steps: int, *, above: bool = False, **options: Any
    ) -> None:
        super().__init__(vit, steps)
        self.block, self.above = block, above
        self.stage = UniversalStage(vit.embed_dim, steps, **options)

    def parts(self, steps: int) -> list[PartCost]:
        blocks = list(self.vit.blocks)
        return stage_cost(self.vit, self.stage, steps, [self.block] * steps + blocks, [self.block, *blocks])

    def never_halt(self) -> None:
        nn.init.constant_(self.stage.halt.bias, NEVER_HALT_LOGIT)

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:  # noqa: ARG002
        tokens = self.embed(x)
        if not self.above:
            tokens, act, weights = self._ponder(tokens)
        for layer, block in enumerate(self.vit.blocks):
            tokens = self.run_block(block, tokens)
            on_block(layer, tokens)
        if self.above:
            tokens, act, weights = self._ponder(tokens)
        return BlocksOutput(tokens, per_sample(ponder_cost(act)), steps=Steps(weights))

    def _ponder(self, tokens: Tensor) -> tuple[Tensor, Act, Tensor]:
        return self.stage(tokens, lambda _, state: self.run_block(self.block, state), self.steps)


def per_sample(ponder: Tensor) -> Float[Tensor, "b"]:
    """The mean over tokens, where tokens halt separately."""
    return ponder.mean(1) if ponder.dim() == 2 else ponder


def stage_cost(
    vit: VisionTransformer, stage: UniversalStage, steps: int, runs: list[nn.Module], owned: list[nn.Module]
) -> list[PartCost]:
    """Parts of a model: multiply-adds of the blocks in `runs`, parameters of those in `owned`."""
    inputs = input_tokens(vit)
    macs = sum(block_macs(block, inputs) for block in runs)
    blocks = PartCost("blocks", parameter_count(*owned, vit.norm), macs)
    return [embedding_cost(vit), stage.cost(inputs, steps), blocks, head_cost(vit)]


STAGE_OPTIONS = ("level", "signals", "halting_bias", "epsilon")


def build_ut(steps: int = 12, **options: Any) -> Universal:
    """A Universal Transformer on images: one block, shared by all steps."""
    stage, vit = split(options, STAGE_OPTIONS)
    return Universal(VisionTransformer(**{**vit, "depth": 1}), steps, **stage)


def build_u2t(steps: int = 13, **options: Any) -> Universal:
    """U2T: a Universal Transformer without weight sharing, with more steps than ViT has layers."""
    stage, vit = split(options, STAGE_OPTIONS)
    return Universal(VisionTransformer(**{**vit, "depth": steps}), steps, **{"signals": False, **stage})


def build_uvit(steps: int = 3, above: bool = False, **options: Any) -> UViT:
    """UViT: a shallow universal stage before a ViT of full depth, or after it (`above`)."""
    stage, vit = split(options, STAGE_OPTIONS)
    block = VisionTransformer(**{**vit, "depth": 1}).blocks[0]
    return UViT(VisionTransformer(**vit), block, steps, above=above, **stage)


register("ut_tiny_patch16_224", build_ut, features=1, patch_size=16, **SIZES["tiny"])
for _size, _patch, _steps in (("tiny", 16, 13), ("small", 16, 13), ("base", 16, 15), ("base", 32, 15)):
    register(f"u2t_{_size}_patch{_patch}_224", build_u2t, steps=_steps, patch_size=_patch, **SIZES[_size])
for _size, _shape in SIZES.items():
    for _patch in (16, 32):
        _steps = 6 if _size == "large" else 3
        register(f"uvit_{_size}_patch{_patch}_224", build_uvit, steps=_steps, patch_size=_patch, **_shape)
