"""Ragged batches on a CUDA device: the kernel equals masked attention, and layouts give equal results."""

from __future__ import annotations

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

import adatape.models  # noqa: F401  registers the models
from adatape.cuda_graphs import cuda_graphed
from adatape.models import AdaTape, AViT
from adatape.packing import key_mask, make_packing, pack, unpack
from adatape.ragged_attention import PackedMask, PaddingMask, has_fast_path
from adatape.records import Output

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
# (rows, heads, width of a head); lengths are drawn, the shortest 1 and the longest all of it.
SHAPES = [(207, 12, 64), (60, 3, 64), (17, 2, 32), (392, 6, 64), (33, 4, 128), (5, 1, 8)]
HALF = [torch.bfloat16, torch.float16]
LAYOUTS: dict[str, dict] = {"padded": {"packed": False}, "packed": {}, "buckets": {"buckets": 4}}


@pytest.fixture(autouse=True)
def _float32_is_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables TF32, which rounds the patch embedding differently for each batch size."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.set_float32_matmul_precision("highest")


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def visible_of(b: int, n: int) -> Tensor:
    lengths = torch.randint(1, n + 1, (b,), device="cuda", generator=draw())
    lengths[0], lengths[1] = 1, n
    return torch.arange(n, device="cuda") < lengths[:, None]


def heads(b: int, n: int, h: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q, k, v of one projection as in timm, and a gradient of attention's output."""
    qkv = torch.randn(b, n, 3, h, d, device="cuda", generator=draw()).to(dtype)
    return qkv, torch.randn(b, h, n, d, device="cuda", generator=draw(1)).to(dtype)


def attend(qkv: Tensor, mask: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
    qkv = qkv.clone().requires_grad_()
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return out.detach(), torch.autograd.grad(out, qkv, gradient)[0]


def near(ours: Tensor, theirs: Tensor, share: float) -> None:
    assert ours.isfinite().all()
    assert (ours.double() - theirs.double()).norm() <= share * theirs.double().norm()


def small(name: str = "adatape_tiny_patch32_224", **options) -> torch.nn.Module:
    torch.manual_seed(0)
    reading = {"bank_size": 500, "steps": 10, "threshold": 2.0, "norm_scale": 1.5} if "adatape" in name else {}
    model = timm.create_model(name, depth=4, num_classes=50, **{**reading, **options}).cuda().eval()
    with torch.no_grad():
        for parameter in model.vit.blocks.parameters():  # attention far from uniform, answers apart
            parameter.mul_(3 if parameter.dim() == 2 else 1)
        model.vit.head.weight.normal_(std=0.05)
    return model


def images(n: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 224, 224, device="cuda", generator=draw(seed))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", SHAPES)
def test_tail_attention_is_masked_attention_in_float32_with_its_gradients(shape: tuple, dtype: torch.dtype) -> None:
    n, h, d = shape
    visible = visible_of(16, n)
    qkv, gradient = heads(16, n, h, d, dtype)
    gradient = gradient * visible[:, None, :, None]  # nobody looks at hidden rows
    assert has_fast_path(qkv[:, :, 0].transpose(1, 2), qkv[:, :, 0].transpose(1, 2))
    ours = attend(qkv, PaddingMask(visible), gradient)
    theirs = attend(qkv.float(), key_mask(visible), gradient.float())
    seen = visible[:, None, :, None].expand_as(theirs[0])
    assert ours[0].isfinite().all()
    near(ours[0][seen], theirs[0][seen], 1e-2)
    near(ours[1], theirs[1], 1e-2)
    assert not ours[1][~visible].any()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", SHAPES)
def test_packed_attention_is_masked_attention_in_float32_with_its_gradients(shape: tuple, dtype: torch.dtype) -> None:
    n, h, d = shape
    keep = (torch.rand(16, n, device="cuda", generator=draw(2)) < 0.6) & visible_of(16, n)
    keep[3] = False
    keep[1, 0] = True
    held = make_packing(keep)
    qkv, gradient = heads(16, n, h, d, dtype)
    gradient = gradient * keep[:, None, :, None]
    rows = gradient.transpose(1, 2).flatten(0, 1)[held.indices][None].transpose(1, 2)
    ours = attend(pack(qkv, held), PackedMask(held), rows)
    never_blind = keep | ~keep.any(1, keepdim=True)
    theirs = attend(qkv.float(), key_mask(never_blind), gradient.float())
    near(ours[0].transpose(1, 2)[0], theirs[0].transpose(1, 2)[keep], 1e-2)
    near(unpack(ours[1], held, (16, n)), theirs[1], 1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_the_kernel_does_not_run_a_mask_does(dtype: torch.dtype) -> None:
    visible = visible_of(8, 20)
    qkv, gradient = heads(8, 20, 2, 16, dtype)
    gradient = gradient * visible[:, None, :, None]
    for ours, theirs in zip(
        attend(qkv, PaddingMask(visible), gradient), attend(qkv, key_mask(visible), gradient), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_what_hidden_rows_hold_changes_nothing() -> None:
    visible = visible_of(16, 50)
    qkv, gradient = heads(16, 50, 3, 64, torch.bfloat16)
    loud = torch.where(visible[..., None, None, None], qkv, 1e4 * torch.randn_like(qkv))
    ours, theirs = (attend(x, PaddingMask(visible), gradient)[0].transpose(1, 2)[visible] for x in (qkv, loud))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.parametrize("tape_ffn", ["append", "append+blocks"])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@torch.no_grad()
def test_padded_is_bucketed_is_packed(bank: str, tape_ffn: str, dtype: torch.dtype, limit: float) -> None:
    model, x, answers = small(bank=bank, tape_ffn=tape_ffn), images(256), {}
    assert isinstance(model, AdaTape)
    for name, chosen in LAYOUTS.items():
        model.set_packed(**chosen)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            output = model(x, output=True)
        answers[name] = output.logits.float()
    assert output.tape.length.unique().numel() > 1
    padded = answers["padded"]
    for logits in answers.values():
        near(logits, padded, limit)
        sure = padded.topk(2).values.diff().abs().squeeze(1) > limit * padded.abs().max()
        assert (logits.argmax(1) == padded.argmax(1))[sure].float().mean() >= 0.999


@torch.no_grad()
def test_a_sample_answers_the_same_alone_as_in_a_batch() -> None:
    model = small()
    for chosen in LAYOUTS.values():
        model.set_packed(**chosen)
        together = model(images(), output=True)
        for row in range(0, 32, 7):
            alone = model(images()[row : row + 1], output=True)
            assert torch.equal(alone.tape.index[0], together.tape.index[row])
            near(alone.logits[0], together.logits[row], 1e-5)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
@torch.no_grad()
def test_avit_that_removes_tokens_is_avit_that_masks_them(dtype: torch.dtype, limit: float) -> None:
    model = small("avit_tiny_patch16_224", gamma=0.5, beta=-1.0)
    assert isinstance(model, AViT)
    answers = []
    for packed in (False, True):
        model.set_packed(packed)
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            answers.append(model(images(), output=True))
    masked, removed = answers
    assert (masked.steps.weight[:, -1] == 0).any()
    if dtype == torch.float32:
        torch.testing.assert_close(removed.steps.weight, masked.steps.weight, rtol=1e-4, atol=1e-4)
    near(removed.logits, masked.logits, limit)


def test_a_training_step_has_the_gradients_of_one_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gradients = small(query_noise=0.0, bank_dropout=0.0).train(), []
    for mask in (PaddingMask, key_mask):
        monkeypatch.setattr("adatape.models.adatape.padding_mask", mask)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images()).float(), torch.arange(32, device="cuda"))
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.vit.parameters()]))
    near(*gradients, 5e-2)


