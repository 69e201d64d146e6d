"""The Triton kernels, in the interpreter, and their operators equal `atr`."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from small_runs import LONG, why_not_interpreted
from torch import Tensor

from adatape.atr import recompute_weights
from adatape.banks import BankView, InputBank, LearnedBank, affine_keys, normed
from adatape.config import ReaderConfig
from adatape.kernels import select as select_module
from adatape.kernels import weights
from adatape.kernels.select import ReadParams, select_tokens
from adatape.reader import TapeReader
from adatape.records import Tape

ROOT = Path(__file__).parents[1]


needs_interpreter = pytest.mark.skipif(why_not_interpreted() is not None, reason=str(why_not_interpreted()))


def case(seed: int) -> tuple[Tensor, Tensor, Tensor | None, ReadParams]:
    """Random inputs: sizes around block sizes, equal keys, hidden tokens, thresholds."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    b, h, steps = draw.choice((1, 3, 17) if LONG else (1, 2, 3)), draw.choice((5, 16, 64, 130)), draw.randint(1, 4)
    merge = draw.randint(1, 16 if LONG else 4)
    c = 2 * steps * merge + draw.randint(0, 150)
    own = draw.random() < 0.4
    keys = torch.randn(*((b,) if own else ()), c, h, generator=generator)
    keys = keys[..., torch.randint(c, (c,), generator=generator), :] if draw.random() < 0.5 else keys
    taken = torch.rand(b, c, generator=generator) < 0.1 if draw.random() < 0.5 else None
    query = draw.choice((0.0, 1.0, 1.0, 30.0)) * torch.randn(b, h, generator=generator)
    params = ReadParams(steps, draw.choice((0.3, 1.0, 2.0, 1e9)), merge, draw.choice((1.0, h**0.5)), seed % 3 > 0)
    return query, keys, taken, params


@needs_interpreter
@pytest.mark.parametrize("seed", range(30))
def test_the_kernel_finds_what_the_definition_finds(seed: int) -> None:
    given = case(seed)
    ours, theirs = select_module.select_triton(*given), select_module.select_by_definition(*given)
    assert torch.equal(ours.index, theirs.index)
    assert torch.equal(ours.mask, theirs.mask)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)


@needs_interpreter
@pytest.mark.parametrize("seed", range(30))
def test_all_steps_at_once_find_what_the_definition_finds(seed: int) -> None:
    """One tile per row: the interpreter runs programs in sequence, so they cannot wait for each other."""
    query, keys, taken, params = case(seed)
    query, keys = query[:, :64].contiguous(), keys[..., :128, :64].contiguous()
    taken, params = None if taken is None else taken[:, :128], params._replace(merge=min(params.merge, 8))
    given = (query, keys, taken, params)
    ours, theirs = select_module.select_fused(*given, tokens=128), select_module.select_by_definition(*given)
    assert torch.equal(ours.index, theirs.index)
    assert torch.equal(ours.mask, theirs.mask)
    torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "size", "width", "merge", "tokens"),
    [(1, 10_000, 64, 5, 128), (1, 784, 64, 5, 64), (8, 784, 64, 5, 64), (16, 784, 64, 5, 128), (64, 784, 64, 5, None),
     (2, 10_000, 64, 5, None), (1, 100, 65, 5, None), (1, 100, 64, 33, None)],
)  # fmt: skip
def test_only_what_runs_all_at_the_same_time_is_found_at_once(
    batch: int, size: int, width: int, merge: int, tokens: int | None
) -> None:
    """One program per processor always fits; more would depend on registers."""
    assert select_module.fused_tile((batch, width), (size, width), merge, sm_count=132) == tokens


@needs_interpreter
def test_the_lowest_place_wins_a_tie_in_the_kernel() -> None:
    keys = torch.ones(300, 16)
    index, _, _ = select_module.select_triton(torch.ones(2, 16), keys, None, ReadParams(3, 1e9, 5, 4.0, True))
    assert torch.equal(index, torch.arange(15).view(3, 5).expand(2, 3, 5))


@needs_interpreter
def test_minus_zero_and_zero_tie() -> None:
    keys = torch.tensor([[-0.0], [0.0], [-1.0], [0.0]]) * torch.ones(1, 16)
    index, _, _ = select_module.select_triton(torch.ones(1, 16), keys, None, ReadParams(1, 1e9, 3, 4.0, True))
    assert index.flatten().tolist() == [0, 1, 3]


@needs_interpreter
def test_the_kernel_leaves_what_it_was_given() -> None:
    query, keys, taken = torch.randn(3, 16), torch.randn(60, 16), torch.rand(3, 60) < 0.2
    before = query.clone(), keys.clone(), taken.clone()
    select_module.select_triton(query, keys, taken, ReadParams(3, 2.0, 4, 4.0, True))
    assert all(torch.equal(now, then) for now, then in zip((query, keys, taken), before, strict=True))


