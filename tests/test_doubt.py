"""A model that doubts: it reads as much as its guess leaves open, and learns to guess."""

from __future__ import annotations

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import adatape
import adatape.models
from adatape.export import check_exportable
from adatape.layout import in_doubt
from adatape.measure.cost import cost, total
from adatape.measure.spent import spent_macs
from adatape.models import AdaTape
from adatape.train.loop import total_loss

SMALL = {"img_size": 32, "patch_size": 8, "bank_patch": 4, "depth": 3, "layer": 2, "num_classes": 5, "steps": 12}
READERS = [{"reader": "selective"}, {"merge": 2, "threshold": 12.0}]


def model(**options: object) -> AdaTape:
    torch.manual_seed(0)
    made = timm.create_model("adatape_tiny_patch16_224", doubts=True, **{**SMALL, **READERS[0], **options}).eval()
    with torch.no_grad():
        made.guess[1].weight.normal_(std=0.3)  # guesses of many shades
    return made


def images(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_none_is_read_by_the_certain_and_all_by_those_who_know_nothing() -> None:
    guess = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 0], [1.1, 0, 0, 0]])
    assert in_doubt(guess, 8).tolist() == [0, 8, 6]
    assert in_doubt(torch.zeros(1, 1000), 10).tolist() == [10]


def test_even_the_certain_read_as_much_as_training_did() -> None:
    guess = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 0], [1.1, 0, 0, 0]])
    assert in_doubt(guess, 8, least=4).tolist() == [4, 8, 7]
    assert in_doubt(guess, 3, least=4).tolist() == [3, 3, 3]  # a smaller budget binds
    made = model(least=5)
    made.set_haste(50)
    assert set(made(images(), output=True).tape.length.tolist()) <= {5, 6}


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_a_tape_is_as_long_as_the_guess_leaves_open(reader: dict[str, object]) -> None:
    out = model(**reader)(images(), output=True)
    assert torch.equal(out.tape.length, in_doubt(out.guess, 12))
    assert torch.equal(out.tape.mask.sum(1), out.tape.length)
    assert len(out.tape.length.unique()) > 2


def test_one_that_knows_nothing_yet_reads_all() -> None:
    fresh = timm.create_model("adatape_tiny_patch16_224", doubts=True, **SMALL, **READERS[0]).eval()
    assert fresh(images(), output=True).tape.length.tolist() == [12] * 16


def test_haste_reads_less_and_no_haste_all() -> None:
    made, x = model(), images()
    usual = made(x, output=True).tape.length
    made.set_haste(3)
    hasty = made(x, output=True).tape.length
    assert (hasty <= usual).all()
    assert (hasty < usual).any()
    made.set_haste(0)
    assert made(x, output=True).tape.length.tolist() == [12] * 16
    made.set_haste()
    assert torch.equal(made(x, output=True).tape.length, usual)
    assert torch.equal(model(haste=3.0)(x, output=True).tape.length, hasty)
    with pytest.raises(ValueError, match="haste is -1; it must be 0"):
        made.set_haste(-1)


def test_the_guess_bends_no_block_towards_it() -> None:
    made, target = model().train(), torch.arange(16) % 5
    out = made(images(), output=True, key=torch.arange(16))
    torch.nn.functional.cross_entropy(out.guess, target).backward()
    assert {name for name, p in made.named_parameters() if p.grad is not None} == {
        f"guess.{part}" for part in ("0.weight", "0.bias", "1.weight", "1.bias")
    }


def test_other_classes_want_another_guess() -> None:
    made = model()
    length = made(images(), output=True).tape.length
    made.reset_classifier(0)
    assert torch.equal(made(images(), output=True).tape.length, length)  # features are read for as before
    made.reset_classifier(7)
    assert made(images(), output=True).guess.shape == (16, 7)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, global_pool="avg")
    wrapped = adatape.wrap(vit, patch=4, doubts=True, merge=2)
    wrapped.reset_classifier(7)
    assert wrapped(images(), output=True).guess.shape == (16, 7)


def test_one_without_classes_reads_all() -> None:
    made = timm.create_model("adatape_tiny_patch16_224", doubts=True, **{**SMALL, "num_classes": 0}, **READERS[0])
    assert made.eval()(images(), output=True).tape.length.tolist() == [12] * 16


def test_logits_alone_give_every_parameter_a_gradient() -> None:
    made = model().train()
    made(images(), key=torch.arange(16)).square().sum().backward()
    assert not [name for name, p in made.named_parameters() if p.grad is None]
    assert not any(p.grad.any() for p in made.guess.parameters())


def test_no_tape_no_guess() -> None:
    made, x = model(), images()
    made.set_budget(steps=0)
    out = made(x, output=True)
    assert out.guess is None
    assert torch.equal(out.logits, made.vit(x))


def test_a_smaller_budget_scales_every_tape() -> None:
    made, x = model(), images()
    full = made(x, output=True)
    made.set_budget(steps=6)
    assert torch.equal(made(x, output=True).tape.length, in_doubt(full.guess, 6))


def test_in_training_tapes_are_cut_at_random_and_the_guess_is_learnt() -> None:
    made = model().train()
    key, target = torch.arange(64), torch.arange(64) % 5
    out = made(images(64), output=True, key=key)
    assert out.tape.length.max() > 9
    assert out.tape.length.min() < 3
    assert not torch.equal(out.tape.length, in_doubt(out.guess, 12))
    guessing = torch.nn.functional.cross_entropy(out.guess, target)
    plain = total_loss(out._replace(guess=None), target, 0.0)
    torch.testing.assert_close(total_loss(out, target, 0.0), plain + guessing)
    total_loss(out, target, 0.0).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_a_sample_reads_alone_what_it_reads_in_a_batch(reader: dict[str, object]) -> None:
    made, x = model(**reader), images()
    together = made(x, output=True)
    for place in (0, 7):
        alone = made(x[place : place + 1], output=True)
        assert torch.equal(alone.tape.index, together.tape.index[place : place + 1])
        torch.testing.assert_close(alone.logits, together.logits[place : place + 1], rtol=1e-4, atol=1e-5)


def test_cost_is_what_pytorch_counts() -> None:
    made, x = model(), images(1)
    length = int(made(x, output=True).tape.length)
    with FlopCounterMode(display=False) as counter:
        made(x)
    padded = (12 - length) * (total(cost(made, 12)).macs - total(cost(made, 11)).macs)
    assert counter.get_total_flops() // 2 == pytest.approx(total(cost(made, length)).macs + padded, rel=0.01)
    assert spent_macs(made, made(x, output=True)).item() == total(cost(made, length)).macs


def test_compiles_in_full() -> None:
    made, x = model(), images(4)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), made(x))


def test_what_cannot_doubt_says_so() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
    with pytest.raises(ValueError, match="sample_budgets False"):
        adatape.wrap(vit, patch=4, doubts=True, sample_budgets=False, merge=2)
    assert adatape.wrap(vit, patch=4, doubts=True, merge=2).doubts
    with pytest.raises(ValueError, match="doubts is True"):
        check_exportable(model())
