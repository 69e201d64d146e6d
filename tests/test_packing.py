"""Ragged batches: packed attention equals masked attention, and layouts give equal results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_wrap import VITS, pretrained, wrapped
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import adatape
import adatape.models
from adatape import ragged_attention
from adatape.models import AdaTape
from adatape.models.execution import buckets, run_packed
from adatape.packing import LARGE_SAMPLE, full_packing, key_mask, make_packing, pack, tape_rows, unpack
from adatape.ragged_attention import PackedMask, PaddingMask, RaggedMask, aligned_bias

SMALL = {"img_size": 32, "depth": 3, "num_classes": 5, "patch_size": 8, "bank_patch": 4, "bank_size": 80}
VARIANTS = [(bank, ffn) for bank in ("input", "learn") for ffn in ("none", "append", "blocks", "append+blocks")]
LAYOUTS: dict[str, dict] = {"padded": {"packed": False}, "packed": {}, "buckets": {"buckets": 3}}
BATCHES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


def small(**options) -> AdaTape:
    """A shallow model on 32-pixel images whose tapes end at different lengths."""
    torch.manual_seed(0)
    settings = {**SMALL, "steps": 6, "threshold": 1.5, "merge": 4, "norm_scale": 1.5, **options}
    return timm.create_model("adatape_tiny_patch16_224", **settings).eval()


def images(n: int = 12, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def in_layouts(model: AdaTape, ask: Callable[[], object]) -> dict[str, object]:
    answers = {}
    for name, chosen in LAYOUTS.items():
        model.set_packed(**chosen)
        answers[name] = ask()
    return answers


def one_by_one(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
    """Reference for varlen attention on (n, h, d): one sequence at a time."""
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().max() <= longest
    sizes = cu_seqlens.diff().tolist()
    parts = zip(*(x.transpose(0, 1).split(sizes, 1) for x in (q, k, v)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(*part) if part[0].shape[1] else part[0] for part in parts], 1
    ).transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """Replaces the varlen kernel on a CPU; returns the bounds that it was called with."""
    called: list[Tensor] = []

    def counted(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        called.append(cu_seqlens)
        return one_by_one(q, k, v, cu_seqlens, longest)

    monkeypatch.setattr(ragged_attention, "has_fast_path", lambda _q, _v: True)
    monkeypatch.setattr(ragged_attention, "varlen", counted)
    return called


def heads(b: int, n: int, seed: int = 0) -> list[Tensor]:
    """q, k and v as views of one projection, as in timm, in float64."""
    draw = torch.Generator().manual_seed(seed)
    qkv = torch.randn(b, n, 3, 2, 4, generator=draw, dtype=torch.float64, requires_grad=True)
    return list(qkv.permute(2, 0, 3, 1, 4).unbind(0))


def visible_of(lengths: list[int], extra: int = 0) -> Tensor:
    return torch.arange(max(lengths) + extra) < torch.tensor(lengths)[:, None]


def with_gradients(q: Tensor, k: Tensor, v: Tensor, mask: RaggedMask | Tensor, seen: Tensor) -> list[Tensor]:
    """Attention and its gradients, for visible rows only."""
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    rows = out.transpose(1, 2)[seen]
    return [rows, *torch.autograd.grad((rows * torch.arange(rows.numel()).view_as(rows).sin()).sum(), (q, k, v))]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


@given(lengths=BATCHES, extra=st.integers(0, 3))
def test_tail_attention_is_masked_attention_with_its_gradients(lengths: list[int], extra: int) -> None:
    visible = visible_of(lengths, extra)
    q, k, v = heads(*visible.shape)
    expected = with_gradients(q, k, v, key_mask(visible), visible)
    assert_same(with_gradients(q, k, v, PaddingMask(visible), visible), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_attention, "has_fast_path", lambda _q, _v: True)
        patch.setattr(ragged_attention, "varlen", one_by_one)
        assert_same(with_gradients(q, k, v, PaddingMask(visible), visible), expected)


@given(lengths=BATCHES, seed=st.integers(0, 99))
def test_packed_attention_is_masked_attention_with_its_gradients(lengths: list[int], seed: int) -> None:
    """For any kept rows, not only without a tail; a sample may keep none."""
    draw = torch.Generator().manual_seed(seed)
    keep = (torch.rand(len(lengths), max(lengths), generator=draw) < 0.6) & visible_of(lengths)
    if not keep.any():
        return
    held = make_packing(keep)
    total = int(keep.sum())
    q, k, v = heads(1, total, seed)
    whole = torch.ones(1, total, dtype=torch.bool)
    expected = with_gradients(q, k, v, PackedMask(held).mask(), whole)
    one = one_by_one(*(x.detach()[0].transpose(0, 1) for x in (q, k, v)), held.cu_seqlens, held.max_seqlen)
    torch.testing.assert_close(expected[0], one, rtol=1e-10, atol=1e-10)
    assert_same(with_gradients(q, k, v, PackedMask(held), whole), expected)
    with pytest.MonkeyPatch.context() as patch:  # a compiled block cannot go through sequences one by one
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert_same(with_gradients(q, k, v, PackedMask(held), whole), expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ragged_attention, "has_fast_path", lambda _q, _v: True)
        patch.setattr(ragged_attention, "varlen", one_by_one)
        assert_same(with_gradients(q, k, v, PackedMask(held), whole), expected)


@pytest.mark.parametrize("half", [True, False])
def test_what_hidden_rows_hold_changes_nothing(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are hidden by a bias, as in half precision on a GPU, or by a mask."""
    monkeypatch.setattr(ragged_attention, "has_fast_path", lambda _q, _v: half)
    visible = visible_of([3, 6, 1], extra=2)
    q, k, v = (x.detach() for x in heads(3, 8))
    huge = [torch.where(visible[:, None, :, None], x, 1e30 * torch.randn_like(x)) for x in (q, k, v)]
    ours, theirs = (F.scaled_dot_product_attention(*x, attn_mask=PaddingMask(visible)) for x in ((q, k, v), huge))
    assert torch.equal(ours.transpose(1, 2)[visible], theirs.transpose(1, 2)[visible])
    assert theirs.isfinite().all()


