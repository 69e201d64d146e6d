"""PonderNet (Banino et al. 2021) on images: every step has logits, and a learned halting distribution weights them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.act import NEVER_HALT_LOGIT
from adatape.config import SIZES
from adatape.counter_rng import check_keys, uniform
from adatape.cuda_graphs import in_torch_func, is_compiling_or_capturing
from adatape.losses import LossName
from adatape.macs import PartCost, block_macs, embedding_cost, head_cost, input_tokens, linear_macs, parameter_count
from adatape.models.base import BlocksOutput, OnBlock
from adatape.models.registry import register, split
from adatape.models.universal import Repeating, sinusoid
from adatape.records import Output, Steps

Halting = Literal["expected", "sample"]


def log_halting(score: Float[Tensor, "b t"]) -> Float[Tensor, "b t+1"]:
    """log p of halting at each of t steps, where λ = sigmoid(score), and log of the remaining probability."""
    stayed = F.pad(F.logsigmoid(-score).cumsum(1), (1, 0))
    return stayed + F.pad(F.logsigmoid(score), (0, 1))


def log_prior(steps: int, lambda_p: float, device: torch.device | None = None) -> Float[Tensor, " steps"]:
    """log of the geometric distribution λ_p (1 - λ_p)^(n-1), truncated after `steps` and renormalised."""
    return (torch.arange(steps, device=device) * math.log1p(-lambda_p)).log_softmax(0)


def divergence(log_p: Float[Tensor, "b t"], log_q: Float[Tensor, " t"]) -> Float[Tensor, " b"]:
    """KL(p || q) of each sample."""
    return (log_p.exp() * (log_p - log_q)).sum(1)


class Answer(NamedTuple):
    """The step whose logits are the answer, and whether later steps can no longer change it."""

    step: Tensor  # (b,) int64, counted from 0
    halted: Tensor  # (b,) bool


def expected_answer(score: Float[Tensor, "b t"], steps: int) -> Answer:
    """The step nearest the expected halting step Σ n p_n, a half rounded up.

    The remaining probability falls on steps between the next and the last, which bounds the expectation.
    """
    log_p = log_halting(score[:, : steps - 1].nan_to_num())  # of NaN, whose logits are NaN too, any step is the answer
    p, rest = log_p[:, :-1].exp(), log_p[:, -1].exp()
    known = (p * torch.arange(1, p.shape[1] + 1, device=p.device)).sum(1)
    least, most = ((known + rest * late + 0.5).floor().long() for late in (log_p.shape[1], steps))
    return Answer(least - 1, (least == most) & (least <= score.shape[1]))


def sampled_answer(score: Float[Tensor, "b t"], draws: Float[Tensor, "b steps"]) -> Answer:
    """The first step whose Bernoulli(λ_n) draw is 1, from uniform numbers; the last step has λ = 1."""
    taken, steps = score.shape[1], draws.shape[1]
    last = torch.arange(taken, device=score.device) == steps - 1
    halts = (draws[:, :taken] < score.sigmoid()) | last
    return Answer(halts.int().argmax(1), halts.any(1))


def ponder_loss(output: Output, label: Int[Tensor, " b"] | Float[Tensor, "b c"]) -> Float[Tensor, ""]:
    """Σ_n p_n · cross-entropy(y_n, label), averaged over the batch; labels are class indices or probabilities."""
    if output.steps is None or output.steps.logits is None:
        raise ValueError("output.steps has no logits; ponder_loss needs those of every step, as PonderNet returns them")
    weight, logits = output.steps.weight, output.steps.logits
    target = label[..., None].expand(*label.shape, weight.shape[1])
    each = F.cross_entropy(logits.transpose(1, 2).float(), target, reduction="none")
    return (weight * each).sum(1).mean()


class Trace(NamedTuple):
    """The results of all steps taken; `answer` is None in training, where all steps are averaged."""

    features: Tensor  # (b, t, d), the classifier's input
    score: Tensor  # (b, t), λ_n is its sigmoid
    answer: Tensor | None  # (b,) int64


class PonderNet(Repeating):
    """One shared block, repeated; step n has logits y_n and halts with probability λ_n, the last with probability 1.

    In training the logits are Σ p_n y_n. In inference they are those of one step: `halting="expected"` takes the step
    nearest the expected halting step, `halting="sample"` draws it. Before training λ_n is the prior's λ_p, unless
    `halting_bias` is given.
    """

    signals: Tensor

    def __init__(
        self,
        vit: VisionTransformer,
        steps: int = 12,
        *,
        lambda_p: float = 0.2,
        halting: Halting = "expected",
        halting_bias: float | None = None,
    ) -> None:
        super().__init__(vit, steps)
        _check(vit, steps, lambda_p, halting)
        self.lambda_p, self.halting = lambda_p, halting
        # Halting scores keep the pooling that they were trained with if reset_classifier changes global_pool.
        self.pooling = vit.global_pool or "avg"
        self.register_buffer("signals", sinusoid(steps, vit.embed_dim), persistent=False)
        self.halt = nn.Linear(vit.embed_dim, 1)
        nn.init.zeros_(self.halt.weight)
        nn.init.constant_(self.halt.bias, math.log(lambda_p / (1 - lambda_p)) if halting_bias is None else halting_bias)

    def init_non_persistent_buffers(self) -> None:
        """Makes the signals anew; timm calls it where a model was built without memory."""
        self.signals = sinusoid(self.built_steps, self.vit.embed_dim).to(self.halt.weight)

    def parts(self, steps: int) -> list[PartCost]:
        """Counts the head once; with `output=True` it runs at every step."""
        vit, macs = self.vit, steps * block_macs(self.vit.blocks[0], input_tokens(self.vit))
        return [
            embedding_cost(vit),
            PartCost("halting", parameter_count(self.halt), steps * linear_macs(self.halt)),
            PartCost("blocks", parameter_count(vit.blocks, vit.norm), macs),
            head_cost(vit),
        ]

    def length_taken(self, output: Output) -> Tensor:
        """The expected number of steps, rounded."""
        if output.steps is None:
            return super().length_taken(output)
        weight = output.steps.weight
        numbers = torch.arange(1, weight.shape[1] + 1, device=weight.device)
        return ((weight * numbers).sum(1) + 0.5).long()

    def main_loss(self, output: Output, target: Tensor, kind: LossName) -> Tensor:
        """The expected loss: that of every step's logits, weighted by p_n."""
        if kind != "softmax":
            raise ValueError(f"kind is {kind!r}; PonderNet's loss is that of one label, so it must be 'softmax'")
        return ponder_loss(output, target)

    def never_halt(self) -> None:
        nn.init.constant_(self.halt.bias, NEVER_HALT_LOGIT)

    def export_refusal(self) -> str | None:
        if self.halting == "sample":
            return "halting is 'sample'; an exported graph is deterministic, so use 'expected'"
        return None

    def forward(self, x: Tensor, output: bool = False, key: Tensor | None = None) -> Tensor | Output:
        """Without `output`, inference stops once every sample's answer is settled; `Output` needs p of all steps."""
        check_keys(key, x)
        trace = self._ponder(self._rescaled(x), key, all_steps=output)
        features = self._features(trace)
        logits = self.vit.head(features)
        if not output:
            return logits
        ponder, steps = self._ponder_and_steps(trace)
        return Output(logits, features, ponder, steps=steps)

    def forward_blocks(self, x: Tensor, on_block: OnBlock, key: Tensor | None) -> BlocksOutput:
        """Returns the tokens of each sample's answering step; in training, of the last step."""
        states: list[Tensor] = []
        trace = self._ponder(x, key, all_steps=True, keep=states.append)
        tokens = states[-1] if trace.answer is None else _pick(torch.stack(states, 1), trace.answer)
        on_block(0, tokens)
        ponder, steps = self._ponder_and_steps(trace)
        return BlocksOutput(tokens, ponder, steps=steps)

    def _ponder(
        self, x: Tensor, key: Tensor | None, all_steps: bool, keep: Callable[[Tensor], None] | None = None
    ) -> Trace:
        state = self.embed(x)
        draws = self._draws(state, key)
        features, scores = [], []
        for t in range(self.steps):
            state = self.run_block(self.vit.blocks[0], state + self.signals[t].to(state.dtype))
            if keep:
                keep(state)
            normed = self.vit.norm(state)
            features.append(self.vit.forward_head(normed, pre_logits=True))
            scores.append(self._score(normed))
            if not all_steps and self._all_halted(scores, draws):
                break
        score = torch.stack(scores, 1)
        answer = None if self.training else self._answer(score, draws).step
        return Trace(torch.stack(features, 1), score, answer)

    def _features(self, trace: Trace) -> Float[Tensor, "b ..."]:
        """Features of the answering step; in training their mean under p, so that the affine head gives Σ p_n y_n."""
        if trace.answer is None:
            features, p = trace.features, self._log_p(trace).exp()
            return (features * p.view(*p.shape, *[1] * (features.dim() - 2))).sum(1).to(features.dtype)
        return _pick(trace.features, trace.answer)

    def _score(self, normed: Tensor) -> Float[Tensor, " b"]:
        pooled = self.vit.fc_norm(self.vit.pool(normed, self.pooling))
        return self.halt(pooled).squeeze(-1).float()

    def _draws(self, like: Tensor, key: Tensor | None) -> Float[Tensor, "b steps"] | None:
        """Uniform numbers for all steps at once, so that an early exit leaves the same random state."""
        if self.training or self.halting != "sample":
            return None
        if key is not None:
            return uniform(key, self.steps)
        return torch.rand(like.shape[0], self.steps, device=like.device)

    def _answer(self, score: Tensor, draws: Tensor | None) -> Answer:
        return expected_answer(score, self.steps) if draws is None else sampled_answer(score, draws)

    def _all_halted(self, scores: list[Tensor], draws: Tensor | None) -> bool:
        """Whether to exit early; only in eager inference, since DDP needs every parameter used on every process."""
        if self.training or is_compiling_or_capturing() or in_torch_func(scores[0]):
            return False
        return bool(self._answer(torch.stack(scores, 1), draws).halted.all())

    def _log_p(self, trace: Trace) -> Float[Tensor, "b t"]:
        """log p of each step; the last has the remaining probability."""
        return log_halting(trace.score[:, : self.steps - 1])

    def _ponder_and_steps(self, trace: Trace) -> tuple[Float[Tensor, " b"], Steps]:
        log_p = self._log_p(trace)
        ponder = divergence(log_p, log_prior(self.steps, self.lambda_p, log_p.device))
        return ponder, Steps(log_p.exp(), self.vit.head(trace.features))


def _pick(x: Float[Tensor, "b t ..."], step: Int[Tensor, " b"]) -> Float[Tensor, "b ..."]:
    return x[torch.arange(x.shape[0], device=x.device), step]


def _check(vit: VisionTransformer, steps: int, lambda_p: float, halting: str) -> None:
    if len(vit.blocks) != 1:
        raise ValueError(f"the ViT has {len(vit.blocks)} blocks; PonderNet repeats one, so it must have 1")
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be at least 1")
    if not 0 < lambda_p < 1:
        raise ValueError(f"lambda_p is {lambda_p}; it must be a probability above 0 and below 1")
    if halting not in ("expected", "sample"):
        raise ValueError(f"halting is {halting!r}; it must be expected or sample")


PONDER_OPTIONS = ("lambda_p", "halting", "halting_bias")


def build_ponder(steps: int = 12, **options: Any) -> PonderNet:
    """PonderNet on images: one block, shared by all steps."""
    ponder, vit = split(options, PONDER_OPTIONS)
    return PonderNet(VisionTransformer(**{**vit, "depth": 1}), steps, **ponder)


for _size in ("tiny", "small"):
    register(f"ponder_{_size}_patch16_224", build_ponder, features=1, patch_size=16, **SIZES[_size])