@torch.no_grad()
def test_the_padded_path_replays_as_a_graph_on_other_lengths() -> None:
    model = small()

    def answer(x: Tensor) -> tuple[Tensor, ...]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            output = model(x, output=True)
        return output.logits, output.tape.length

    replayed, lengths = cuda_graphed(answer), []
    for seed in range(6):
        expected = answer(images(seed=seed))
        logits, length = replayed(images(seed=seed))
        assert torch.equal(length, expected[1])
        near(logits, expected[0], 1e-2)
        lengths.append(tuple(length.tolist()))
    assert len(set(lengths)) > 1


def near_where_the_same_was_read(ours: Output, theirs: Output) -> None:
    """Compared only where both read the same tokens: compiled in bfloat16, rounding may select another one."""
    same = (ours.tape.index == theirs.tape.index).flatten(1).all(1)
    assert same.any()
    near(ours.logits[same], theirs.logits[same], 5e-2)


@pytest.mark.parametrize("training", [False, True])
def test_the_padded_path_compiles_in_full(training: bool) -> None:
    model = small(query_noise=0.0, bank_dropout=0.0).train(training)
    compiled = torch.compile(model, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        ours, theirs = compiled(images(), output=True), model(images(), output=True)
    near_where_the_same_was_read(ours, theirs)
    ours.logits.float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_compiled_blocks_take_packed_batches_of_any_size() -> None:
    model = small(tape_ffn="append+blocks")
    model.set_packed()
    with torch.autocast("cuda", torch.bfloat16):
        expected = [model(images(n), output=True) for n in (7, 12, 30)]
        for block in model.vit.blocks:
            block.compile(dynamic=True, fullgraph=True)
        for n, output in zip((7, 12, 30), expected, strict=True):
            near_where_the_same_was_read(model(images(n), output=True), output)
