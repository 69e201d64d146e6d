"""The selective reader: selection, gradients and cost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
from selective import SelectiveAdaTape, SelectiveReader, build_selective, most_worth, token_bias, wrap_selective
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adatape.atr import highest
from adatape.config import ReaderConfig
from adatape.evaluate.cost import cost, total

SMALL = {"img_size": 32, "patch_size": 8, "bank_patch": 4, "bank_size": 60, "steps": 12}
SMALL |= {"depth": 3, "embed_dim": 192, "num_heads": 3, "num_classes": 5}


def model(bank: str = "input", **options: object) -> SelectiveAdaTape:
    torch.manual_seed(0)
    return build_selective(bank=bank, **{**SMALL, **options}).eval()  # type: ignore[arg-type]


def let_lengths_differ(reader: SelectiveReader, lengths: Callable[[], Tensor]) -> None:
    """Lowers the gates until samples have different lengths."""
    with torch.no_grad():
        while len(set(lengths().tolist())) < 3:
            reader.need.bias.sub_(0.2)


def reader(floor: float = 0.5, **fields: object) -> SelectiveReader:
    return SelectiveReader(16, ReaderConfig(**{"steps": 5, "threshold": 5.0, "query_width": 8, **fields}), 30, floor)  # type: ignore[arg-type]


def test_the_best_are_found_with_the_lowest_place_first_among_equals() -> None:
    scores = torch.randn(40, 30).mul(2).round()
    scores[0] = 0.0
    scores[1, ::2] = -0.0
    assert torch.equal(most_worth(scores, 7), highest(scores, 7))


def test_gates_fall_and_all_that_is_read_but_the_first_is_above_the_floor() -> None:
    read = reader().eval()
    tape = read(torch.randn(20, 16), torch.randn(30, 16))
    weight = tape.weight.squeeze(-1)
    assert (weight[:, 1:] <= weight[:, :-1]).all()
    assert (weight[:, 1:][tape.mask[:, 1:]] > 0.5).all()
    assert tape.mask[:, 0].all()
    assert torch.equal(tape.length, tape.mask.sum(1))
    assert not tape.tokens[~tape.mask].any()


def test_a_higher_floor_reads_a_beginning_of_the_same_tape() -> None:
    read, query, bank = reader().eval(), torch.randn(20, 16), torch.randn(30, 16)
    let_lengths_differ(read, lambda: read(query, bank).length)
    long = read(query, bank)
    read.set_floor(0.6)
    short = read(query, bank)
    assert (short.length <= long.length).all()
    assert short.length.sum() < long.length.sum()
    assert torch.equal(short.index[short.mask], long.index[short.mask])
    read.set_floor()
    assert torch.equal(read(query, bank).index, long.index)


def test_a_tape_ends_where_the_gates_sum_to_the_threshold() -> None:
    read, query, bank = reader().eval(), torch.randn(20, 16), torch.randn(30, 16)
    read.set_budget(threshold=1.5)
    tape = read(query, bank)
    weight = tape.weight.squeeze(-1)
    last = weight.gather(1, tape.length[:, None] - 1).squeeze(1)
    assert (weight.sum(1) - last < 1.5).all()
    assert tape.length.max() < 5


@pytest.mark.parametrize("floor", [0.0, 1.0, 1.5])
def test_a_floor_that_is_no_gate_is_refused(floor: float) -> None:
    with pytest.raises(ValueError, match="floor"):
        reader().set_floor(floor)
    with pytest.raises(ValueError, match="floor"):
        reader(floor=floor)


def test_in_training_a_token_is_read_about_as_often_as_its_gate_says() -> None:
    read, query, bank = reader(steps=1).train(), torch.randn(1, 16), torch.randn(30, 16)
    two = SelectiveReader(16, ReaderConfig(steps=2, threshold=2.0, query_width=8), 30).train()
    two.load_state_dict(read.state_dict())
    with torch.no_grad():
        gate = two._scores(two._norm(query), two._norm(bank)).sort(descending=True).values[0, 1].sigmoid()
        lengths = two(query.expand(4000, -1), bank, torch.arange(4000)).length
    assert (lengths == 2).float().mean() == pytest.approx(float(gate), abs=0.03)


def test_a_sample_s_floor_belongs_to_its_key() -> None:
    read, query, bank = reader().train(), torch.randn(20, 16), torch.randn(30, 16)
    whole = read(query, bank, torch.arange(20))
    part = read(query[5:9], bank, torch.arange(5, 9))
    assert torch.equal(whole.length[5:9], part.length)


def test_a_gate_of_one_is_no_bias_and_a_gate_of_half_halves_attention() -> None:
    visible = torch.tensor([[True, True, True, False]])
    bias = token_bias(visible, torch.tensor([[0.5, 0.0]]))
    share = bias.exp()[0, 0, 0]
    torch.testing.assert_close(share, torch.tensor([1.0, 1.0, 0.5, 0.0]))


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_everything_learns_and_gradients_are_finite(bank: str) -> None:
    made = model(bank).train()
    output = made(torch.randn(6, 3, 32, 32), output=True, key=torch.arange(6))
    (output.logits.square().sum() + output.ponder.sum()).backward()
    for name, parameter in made.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert made.reader.ask.weight.grad.abs().sum() > 0
    assert made.reader.answer.weight.grad.abs().sum() > 0


def test_where_tokens_are_hidden_in_training_a_whole_bank_is_read_in_part() -> None:
    made = model(steps=64, bank_dropout=0.25, floor=1e-6).train()
    images, keys = torch.randn(40, 3, 32, 32), torch.arange(40)
    output = made(images, output=True, key=keys)
    assert output.tape.length.double().mean() / 64 == pytest.approx(0.75, abs=0.03)
    assert torch.equal(output.tape.length, output.tape.mask.sum(1))
    output.logits.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in made.parameters())
    assert (made.eval()(images, output=True).tape.length == 64).all()


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_trimming_hidden_tape_leaves_logits_unchanged(bank: str) -> None:
    made, images = model(bank), torch.randn(6, 3, 32, 32)
    let_lengths_differ(made.reader, lambda: made(images, output=True).tape.length)
    with torch.no_grad():
        whole = made(images, output=True)
        longest = int(whole.tape.length.max())
        made.reader.steps = longest
        torch.testing.assert_close(made(images), whole.logits, rtol=1e-5, atol=1e-5)
        for row in range(6):
            made.reader.steps = int(whole.tape.length[row])
            torch.testing.assert_close(made(images[row : row + 1]), whole.logits[row : row + 1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_the_formula_is_what_the_counter_counts(bank: str) -> None:
    made = model(bank)
    with torch.no_grad():
        made.reader.need.bias.fill_(100.0)  # all gates open
        counter = FlopCounterMode(display=False)
        with sdpa_kernel(SDPBackend.MATH), counter:  # before 2.15 torch counts the CPU's fused attention as nothing
            made(torch.randn(1, 3, 32, 32))
    assert counter.get_total_flops() == 2 * total(cost(made)).macs


def test_it_compiles_in_full() -> None:
    made, images = model().train(), torch.randn(3, 3, 32, 32)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    key = torch.arange(3)
    torch.testing.assert_close(compiled(images, key=key), made(images, key=key), rtol=1e-4, atol=1e-5)


def test_budget_zero_is_the_vit() -> None:
    made, images = model(), torch.randn(3, 3, 32, 32)
    made.set_budget(steps=0)
    assert torch.equal(made(images), made.vit(images))


def test_a_wrapped_vit_starts_as_itself() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=5).eval()
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(wrap_selective(vit, patch=4, steps=6)(images), vit(images))