def weights_and_grad(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """Query, keys, weights, lengths, a gradient of the weights, and autograd's gradients."""
    draw = random.Random(seed)
    b, t, k, h = draw.choice((1, 4)), draw.randint(1, 5), draw.randint(1, 9), draw.choice((5, 16, 40))
    query, keys = torch.randn(b, h, requires_grad=True), torch.randn(b, t, k, h, requires_grad=True)
    length, grad = torch.randint(1, t + 1, (b,)), torch.randn(b, t, k)
    visible = torch.arange(t) < length[:, None]
    weight = recompute_weights(query, keys, visible, 2.0, "average" if seed % 2 else "replace")
    grads = torch.autograd.grad(weight, (query, keys), grad)
    return query.detach(), keys.detach(), weight.detach(), length, grad, grads


@pytest.mark.parametrize("seed", range(12))
def test_weights_have_the_gradient_of_the_definition(seed: int) -> None:
    query, keys, weight, _, grad, theirs = weights_and_grad(seed)
    for mine, expected in zip(
        weights.backward_by_definition(query, keys, weight, grad, 2.0, bool(seed % 2)), theirs, strict=True
    ):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@needs_interpreter
@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_has_the_gradient_of_the_definition(seed: int) -> None:
    query, keys, weight, length, grad, theirs = weights_and_grad(seed)
    ours = weights.backward_triton(query, keys, weight, length, grad, 2.0, bool(seed % 2))
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


WIDTH, SIZE = 24, 16


def reader_and_bank(kind: str, **fields: object) -> tuple[TapeReader, InputBank | LearnedBank, Tensor]:
    torch.manual_seed(0)
    bank = InputBank(WIDTH, patch=2, image=SIZE) if kind == "input" else LearnedBank(50, WIDTH)
    with torch.no_grad():
        for parameter in bank.parameters():
            parameter.copy_(torch.randn_like(parameter))
    reader = TapeReader(
        WIDTH, ReaderConfig(**{"steps": 4, "threshold": 1.3, "merge": 3, "query_width": 8, **fields}), bank.size
    )  # type: ignore[arg-type]
    with torch.no_grad():
        reader.norm.weight.copy_(torch.rand(WIDTH) + 1.5)  # type: ignore[operator]
        reader.norm.bias.copy_(torch.randn(WIDTH))  # type: ignore[operator]
    return reader, bank, torch.randn(6, 3, SIZE, SIZE)


def both_ways(reader: TapeReader, bank: InputBank | LearnedBank, images: Tensor) -> list[tuple[Tape, list[Tensor]]]:
    results = []
    for use_kernels in (False, True):
        reader.use_kernels = use_kernels
        query = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
        tape = reader(query, bank.open(images, query[:, None], query), torch.arange(6))
        learnt = [query, *bank.parameters(), *reader.parameters()]
        target = torch.randn(tape.tokens.shape, generator=torch.Generator().manual_seed(2))
        results.append((tape, list(torch.autograd.grad((tape.tokens * target).sum() + tape.ponder.sum(), learnt))))
    return results


@pytest.mark.parametrize("kind", ["input", "learn"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"ponder": "collect"},
        {"ponder": "max", "ponder_at_halt": False},
        {"update": "replace", "threshold": 3.9},
        {"query_noise": 0.5, "bank_dropout": 0.1},
        {"temperature": 1.0, "threshold": 1.0},
        {"sample_budgets": True},
    ],
)
def test_finding_first_gives_the_tape_and_gradients_of_the_definition(kind: str, fields: dict[str, object]) -> None:
    (plain, plain_grads), (found, found_grads) = both_ways(*reader_and_bank(kind, **fields))
    assert torch.equal(found.index, plain.index)
    assert torch.equal(found.mask, plain.mask)
    assert torch.equal(found.length, plain.length)
    for mine, theirs in zip(
        (found.tokens, found.weight, found.ponder), (plain.tokens, plain.weight, plain.ponder), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert len(set(plain.length.tolist())) > 1 or "threshold" in fields, "nothing halted early: the case shows little"
    for mine, theirs in zip(found_grads, plain_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * theirs.abs().max().item())


@pytest.mark.parametrize("kind", ["input", "learn"])
def test_without_gradients_finding_gives_the_same_tape(kind: str) -> None:
    reader, bank, images = reader_and_bank(kind)
    reader.eval().use_kernels = True
    query = torch.randn(6, WIDTH)
    with torch.no_grad():
        without = reader(query, bank.open(images, query[:, None], query))
    with_gradients = reader(query, bank.open(images, query[:, None], query))
    torch.testing.assert_close(without.tokens, with_gradients.tokens)
    torch.testing.assert_close(without.ponder, with_gradients.ponder)


@pytest.mark.parametrize("patch", [2, 4, 8])
def test_keys_of_an_image_need_no_token_in_full(patch: int) -> None:
    bank, norm = InputBank(32, patch=patch, image=SIZE), torch.nn.LayerNorm(32)
    with torch.no_grad():
        for parameter in (*bank.parameters(), *norm.parameters()):
            parameter.copy_(torch.randn_like(parameter))
    images = torch.randn(2, 3, SIZE, SIZE)
    tokens, opened = bank(images), bank.open(images, torch.zeros(2, 1, 32), torch.zeros(2, 32))
    torch.testing.assert_close(opened.keys(norm, 8), normed(tokens, norm)[..., :8], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(opened.keys(None, 8), tokens[..., :8], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(opened.all(), tokens)
    index = torch.randint(bank.size, (2, 3, 4))
    torch.testing.assert_close(opened.take(index), BankView(tokens).take(index), rtol=1e-4, atol=1e-4)


def test_affine_keys_stay_finite_where_a_token_is_constant() -> None:
    keys = affine_keys(torch.zeros(1, 2, 3), torch.randn(8, 3), torch.zeros(2, 8), torch.nn.LayerNorm(8), 4)
    assert keys.isfinite().all()


@pytest.mark.parametrize("kind", ["input", "learn"])
def test_a_reader_that_finds_compiles_in_full(kind: str) -> None:
    reader, bank, images = reader_and_bank(kind)
    reader.use_kernels = True
    query = torch.randn(6, WIDTH)

    def read(q: Tensor, x: Tensor) -> Tensor:
        return reader(q, bank.open(x, q[:, None], q)).tokens

    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(query, images), read(query, images))


def test_what_is_found_needs_no_gradient() -> None:
    found = select_tokens(
        torch.randn(2, 8, requires_grad=True),
        torch.randn(30, 8, requires_grad=True),
        None,
        ReadParams(3, 2.0, 2, 1.0, True),
    )
    assert not any(part.requires_grad for part in found)


def test_no_row_halts_early_where_the_reader_says_so() -> None:
    for steps, threshold in ((4, 3.01), (1, 0.5)):
        reader = TapeReader(WIDTH, ReaderConfig(steps=steps, threshold=threshold, merge=1, query_width=8), 50)
        with torch.no_grad():
            reader.norm.weight.fill_(100.0)  # type: ignore[operator]  # one token takes all the weight
        assert reader.always_full
        assert reader(torch.randn(20, WIDTH), torch.randn(50, WIDTH)).mask.all()
    assert not TapeReader(WIDTH, ReaderConfig(steps=4, threshold=3.0, merge=1, query_width=8), 50).always_full


def gpu_log() -> ModuleType:
    """The script benchmarks/gpu_tests.py as a module."""
    spec = importlib.util.spec_from_file_location("gpu_tests", ROOT / "benchmarks" / "gpu_tests.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_gpu_has_seen_these_kernels() -> None:
    """`python benchmarks/gpu_tests.py results/gpu_tests.json` on a GPU renews the log; commit it with the kernels."""
    log = json.loads((ROOT / "results" / "gpu_tests.json").read_text())
    assert log["kernels"] == gpu_log().kernels(), "kernels/ changed since the GPU tests last ran"
    assert log["passed"] > 0
    unexplained = set(log["failed"]) - set(log.get("reasons", {}))
    assert not unexplained, "a failure on the GPU needs a reason that is not the kernel's"


def test_tests_on_a_gpu_find_what_they_import_without_a_conftest() -> None:
    found = [each.removeprefix("pythonpath=").split() for each in gpu_log().PYTEST if each.startswith("pythonpath=")]
    ours = {path.stem: folder for folder in ("tests", "research") for path in (ROOT / folder).glob("*.py")}
    for path in (ROOT / "tests" / "gpu").glob("test_*.py"):
        imported = set(re.findall(r"^from (\w+) import", path.read_text(), re.MULTILINE))
        assert [{ours[name] for name in imported & ours.keys()} <= set(folders) for folders in found] == [True]


def test_a_comment_in_a_kernel_needs_no_gpu_and_a_number_does() -> None:
    hashed = gpu_log().compiled_hash
    kernel = 'def kernel(a, N: tl.constexpr):\n    """Adds."""\n    return a + 2.0  # twice\n'
    reworded = 'def kernel(\n    a, N: tl.constexpr\n):\n    # why\n    """Adds\n    two."""\n    return (a + 2.0)\n'
    assert hashed(kernel) == hashed(reworded)
    for old, new in (("2.0", "2"), ("2.0", "3.0"), ("+", "-"), ("tl.constexpr", "int"), ("return a", "return N")):
        assert hashed(kernel.replace(old, new)) != hashed(kernel)
