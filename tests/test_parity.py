"""The parity task, its models, and why reading pairs solves it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from graphable import FromHost
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from adatape.atr import read_tape
from adatape.config import Experiment, Optimizer, from_dict, to_dict
from adatape.data.parity import held_out_set, parity_of, training_batch, validation_set
from adatape.data_config import Parity
from adatape.models.sequence import build_sequence_model
from adatape.recipes import RECIPES, parity, parity_small
from adatape.train.optim import rate_at
from adatape.train.task import build_for
from adatape.train.trainer import Trainer

SYSTEMS = ("adatape", "transformer", "ut", "singles", "random", "order")


def tiny(system: str = "adatape", **changes) -> Experiment:
    experiment = parity_small(length=8, system=system)
    model = dataclasses.replace(experiment.model, width=48, depth=2)
    return dataclasses.replace(experiment, model=model, data=Parity(8, held_out=200), **changes)


def test_the_label_is_the_number_of_ones_mod_two() -> None:
    symbols = torch.tensor([[1, 0, -1, 1], [1, 1, 1, 0], [-1, -1, 0, 0], [1, -1, 0, 0]])
    assert parity_of(symbols).tolist() == [0, 1, 0, 1]


def test_symbols_and_labels_are_drawn_evenly() -> None:
    symbols, label = held_out_set(64)
    assert symbols.shape == (6400, 64)
    for symbol in (-1, 0, 1):
        assert (symbols == symbol).float().mean().item() == pytest.approx(1 / 3, abs=0.005)
    assert label.float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    first = training_batch(16, 32, seed=3, step=7)
    assert torch.equal(first.symbols, training_batch(16, 32, seed=3, step=7).symbols)
    for seed, step in ((3, 8), (4, 7)):
        assert not torch.equal(first.symbols, training_batch(16, 32, seed, step).symbols)


def test_training_validation_and_held_out_sequences_do_not_meet() -> None:
    streams = [training_batch(32, 6400, 0, 0), validation_set(32), held_out_set(32)]
    rows = [{tuple(row) for row in stream.symbols.tolist()} for stream in streams]
    for one, other in itertools.combinations(rows, 2):
        assert not one & other


def test_a_senseless_set_is_refused() -> None:
    with pytest.raises(ValueError, match="length is 0 and size 5; both must be at least 1"):
        held_out_set(0, 5)


@pytest.mark.parametrize("length", [8, 32, 64])
@pytest.mark.parametrize("update", ["average", "replace"])
def test_pairs_of_an_untrained_reader_spell_out_the_parity(length: int, update: str) -> None:
    """Equal symbols are paired, so mixed pairs show each symbol's count mod 2."""
    symbols, label = held_out_set(length, 500)
    vectors = torch.nn.functional.layer_norm(torch.randn(3, 64), (64,))
    query = torch.nn.functional.layer_norm(torch.randn(1, 64), (64,)).expand(500, -1)
    tape = read_tape(query, vectors[symbols + 1], length // 2, length / 4, merge=2, update=update)
    read = symbols[:, :, None].expand(-1, -1, 2).gather(1, tape.index.clamp(min=0))
    mixed = (read[..., 0] != read[..., 1]) & tape.mask
    ones_in_mixed_pairs = ((read == 1).any(-1) & mixed).sum(-1)
    assert torch.equal(ones_in_mixed_pairs % 2, label)


@pytest.mark.parametrize("system", ["random", "order"])
def test_the_controls_leave_no_such_trace(system: str) -> None:
    """With any other pairing many pairs are mixed, and counting them mod 2 is parity again."""
    experiment = parity(length=32, system=system)
    model = build_sequence_model(experiment.model, 32).eval()
    symbols = held_out_set(32, 200).symbols
    tape = model(symbols, output=True).tape
    read = symbols[:, :, None].expand(-1, -1, 2).gather(1, tape.index.clamp(min=0))
    assert ((read[..., 0] != read[..., 1]) & tape.mask).sum(-1).float().mean() > 6


def test_singles_reads_every_symbol_once() -> None:
    model = build_sequence_model(parity(length=8, system="singles").model, 8).eval()
    tape = model(held_out_set(8, 50).symbols, output=True).tape
    assert (tape.length == 8).all()
    assert (tape.index[..., 0].sort(-1).values == torch.arange(8)).all()


def test_adatape_sees_the_sequence_through_its_tape_alone() -> None:
    model = build_sequence_model(parity(length=8).model, 8).eval()
    model.set_budget(steps=0)
    logits = model(held_out_set(8, 20).symbols)
    assert torch.equal(logits, logits[:1].expand_as(logits))


def test_the_order_of_symbols_does_not_matter_to_adatape_but_does_to_the_transformer() -> None:
    symbols = held_out_set(8, 20).symbols
    shuffled = symbols[:, torch.randperm(8)]
    adatape, transformer = (build_sequence_model(parity(8, s).model, 8).eval() for s in ("adatape", "transformer"))
    torch.testing.assert_close(adatape(symbols), adatape(shuffled), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(transformer(symbols), transformer(shuffled), rtol=1e-4, atol=1e-5)


def test_the_papers_recipe_is_the_papers() -> None:
    experiment = parity(length=64)
    assert experiment.optimizer == Optimizer(lr=3e-5, warmup=1000, steps=10_000, batch=128)
    assert (experiment.model.width, experiment.model.depth, experiment.model.heads) == (192, 12, 3)
    reading = experiment.model.reading
    assert (reading.steps, reading.threshold, reading.merged) == (32, 16.0, 2)
    assert experiment.data.held_out == 6400


@pytest.mark.parametrize("name", ["parity", "parity-small"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_recipe_survives_its_json(name: str, system: str) -> None:
    experiment = RECIPES[name](system=system)
    assert from_dict(Experiment, to_dict(experiment)) == experiment


def test_an_unknown_field_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Parity has no field lenght; it has held_out, length"):
        from_dict(Parity, {"lenght": 5})
    with pytest.raises(ValueError, match="length is 7; it must be even"):
        parity(length=7)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_takes_three_steps_the_same_way_twice(system: str) -> None:
    losses = [torch.stack([stats.loss for stats in Trainer(tiny(system)).train(3)]) for _ in range(2)]
    assert losses[0].isfinite().all()
    if system != "random":  # the control that reads at random draws from the global generator in between
        assert torch.equal(*losses)


def test_a_trainer_stops_at_its_last_step() -> None:
    trainer = Trainer(tiny(optimizer=Optimizer(steps=4, batch=8)))
    assert len(list(trainer.train(3))) == 3
    assert len(list(trainer.train(3))) == 1
    assert trainer.step == 4


def test_the_rate_warms_up_and_stays() -> None:
    settings = Optimizer(lr=1.0, warmup=4, steps=8)
    assert [rate_at(settings, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_a_given_ponder_weight_is_kept_by_every_system() -> None:
    for system in SYSTEMS:
        assert parity(16, system, ponder_weight=0.5).ponder_weight == 0.5
        assert parity(16, system).ponder_weight == (0.01 if system == "ut" else 0.0)


def test_the_ponder_weight_enters_the_loss() -> None:
    with_ponder, without = (next(iter(Trainer(tiny(ponder_weight=w)).train(1))) for w in (0.5, 0.0))
    assert with_ponder.loss > without.loss


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_training_step_can_be_a_cuda_graph(system: str) -> None:
    model = build_for(tiny(system)).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {name: torch.empty_like(each, device="cuda") for name, each in model.state_dict().items()}
        symbols, label, key = (torch.empty(*shape, dtype=torch.int64, device="cuda") for shape in ((4, 8), (4,), (4,)))
        with FromHost() as seen:
            output = functional_call(model, weights, (symbols,), {"output": True, "key": key})
            model.loss(output, label, 0.01)
    assert seen.found == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("system", ["adatape", "transformer", "singles"])
def test_a_model_of_sequences_takes_its_weights_dtype(system: str, dtype: torch.dtype) -> None:
    model = build_sequence_model(tiny(system).model, 8).to(dtype)
    output = model(held_out_set(8, 4).symbols, output=True)
    assert output.logits.dtype == dtype
    model.loss(output, torch.tensor([0, 1, 0, 1])).backward()
