"""How the answers of windows and of the view become one: a mixture for one label, a noisy-or for several."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

Labels = Literal["one", "several"]
HIDDEN = -1e30  # the gate of a hidden window; with -∞ a mixture of hidden windows alone would have no logarithm


@runtime_checkable
class Answer(Protocol):
    """`gate` says how much a window's evidence counts, as a logit; hidden windows do not count."""

    def combined(
        self,
        view: Float[Tensor, "b classes"] | None,
        gate: Float[Tensor, "b t"],
        evidence: Float[Tensor, "b t classes"],
        mask: Bool[Tensor, "b t"],
    ) -> Float[Tensor, "b classes"]:
        """Logits of the image, from logits of the view (which may be left out) and of each window."""

    def shown(
        self, gate: Float[Tensor, "b t"], evidence: Float[Tensor, "b t classes"], target: Float[Tensor, "b classes"]
    ) -> Float[Tensor, "b t"]:
        """How surely each window shows what the label names, from 0 to 1."""

    def found(
        self, found: Float[Tensor, "b c"], guesses: Float[Tensor, "b c classes"], target: Float[Tensor, "b classes"]
    ) -> Float[Tensor, ""]:
        """The loss of a mixture of guesses: a place whose guess is right where others are not gains weight."""


class OneLabel:
    """p(y) = Σ_w softmax(gate)_w p_w(y), with the view as one more w, of gate 0."""

    def combined(self, view: Tensor | None, gate: Tensor, evidence: Tensor, mask: Tensor) -> Tensor:
        gate = gate.float().masked_fill(~mask, HIDDEN)
        each = evidence.float().log_softmax(-1)
        if view is not None:
            gate = torch.cat([gate.new_zeros(gate.shape[0], 1), gate], 1)
            each = torch.cat([view.float().log_softmax(-1)[:, None], each], 1)
        return (gate.log_softmax(1)[..., None] + each).logsumexp(1)

    def shown(self, gate: Tensor, evidence: Tensor, target: Tensor) -> Tensor:  # noqa: ARG002
        chance = 1 / evidence.shape[-1]
        right = (evidence.float().softmax(-1) * target[:, None]).sum(-1)
        return ((right - chance) / (1 - chance)).clamp(min=0)

    def found(self, found: Tensor, guesses: Tensor, target: Tensor) -> Tensor:
        mixed = (found.log_softmax(1)[..., None] + guesses.log_softmax(-1)).logsumexp(1)
        return -(mixed * target).sum(-1).mean()


class SeveralLabels:
    """p(c) = 1 - (1 - p_view(c)) Π_w (1 - σ(gate_w) σ(evidence_wc))."""

    def combined(self, view: Tensor | None, gate: Tensor, evidence: Tensor, mask: Tensor) -> Tensor:
        none = torch.log1p(-_each(gate, evidence) * mask[..., None]).sum(1)
        none = none if view is None else none + F.logsigmoid(-view.float())
        none = none.clamp(max=-1e-6)
        return torch.log(-torch.expm1(none)) - none

    def shown(self, gate: Tensor, evidence: Tensor, target: Tensor) -> Tensor:
        return 1 - (1 - _each(gate, evidence) * target[:, None]).prod(-1)

    def found(self, found: Tensor, guesses: Tensor, target: Tensor) -> Tensor:
        mixed = (found.log_softmax(1)[..., None] + guesses.log_softmax(-1)).logsumexp(1)
        return -(mixed * target).sum() / target.sum().clamp(min=1)


ANSWERS: dict[Labels, Answer] = {"one": OneLabel(), "several": SeveralLabels()}


def _each(gate: Tensor, evidence: Tensor) -> Tensor:
    """σ(gate) σ(evidence), below 1 so that its complement has a logarithm."""
    return (gate.float().sigmoid()[..., None] * evidence.float().sigmoid()).clamp(max=1 - 1e-6)