@pytest.mark.parametrize("n", [8, 9, 207])
def test_a_bias_hides_what_is_hidden_and_each_sample_s_begins_at_a_multiple_of_eight(n: int) -> None:
    visible = torch.arange(n) < torch.tensor([n, 2, n - 1])[:, None]
    for build in (aligned_bias, torch.compile(aligned_bias, backend="aot_eager", fullgraph=True)):
        bias = build(visible, torch.bfloat16)
        assert torch.equal(bias[:, 0, 0] == 0, visible)
        assert torch.equal(bias[:, 0, 0] == -torch.inf, ~visible)
        assert bias.stride(0) % 8 == 0


def test_nothing_is_copied_on_the_way_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = heads(1, 10)
    given_to_kernel: list[Tensor] = []
    monkeypatch.setattr(ragged_attention, "has_fast_path", lambda _q, _v: True)
    monkeypatch.setattr(ragged_attention, "varlen", lambda *x: given_to_kernel.extend(x[:3]) or x[0])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=PackedMask(make_packing(visible_of([3, 6, 1]))))
    assert [x.data_ptr() for x in given_to_kernel] == [x.data_ptr() for x in (q, k, v)]
    assert torch.equal(out, q)


@pytest.mark.parametrize("options", [{"dropout_p": 0.1}, {"scale": 0.3}])
def test_what_the_kernel_cannot_do_is_done_with_a_mask(kernel: list[Tensor], options: dict) -> None:
    visible = visible_of([3, 6, 1])
    q, k, v = heads(3, 6)
    torch.manual_seed(0)
    ours = F.scaled_dot_product_attention(q, k, v, attn_mask=PaddingMask(visible), **options)
    torch.manual_seed(0)
    assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask(visible), **options))
    assert not kernel


def test_attention_that_is_not_fused_sees_a_mask() -> None:
    attention = Attention(8, num_heads=2).eval()
    visible = visible_of([3, 6, 1])
    held = make_packing(visible)
    for x, mask in ((torch.randn(3, 6, 8), PaddingMask(visible)), (torch.randn(1, 10, 8), PackedMask(held))):
        answers = []
        for fused in (True, False):
            attention.fused_attn = fused
            answers.append(attention(x, attn_mask=mask))
        torch.testing.assert_close(*answers)
        assert type(answers[1]) is Tensor


