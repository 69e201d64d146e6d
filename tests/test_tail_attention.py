"""Both forms of research/tail_attention.py are masked attention with its gradients: kernels in Triton's interpreter,
and sequences by their edges, where each is attended to on its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from scripts import script
from small_runs import why_not_interpreted

if why_not_interpreted() is not None:
    pytest.skip(str(why_not_interpreted()), allow_module_level=True)
tail = script("research/tail_attention.py")
SMALL = tail.Tiles(16, 32, 4, 1)


def case(b: int, h: int, n: int, lengths: list[int]) -> tail.Case:
    drawn = tail.drawn(b, h, n, torch.float32, "cpu", d=16)._replace(lengths=torch.tensor(lengths))
    return drawn._replace(gradient=drawn.gradient * drawn.visible[:, :, None, None])


def attend(given: tail.Case) -> torch.Tensor:
    return tail.tail_attention(*given.heads(), given.lengths, (SMALL, SMALL))


@pytest.mark.parametrize(("n", "lengths"), [(40, [40, 1, 17]), (33, [32, 33, 16]), (5, [5, 4, 3])])
def test_it_is_masked_attention_in_float64_with_its_gradients(n: int, lengths: list[int]) -> None:
    out, gradient = tail.differences(attend, case(3, 2, n, lengths))
    assert out < 1e-6
    assert gradient < 1e-6


def test_hidden_rows_are_zero_and_hold_nothing_that_counts() -> None:
    given = case(2, 2, 40, [20, 33])
    loud = torch.where(given.visible[..., None, None, None], given.qkv.detach(), torch.nan).requires_grad_()
    ours, theirs = (tail.gradients(attend, given._replace(qkv=qkv)) for qkv in (loud, given.qkv))
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x, y)
        assert not x[~given.visible].any()


def one_by_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, edges: torch.Tensor, longest: int) -> torch.Tensor:
    """What `varlen_attn` computes on a GPU."""
    assert edges.dtype == torch.int32
    assert int(edges.diff().max()) <= longest

    def parts() -> Iterator[torch.Tensor]:
        for begin, end in pairwise(edges.tolist()):
            rows = (x[begin:end].transpose(0, 1) for x in (q, k, v))
            yield F.scaled_dot_product_attention(*rows).transpose(0, 1)

    return torch.cat(list(parts()))


@pytest.mark.parametrize(("n", "lengths"), [(40, [40, 1, 17]), (33, [32, 33, 16]), (5, [5, 4, 3])])
def test_visible_rows_and_tail_as_two_sequences_are_masked_attention(
    n: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "varlen", one_by_one)
    given = case(3, 2, n, lengths)
    out, gradient = tail.differences(tail.with_edges, given)
    assert out < 1e-6
    assert gradient < 1e-6
    loud = torch.where(given.visible[..., None, None, None], given.qkv.detach(), 1e4).requires_grad_()
    ours, theirs = (tail.gradients(tail.with_edges, given._replace(qkv=qkv)) for qkv in (loud, given.qkv))
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x[given.visible], y[given.visible])
