"""Ablated readers, and why ACT does not work on a tape."""

from __future__ import annotations

import dataclasses

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer

import adatape.models
from adatape.ablation import ActReader, FixedTokens, ParallelReader
from adatape.atr import read_tape
from adatape.config import ReaderConfig
from adatape.encoder import TapeBlock
from adatape.models import AdaTape

SMALL = {"img_size": 32, "depth": 3, "num_classes": 5, "patch_size": 8, "bank_patch": 4, "bank_size": 80}
READING = ReaderConfig(steps=6, threshold=1.5, merge=4, query_width=8)
READERS = ["parallel", "fixed", "act", "act-after-norm"]


def small(reader: str, **options) -> AdaTape:
    settings = {**SMALL, "steps": 6, "threshold": 1.5, "merge": 4, "tape_ffn": "append+blocks", **options}
    return timm.create_model("adatape_tiny_patch16_224", reader=reader, **settings)


def images(n: int = 6) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_parallel_reads_the_best_tokens_at_once_and_as_they_are() -> None:
    reader = ParallelReader(8, READING, 20)
    query, bank = torch.randn(3, 8), torch.randn(20, 8)
    tape = reader(query, bank)
    normed = reader.norm(bank)
    best = (reader.norm(query) @ normed.T).topk(6).indices
    assert torch.equal(tape.index[..., 0], best)
    torch.testing.assert_close(tape.tokens, normed[best])
    assert (tape.length == 6).all()


def test_no_gradient_reaches_the_query_of_a_parallel_read() -> None:
    query = torch.randn(3, 8, requires_grad=True)
    tape = ParallelReader(8, READING, 20)(query, torch.randn(20, 8))
    assert torch.autograd.grad(tape.tokens.square().sum(), query, allow_unused=True)[0] is None


@pytest.mark.parametrize("steps", [5, 10, 20, 40])
def test_the_papers_sweep_of_tape_counts_fits_784_tokens_in_parallel(steps: int) -> None:
    with torch.device("meta"):
        model = timm.create_model("adatape_tiny_patch16_224", reader="parallel", steps=steps, merge=5)
    assert model.reader.steps == steps


def test_forty_tokens_of_merge_twenty_do_not_fit_one_by_one() -> None:
    with pytest.raises(ValueError, match="bank has 784 tokens; steps × merge needs 800"):
        timm.create_model("adatape_tiny_patch16_224", steps=40)


def test_fixed_tokens_are_the_same_for_every_sample_and_need_no_bank() -> None:
    model = small("fixed")
    tape = model(images(), output=True).tape
    assert torch.equal(tape.tokens, tape.tokens[:1].expand_as(tape.tokens))
    assert not list(model.bank.parameters())
    assert sum(p.numel() for p in model.reader.parameters()) == 6 * 192


def test_an_infinite_threshold_reads_a_fixed_length_step_by_step() -> None:
    model = small("adaptive", threshold=float("inf"))
    assert (model(images(), output=True).tape.length == 6).all()


@pytest.mark.parametrize("reader", READERS)
def test_each_keeps_the_laws_of_a_tape(reader: str) -> None:
    model = small(reader).eval()
    together = model(images(), output=True)
    assert torch.equal(together.tape.mask, torch.arange(6) < together.tape.length[:, None])
    for row in range(6):
        torch.testing.assert_close(model(images()[row : row + 1])[0], together.logits[row], rtol=1e-5, atol=1e-5)
    model.set_budget(steps=0)
    assert torch.equal(model(images()), model.vit(images()))


@pytest.mark.parametrize("reader", READERS)
def test_each_trains_compiles_and_is_finite_in_bfloat16(reader: str) -> None:
    model = small(reader, depth=2, steps=3).train()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images(), output=True)
        loss = output.logits.float().square().mean() + output.ponder.mean()
    loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()), rtol=1e-4, atol=1e-5)