def test_packing_keeps_order_and_unpacking_undoes_it() -> None:
    tokens, keep = torch.randn(5, 6, 3), torch.rand(5, 6) < 0.5
    keep[3], keep[0, 0] = False, True
    held = make_packing(keep)
    packed = pack(tokens, held)
    assert torch.equal(packed[0], tokens[keep])
    assert held.cu_seqlens.diff().tolist() == keep.sum(1)[keep.any(1)].tolist()
    assert held.max_seqlen == keep.sum(1).max()
    assert torch.equal(unpack(packed, held, (5, 6)), tokens * keep[..., None])
    nothing = make_packing(torch.zeros_like(keep))
    assert pack(tokens, nothing).numel() == 0
    assert not unpack(pack(tokens, nothing), nothing, (5, 6)).any()


def test_samples_that_keep_as_many_rows_stay_a_batch() -> None:
    keep = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0], [0, 1, 1, 0]]).bool()
    tokens, held = torch.randn(3, 4, 2), make_packing(keep)
    assert held.is_uniform
    assert torch.equal(pack(tokens, held), torch.stack([tokens[0, [0, 2]], tokens[2, [1, 2]]]))
    assert pack(tokens[:1], make_packing(keep[:1])).shape == (1, 2, 2)
    assert not make_packing(visible_of([2, 4])).is_uniform


def test_everything_is_the_packing_of_what_keeps_everything() -> None:
    ours, theirs = full_packing(torch.zeros(3, 4).bool()), make_packing(torch.ones(3, 4).bool())
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(other))


def test_rows_of_a_packed_batch_are_inputs_or_tape() -> None:
    visible = visible_of([3, 5, 4])
    rows = tape_rows(make_packing(visible), (3, 5), 3)
    assert rows.inputs.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 10]
    assert rows.tape.tolist() == [6, 7, 11]


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=20), count=st.integers(1, 8))
def test_buckets_hold_every_sample_once_from_short_to_long(lengths: list[int], count: int) -> None:
    found = buckets(torch.tensor(lengths), count)
    assert len(found) == min(count, len(lengths))
    assert sorted(torch.cat([rows for rows, _, _ in found]).tolist()) == list(range(len(lengths)))
    for rows, shortest, longest in found:
        held = [lengths[row] for row in rows.tolist()]
        assert (min(held), max(held)) == (shortest, longest)
    edges = [edge for _, *pair in found for edge in pair]
    assert edges == sorted(edges)
    sizes = [len(rows) for rows, _, _ in found]
    assert max(sizes) - min(sizes) <= 1


def assert_layouts_agree(model: AdaTape, x: Tensor) -> None:
    answers = in_layouts(model, lambda: model(x, output=True))
    padded = answers["padded"]
    assert padded.tape.length.unique().numel() > 1
    for output in answers.values():
        torch.testing.assert_close(output.logits, padded.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.features, padded.features, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.tape, padded.tape)
        assert torch.equal(output.logits.argmax(1), padded.logits.argmax(1))


@pytest.mark.parametrize("path", ["kernel", "mask"])
@pytest.mark.parametrize("pool", ["avg", "token", "max"])
@pytest.mark.parametrize(("bank", "tape_ffn"), VARIANTS)
@torch.no_grad()
def test_padded_is_bucketed_is_packed(
    bank: str, tape_ffn: str, pool: str, path: str, request: pytest.FixtureRequest
) -> None:
    model = small(bank=bank, tape_ffn=tape_ffn, class_token=True, global_pool=pool, fc_norm=False)
    masked = model(images())
    called = request.getfixturevalue("kernel") if path == "kernel" else []
    assert_layouts_agree(model, images())
    torch.testing.assert_close(model(images()), masked, rtol=1e-5, atol=1e-5)
    assert bool(called) == (path == "kernel")


@pytest.mark.parametrize("kind", [kind for kind in VITS if "attention pooling" not in kind])  # they need a gate
@torch.no_grad()
def test_padded_is_bucketed_is_packed_in_a_wrapped_vit(kind: str) -> None:
    name, options = VITS[kind]
    assert_layouts_agree(wrapped(pretrained(name, **options), gate=False), images())


@torch.no_grad()
def test_padded_is_bucketed_is_packed_where_blocks_scale_the_tape() -> None:
    model = small(reader="act-after-norm", tape_ffn="append+blocks")
    model.reader.halt.weight.normal_(std=0.3)
    assert_layouts_agree(model, images())


@torch.no_grad()
def test_padded_is_bucketed_is_packed_in_bfloat16() -> None:
    """With weights like a trained model's, so that logits differ."""
    model, x = wrapped(gate=False, norm_scale=1.5), images(64)
    with torch.autocast("cpu", torch.bfloat16):
        answers = in_layouts(model, lambda: model(x))
    padded = answers["padded"].float()
    for logits in answers.values():
        difference = (logits.float() - padded).abs().max() / padded.abs().max()
        assert difference < 2e-2
        assert (logits.argmax(1) == padded.argmax(1)).float().mean() >= 0.999


