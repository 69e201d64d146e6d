"""The kernels on a CUDA device: selected tokens and gradients equal those of `atr`.

`benchmarks/gpu_tests.py` records the kernels that pass here; CI refuses others.
"""

from __future__ import annotations

import random

import pytest
import timm
import torch
from torch import Tensor

import adatape.models
from adatape.atr import recompute_weights
from adatape.banks import InputBank, LearnedBank
from adatape.config import ReaderConfig
from adatape.kernels import select as select_module
from adatape.kernels import weights
from adatape.kernels.select import ReadParams
from adatape.reader import TapeReader
from adatape.records import Tape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
assert adatape.models


@pytest.fixture(autouse=True)
def _float32_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables TF32, which rounds to ten bits, differently for each batch size."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.set_float32_matmul_precision("highest")


def case(seed: int) -> tuple[Tensor, Tensor, Tensor | None, ReadParams]:
    draw = random.Random(seed)
    generator = torch.Generator("cuda").manual_seed(seed)
    b, h, steps = draw.choice((1, 7, 16, 33, 130)), draw.choice((64, 64, 100, 1024)), draw.randint(1, 10)
    merge, own = draw.choice((1, 2, 5, 10, 16)), draw.random() < 0.4
    c = 2 * steps * merge + draw.choice((1, 333, 784, 10_007 if not own else 99))
    keys = torch.randn(*((b,) if own else ()), c, h, generator=generator, device="cuda")
    if draw.random() < 0.5:  # many equal keys
        keys = keys[..., torch.randint(c, (c,), generator=generator, device="cuda"), :]
    if draw.random() < 0.5:
        keys = keys.bfloat16().float()
    taken = torch.rand(b, c, generator=generator, device="cuda") < 0.1 if draw.random() < 0.5 else None
    query = draw.choice((0.0, 1.0, 1.0, 30.0)) * torch.randn(b, h, generator=generator, device="cuda")
    params = ReadParams(steps, draw.choice((0.3, 1.0, 2.0, 1e9)), merge, draw.choice((1.0, h**0.5)), seed % 3 > 0)
    return query, keys, taken, params


@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_finds_what_the_definition_finds(seed: int) -> None:
    given = case(seed)
    ours, theirs = select_module.select_triton(*given), select_module.select_by_definition(*given)
    assert torch.equal(ours.index, theirs.index)
    assert torch.equal(ours.mask, theirs.mask)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("seed", range(24))
def test_all_steps_at_once_find_what_the_definition_finds(seed: int) -> None:
    """With 1 to 128 programs per row, which wait for each other."""
    draw = random.Random(seed)
    b, own, steps, merge = draw.choice((1, 1, 2, 5)), seed % 2 == 0, draw.randint(1, 10), draw.choice((1, 2, 5, 16))
    c, h = max(steps * merge, draw.choice((60, 784, 1003, 3200 if b > 1 else 10_000))), draw.choice((5, 64, 64))
    keys = torch.randn(*((b,) if own else ()), c, h, device="cuda")
    keys = keys[..., torch.randint(c, (c,), device="cuda"), :] if draw.random() < 0.5 else keys
    taken = torch.rand(b, c, device="cuda") < 0.01 if draw.random() < 0.3 and c > 2 * steps * merge else None
    params = ReadParams(steps, draw.choice((0.3, 2.0, 1e9)), merge, draw.choice((1.0, h**0.5)), seed % 3 > 0)
    given = (torch.randn(b, h, device="cuda"), keys.contiguous(), taken, params)
    tokens = select_module.fused_tile((b, h), keys.shape, merge, 132)
    assert tokens is not None
    theirs = select_module.select_by_definition(*given)
    for _ in range(20):  # who comes first changes
        ours = select_module.select_fused(*given, tokens)
        assert torch.equal(ours.index, theirs.index)
        assert torch.equal(ours.mask, theirs.mask)
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("own", "c"), [(False, 100_003), (False, 10_000), (True, 784)])
def test_large_banks_read_as_the_definition_reads(own: bool, c: int) -> None:
    query, keys = torch.randn(64, 64, device="cuda"), torch.randn(*((64,) if own else ()), c, 64, device="cuda")
    given = (query, keys, None, ReadParams(10, 2.0, 5, 8.0, True))
    assert torch.equal(select_module.select_triton(*given)[0], select_module.select_by_definition(*given)[0])