def act_reader(after_norm: bool = False) -> ActReader:
    reader = ActReader(8, READING, 40, after_norm)
    torch.nn.init.normal_(reader.halt.weight)
    return reader


def test_act_weights_sum_to_one_over_the_tape_and_scale_its_tokens() -> None:
    query, bank = torch.randn(16, 8), torch.randn(40, 8)
    tape = act_reader()(query, bank)
    share = tape.weight.sum(-1)
    torch.testing.assert_close(share.sum(-1), torch.ones(16))
    assert tape.length.unique().numel() > 1
    plain = read_tape(*(torch.nn.functional.layer_norm(x, (8,), eps=1e-6) for x in (query, bank)), 6, 99.0, 4, 8)
    torch.testing.assert_close(tape.tokens, plain.tokens * share[..., None], rtol=1e-4, atol=1e-5)


def test_a_norm_divides_acts_weight_out_of_the_token() -> None:
    """LayerNorm(p z) = LayerNorm(z), so attention's input has no gradient with respect to the token's weight."""
    block = TapeBlock(64, 2)
    token = torch.randn(4, 1, 64)
    p = torch.full((4, 1), 0.3, requires_grad=True)

    def sensitivity(seen: torch.Tensor) -> float:
        return torch.autograd.grad(seen.square().sum(), p)[0].abs().mean().item()

    before = sensitivity(block.attn(block.norm1(token * p[..., None])))
    after = sensitivity(block.attn(block.norm1(token) * p[..., None]))
    assert before < 1e-3 * after


def test_the_weight_reaches_attention_when_it_comes_after_the_norm() -> None:
    model = small("act-after-norm").eval()
    loud = model(images())
    with torch.no_grad():
        model.reader.halt.bias.fill_(-3.0)  # smaller weights, the same tokens
    assert not torch.allclose(model(images()), loud, atol=1e-4)


def test_a_higher_halting_bias_shortens_acts_tapes() -> None:
    lengths = []
    for bias in (-3.0, 0.0, 3.0):
        reader = ActReader(8, READING, 40)
        torch.nn.init.constant_(reader.halt.bias, bias)
        lengths.append(reader(torch.randn(8, 8), torch.randn(40, 8)).length.float().mean().item())
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[-1]


def test_norm_and_temperature_can_be_switched_off() -> None:
    query, bank = torch.randn(3, 8), torch.randn(40, 8)
    bare = dataclasses.replace(READING, norm=False, temperature=1.0)
    tape = adatape.models.adatape.make_reader("adaptive", 8, bare, 40)(query, bank)
    expected = read_tape(query, bank, 6, 1.5, 4, 8, temperature=1.0)
    assert torch.equal(tape.index, expected.index)
    torch.testing.assert_close(tape.weight, expected.weight)
    assert not torch.allclose(expected.weight, read_tape(query, bank, 6, 1.5, 4, 8).weight)


def test_budgets_of_fixed_tokens_take_the_first_ones() -> None:
    fixed = FixedTokens(8, READING)
    fixed.set_budget(2)
    assert torch.equal(fixed(torch.randn(3, 8), torch.zeros(0, 0)).tokens[0], fixed.tokens[:2])
    with pytest.raises(ValueError, match="steps is 7; it must be 0 to 6, the number of trained tokens"):
        fixed.set_budget(7)


def test_what_cannot_be_built_is_refused() -> None:
    with pytest.raises(ValueError, match="reader is 'quick'; it must be adaptive, parallel, fixed, act"):
        small("quick")
    with pytest.raises(ValueError, match="reader is 'act-after-norm'; it scales rows in TapeBlocks"):
        small("act-after-norm", tape_ffn="append")
    vit = VisionTransformer(32, 8, embed_dim=64, depth=2, num_heads=2)
    with pytest.raises(ValueError, match="reader is 'act-after-norm'"):
        adatape.models.wrap(vit, patch=4, reader="act-after-norm")
