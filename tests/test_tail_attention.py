"""The kernels of research/tail_attention.py, in Triton's interpreter, are masked attention with its gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from scripts import script

if importlib.util.find_spec("triton") is None or torch.cuda.is_available():
    pytest.skip("Triton interprets where there is no GPU; there the script checks itself", allow_module_level=True)
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