@pytest.mark.parametrize("own", [False, True])
def test_a_row_finds_the_same_alone_as_in_a_batch(own: bool) -> None:
    query, keys = torch.randn(40, 64, device="cuda"), torch.randn(*((40,) if own else ()), 1003, 64, device="cuda")
    together = select_module.select_triton(query, keys, None, ReadParams(10, 2.0, 5, 8.0, True))
    for row in range(0, 40, 7):
        one = slice(row, row + 1)
        alone = select_module.select_triton(
            query[one], keys[one] if own else keys, None, ReadParams(10, 2.0, 5, 8.0, True)
        )
        for mine, theirs in zip(alone, together, strict=True):
            assert torch.equal(mine, theirs[one])


@pytest.mark.parametrize("seed", range(8))
def test_the_kernel_has_the_gradient_of_the_definition(seed: int) -> None:
    draw = random.Random(seed)
    b, t, k, h = draw.choice((1, 50)), draw.randint(1, 10), draw.randint(1, 16), draw.choice((16, 64, 1024))
    query, keys = (torch.randn(*shape, h, device="cuda", requires_grad=True) for shape in ((b,), (b, t, k)))
    length, grad = torch.randint(1, t + 1, (b,), device="cuda"), torch.randn(b, t, k, device="cuda")
    visible = torch.arange(t, device="cuda") < length[:, None]
    weight = recompute_weights(query, keys, visible, h**0.5, "average" if seed % 2 else "replace")
    theirs = torch.autograd.grad(weight, (query, keys), grad)
    ours = weights.backward_triton(query.detach(), keys.detach(), weight.detach(), length, grad, h**0.5, bool(seed % 2))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def tapes(kind: str, dtype: torch.dtype) -> list[tuple[Tape, list[Tensor]]]:
    torch.manual_seed(0)
    bank = (InputBank(128, patch=4, image=64) if kind == "input" else LearnedBank(500, 128)).cuda()
    reader = TapeReader(128, ReaderConfig(steps=6, threshold=1.5, merge=3), bank.size).cuda()
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.normal_()
        reader.norm.weight.fill_(1.5)  # type: ignore[operator]
    images, query = torch.randn(9, 3, 64, 64, device="cuda"), torch.randn(9, 128, device="cuda", requires_grad=True)
    results = []
    for use_kernels in (False, True):
        reader.use_kernels = use_kernels
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            tape = reader(query, bank.open(images, query[:, None], query))
        learnt = [query, *bank.parameters(), *reader.parameters()]
        loss = (tape.tokens.float() * torch.linspace(-1, 1, 128, device="cuda")).sum() + tape.ponder.sum()
        results.append((tape, list(torch.autograd.grad(loss, learnt))))
    return results


@pytest.mark.parametrize("kind", ["input", "learn"])
def test_finding_first_gives_the_tape_and_gradients_of_the_definition(kind: str) -> None:
    (plain, plain_grads), (found, found_grads) = tapes(kind, torch.float32)
    assert torch.equal(found.index, plain.index)
    assert len(set(found.length.tolist())) > 1
    torch.testing.assert_close(found.tokens, plain.tokens, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.ponder, plain.ponder, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(found_grads, plain_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


def test_in_bfloat16_a_learnt_bank_is_read_as_in_float32_and_an_image_nearly_so() -> None:
    for kind, least in (("learn", 1.0), ("input", 0.8)):
        (plain, _), (found, _) = tapes(kind, torch.bfloat16)
        assert (plain.index == found.index).float().mean() >= least


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_a_captured_forward_reads_what_an_eager_one_reads(bank: str) -> None:
    model = timm.create_model("adatape_tiny_patch16_224", bank=bank, depth=3).cuda().eval()
    images = torch.randn(4, 3, 224, 224, device="cuda")
    side = torch.cuda.Stream()
    with torch.no_grad():
        eager = model(images, output=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            model(images)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = model(images, output=True)
        graph.replay()
    assert torch.equal(held.tape.index, eager.tape.index)
    torch.testing.assert_close(held.logits, eager.logits, rtol=1e-4, atol=1e-4)