@pytest.mark.parametrize("bank", ["input", "learn"])
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_a_sample_answers_the_same_alone_as_in_any_batch(bank: str, layout: str) -> None:
    model = small(bank=bank, tape_ffn="append+blocks")
    model.set_packed(**LAYOUTS[layout])
    together, backwards = model(images(), output=True), model(images().flip(0), output=True)
    torch.testing.assert_close(backwards.logits.flip(0), together.logits, rtol=1e-5, atol=1e-5)
    for row in range(12):
        alone = model(images()[row : row + 1], output=True)
        assert torch.equal(alone.tape.index[0], together.tape.index[row])
        torch.testing.assert_close(alone.logits[0], together.logits[row], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tape_ffn", ["append", "append+blocks"])
@torch.no_grad()
def test_intermediate_tokens_are_the_same_in_any_layout(tape_ffn: str) -> None:
    model = small(bank="learn", tape_ffn=tape_ffn)
    answers = in_layouts(model, lambda: model.forward_intermediates(images(), return_prefix_tokens=True))
    for found in answers.values():
        torch.testing.assert_close(found, answers["padded"], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_hidden_rows_are_not_computed() -> None:
    model = small()
    lengths, seen = model(images(), output=True).tape.length, []
    for block in model.vit.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[0] * inputs[0].shape[1]))

    def rows_computed() -> list[int]:
        seen.clear()
        model(images())
        return seen[:]

    rows = in_layouts(model, rows_computed)
    inputs = 12 * 16
    longest = 12 * int(lengths.max())
    assert longest < 12 * 6
    assert rows["padded"] == [inputs, inputs + longest, inputs + longest]
    assert rows["packed"] == [inputs, inputs + lengths.sum(), inputs + lengths.sum()]
    in_buckets = sum(len(which) * (16 + longest) for which, _, longest in buckets(lengths, 3))
    assert sum(rows["buckets"]) == inputs + 2 * in_buckets
    assert lengths.sum() <= in_buckets - inputs < 12 * 6


@torch.no_grad()
def test_a_cpu_packs_large_samples_by_default_and_pads_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Tensor] = []

    def counted(*given: Any) -> Tensor:
        packed.append(given[1].rows)
        return run_packed(*given)

    monkeypatch.setattr("adatape.models.adatape.run_packed", counted)
    for size, packs in ((32, False), (96, True)):
        model, batch = small(img_size=size, patch_size=4, bank="learn", depth=2), F.interpolate(images(), size)
        by_default = model(batch, output=True)
        assert by_default.tape.length.min() < by_default.tape.length.max()
        assert [rows.shape[1] * rows.shape[2] >= LARGE_SAMPLE for rows in packed] == [True] * packs
        packed.clear()
        for layout in LAYOUTS.values():
            model.set_packed(**layout)
            torch.testing.assert_close(model(batch), by_default.logits, rtol=1e-5, atol=1e-5)
        model.set_packed(None)
        packed.clear()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch), by_default.logits, rtol=1e-5, atol=1e-5)
        assert not packed
        for block in model.vit.blocks:
            block.compile(backend="aot_eager")
        torch.testing.assert_close(model(batch), by_default.logits, rtol=1e-5, atol=1e-5)
        assert not packed


