from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from adatape.atr import read_tape
from adatape.banks import BankView, InputBank, LearnedBank
from adatape.config import ReaderConfig
from adatape.reader import TapeReader, at_random, in_order

SMALL = ReaderConfig(steps=3, threshold=1.0, merge=2, query_width=8)


def test_the_input_bank_is_the_papers_equation() -> None:
    bank, images = InputBank(16, patch=4, image=(8, 12), channels=3), torch.randn(2, 3, 8, 12)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).reshape(2, 6, 48)
    h1 = patches @ bank.h1.proj.weight.reshape(16, 48).T + bank.h1.proj.bias
    expected = (h1 + bank.pos_embed) @ bank.h2.weight.T + bank.h2.bias
    assert bank.size == 6
    torch.testing.assert_close(bank(images), expected, rtol=1e-4, atol=1e-5)


def test_the_learned_bank_is_the_same_for_every_image() -> None:
    bank = LearnedBank(20, 8)
    assert bank(torch.randn(2, 3, 8, 8)) is bank(torch.randn(5, 3, 4, 4))
    assert bank.tokens.std().item() == pytest.approx(0.02, rel=0.3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: InputBank(16, patch=5, image=8), "bank patch is 5; it must divide the image size 8 × 8"),
        (lambda: InputBank(16, patch=0, image=8), "bank patch is 0"),
        (lambda: LearnedBank(0, 8), "bank_size is 0; it must be a whole number of at least 1"),
        (lambda: TapeReader(8, SMALL, bank_size=5), "bank has 5 tokens; steps × merge needs 6"),
        (lambda: TapeReader(4, SMALL, bank_size=50), "query_width is 8; .* the model's width 4"),
        (lambda: TapeReader(8, dataclasses.replace(SMALL, steps=0), 9), "steps is 0; it must be positive"),
        (lambda: TapeReader(8, dataclasses.replace(SMALL, bank_dropout=1.0), 9), "bank_dropout is 1.0"),
        (
            lambda: TapeReader(8, dataclasses.replace(SMALL, bank_dropout=0.5), 9),
            "bank has 9 tokens, up to 14 of them hidden",
        ),
        (lambda: TapeReader(8, dataclasses.replace(SMALL, choose="worst"), 9), "choose is 'worst'; it must be one of"),
    ],
)
def test_what_cannot_be_read_is_refused_at_construction(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_query_and_bank_share_one_norm() -> None:
    reader = TapeReader(8, SMALL, 20).eval()
    torch.nn.init.normal_(reader.norm.weight)
    torch.nn.init.normal_(reader.norm.bias)
    query, bank = torch.randn(4, 8), torch.randn(20, 8)
    expected = read_tape(reader.norm(query), reader.norm(bank), 3, 1.0, 2, query_width=8)
    tape = reader(query, bank)
    assert torch.equal(tape.index, expected.index)
    torch.testing.assert_close(tape.tokens, expected.tokens)


def test_the_norm_starts_at_the_given_scale() -> None:
    reader = TapeReader(8, dataclasses.replace(SMALL, norm_scale=0.3), 20)
    assert (reader.norm.weight == 0.3).all()


def test_noise_and_hiding_act_in_training_only() -> None:
    reader = TapeReader(8, dataclasses.replace(SMALL, query_noise=0.5, bank_dropout=0.2), 60)
    query, bank = torch.randn(4, 8), torch.randn(60, 8)
    reader.eval()
    assert torch.equal(reader(query, bank).tokens, reader(query, bank).tokens)
    reader.train()
    assert not torch.equal(reader(query, bank).tokens, reader(query, bank).tokens)


def test_training_randomness_belongs_to_each_samples_key() -> None:
    reader = TapeReader(8, dataclasses.replace(SMALL, query_noise=0.5, bank_dropout=0.2), 60).train()
    query, bank, key = torch.randn(4, 8), torch.randn(60, 8), torch.tensor([5, 6, 7, 8])
    whole = reader(query, bank, key).tokens
    halves = [reader(query[part], bank, key[part]).tokens for part in ([2, 3], [0, 1])]
    assert torch.equal(whole[[2, 3, 0, 1]], torch.cat(halves))
    assert not torch.equal(whole, reader(query, bank, key + 1).tokens)


def test_hiding_is_drawn_per_sample_and_at_its_rate() -> None:
    reader = TapeReader(8, dataclasses.replace(SMALL, bank_dropout=0.1), 1000).train()
    hidden = reader._dropout_mask(torch.zeros(50, 8), 1000, None)
    assert hidden.float().mean() == pytest.approx(0.1, abs=0.01)
    assert not torch.equal(hidden[0], hidden[1])


def test_the_threshold_scales_with_steps_unless_given() -> None:
    reader = TapeReader(64, ReaderConfig(), 100)
    reader.set_budget(steps=4)
    assert (reader.steps, reader.threshold, reader.reading.merged) == (4, 0.8, 5)
    reader.set_budget(steps=4, threshold=1.5)
    assert (reader.steps, reader.threshold) == (4, 1.5)
    reader.set_budget()
    assert (reader.steps, reader.threshold) == (10, 2.0)


def test_a_budget_beyond_the_built_one_warns_and_a_senseless_one_is_refused() -> None:
    reader = TapeReader(64, ReaderConfig(), 100)
    with pytest.warns(UserWarning, match="steps is 12; the model was built, and perhaps trained, for at most 10"):
        reader.set_budget(steps=12)
    with pytest.raises(ValueError, match="steps is -1; it must be 0"):
        reader.set_budget(steps=-1)
    with pytest.raises(ValueError, match="threshold is 0; it must be positive"):
        reader.set_budget(threshold=0)


def test_no_budget_is_ever_exceeded() -> None:
    reader = TapeReader(8, ReaderConfig(steps=6, threshold=3.0, query_width=8), 40).eval()
    for steps in range(1, 7):
        reader.set_budget(steps=steps)
        assert reader(torch.randn(16, 8), torch.randn(40, 8)).length.max() <= steps


def test_reads_in_float32_under_autocast_and_from_bfloat16_weights() -> None:
    reader = TapeReader(8, SMALL, 20).eval()
    query, bank = torch.randn(4, 8), torch.randn(20, 8)
    expected = reader(query, bank)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(reader(query, bank).tokens, expected.tokens)
    tape = reader.bfloat16()(query.bfloat16(), bank.bfloat16())
    assert tape.weight.dtype == tape.ponder.dtype == torch.float32


def test_the_controls_read_unread_tokens_in_their_own_order() -> None:
    d = torch.randn(3, 8).masked_fill(torch.arange(8) % 3 == 0, -torch.inf)
    assert in_order(d, 4).tolist() == [[1, 2, 4, 5]] * 3
    seen = {tuple(at_random(d, 2)[0].tolist()) for _ in range(50)}
    assert len(seen) > 5
    assert all(place % 3 for pair in seen for place in pair)


@pytest.mark.parametrize("learns", [True, False])
def test_the_shared_norm_learns_only_where_it_may(learns: bool) -> None:
    bank = LearnedBank(40, 16)
    reader = TapeReader(16, ReaderConfig(steps=3, merge=2, query_width=8, norm_scale=0.5, norm_learns=learns), 40)
    query = torch.randn(4, 16)
    reader(query, bank.open(torch.zeros(4), query[:, None], query)).tokens.sum().backward()
    assert all((p.grad is not None) == learns for p in reader.norm.parameters())
    assert bank.tokens.grad is not None
    assert torch.equal(reader.norm.weight, torch.full((16,), 0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("fields", [{}, {"threshold": 2.9}, {"ponder": "max"}, {"choose": "order"}, {"norm": False}])
@torch.no_grad()
def test_reading_a_shared_bank_by_its_keys_alone_gives_the_same_bits(fields: dict[str, object]) -> None:
    reader = TapeReader(48, dataclasses.replace(SMALL, **fields), 3000).eval()  # type: ignore[arg-type]
    query, bank = torch.randn(4, 48), torch.randn(3000, 48)
    by_keys = reader(query, bank)
    assert reader._reads_keys(query, BankView(bank))
    reader.use_kernels = False
    assert not reader._reads_keys(query, BankView(bank))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(by_keys, reader(query, bank), strict=True))


def test_pytorchs_counter_counts_the_selection_of_tokens() -> None:
    reader, query, bank = TapeReader(16, SMALL, 50), torch.randn(4, 16), torch.nn.Parameter(torch.randn(50, 16))
    with FlopCounterMode(display=False) as counter:
        reader(query, bank).tokens.sum().backward()
    assert counter.get_total_flops() == 2 * 3 * 4 * 50 * 8
    assert bank.grad is not None
    assert bank.grad.any()