@pytest.mark.parametrize("options", [{}, {"bank": "learn"}, {"tape_ffn": "append+blocks"}, {"gate": True}], ids=str)
@torch.no_grad()
def test_what_no_sample_reads_is_left_out_where_lengths_may_be_looked_at(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wrapped(**options) if "gate" in options else small(**options)
    cut, features = model(images(), output=True), model.forward_features(images())
    for module in ("atr", "packing", "models.adatape"):
        monkeypatch.setattr(f"adatape.{module}.may_look_at", lambda _: False)
    whole = model(images(), output=True)
    assert cut.tape.length.max() < cut.tape.mask.shape[1]
    for ours, theirs in zip(cut.tape, whole.tape, strict=True):
        assert torch.equal(ours, theirs)
    torch.testing.assert_close(cut.logits, whole.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(features, model.forward_features(images()), rtol=1e-5, atol=1e-5)


def test_gradients_are_the_same_in_any_layout() -> None:
    model = small(tape_ffn="append+blocks")
    x = images().requires_grad_()
    answers = in_layouts(model, lambda: torch.autograd.grad(model(x).square().sum(), x)[0])
    for gradient in answers.values():
        torch.testing.assert_close(gradient, answers["padded"], rtol=1e-4, atol=1e-6)


class Watched(nn.Module):
    """A block that records its masks."""

    def __init__(self, block: nn.Module, got: list[object]) -> None:
        super().__init__()
        self.block, self.got = block, got

    def forward(self, x: Tensor, attn_mask: object = None) -> Tensor:
        self.got.append(attn_mask)
        return self.block(x, attn_mask=attn_mask)


def masks_of(model: AdaTape) -> list[object]:
    got: list[object] = []
    model.vit.blocks = nn.Sequential(*(Watched(block, got) for block in model.vit.blocks))
    model(images())
    return got[1:]


def test_where_every_tape_is_full_attention_has_no_mask() -> None:
    assert all(isinstance(mask, PaddingMask) for mask in masks_of(small()))
    full = small(threshold=5.5)
    expected = full(images(), output=True)
    assert (expected.tape.length == 6).all()
    assert masks_of(full) == [None, None]
    just_not = small(threshold=5.0)
    assert masks_of(just_not) == [None, None]
    assert all(isinstance(mask, PaddingMask) for mask in masks_of(just_not.train()))
    torch.testing.assert_close(just_not.eval()(images()), expected.logits, rtol=1e-5, atol=1e-5)
    sampled = small(threshold=5.5, sample_budgets=True).train()
    assert all(isinstance(mask, PaddingMask) for mask in masks_of(sampled))


def test_training_and_gates_stay_padded() -> None:
    for model in (small(query_noise=0.0).train(), wrapped(gate=True)):
        expected = model(images())
        for chosen in LAYOUTS.values():
            model.set_packed(**chosen)
            assert torch.equal(model(images()), expected)


@torch.no_grad()
def test_a_model_compiled_as_a_whole_stays_padded() -> None:
    model = small(depth=2, steps=3, threshold=0.8)
    expected = model(images())
    model.set_packed()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), expected)


@pytest.mark.parametrize("tape_ffn", ["append", "append+blocks"])
@torch.no_grad()
def test_compiled_blocks_take_packed_batches_of_any_size_without_compiling_again(tape_ffn: str) -> None:
    model = small(tape_ffn=tape_ffn, depth=2)
    model.set_packed()
    expected = [model(images(n, n)) for n in (7, 12, 5, 30)]
    torch._dynamo.reset()
    counter, compiled = CompileCounterWithBackend("aot_eager"), []
    for block in model.vit.blocks:
        block.compile(dynamic=True, fullgraph=True, backend=counter)
    for n, logits in zip((7, 12, 5, 30), expected, strict=True):
        torch.testing.assert_close(model(images(n, n)), logits, rtol=1e-5, atol=1e-5)
        compiled.append(counter.frame_count)
    assert compiled[0] > 0
    assert len(set(compiled)) == 1


def test_checkpoints_compile_too() -> None:
    model = small(depth=2, steps=3, threshold=0.8, tape_ffn="append+blocks").train()
    model.set_grad_checkpointing()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    gradients = [
        torch.autograd.grad(f(images()).square().sum(), list(model.vit.blocks.parameters())) for f in (compiled, model)
    ]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_avit_removes_tokens_by_the_kernel_as_without(kernel: list[Tensor]) -> None:
    torch.manual_seed(0)
    options = {**SMALL, "depth": 4, "gamma": 4.0, "beta": -2.0}
    model = timm.create_model("avit_tiny_patch16_224", **{k: v for k, v in options.items() if "bank" not in k}).eval()
    for parameter in model.vit.blocks.parameters():
        parameter.mul_(4 if parameter.dim() == 2 else 1)
    masked = model(images(), output=True)
    model.set_packed()
    packed = model(images(), output=True)
    assert kernel
    torch.testing.assert_close(packed.logits, masked.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.steps.weight, masked.steps.weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [-1, 1.5, "2", True, None])
def test_a_number_of_buckets_that_leaves_samples_out_is_refused(count: Any) -> None:
    vit = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, num_heads=2, depth=2)
    model = adatape.wrap(vit, patch=4, steps=2, query_width=16, gate=False)
    with pytest.raises(ValueError, match=f"buckets is {count!r}; it must be 0"):
        model.set_packed(buckets=count)
    assert model.buckets == 0
