from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path

import pytest
import torch
from small_runs import tiny
from torch import Tensor

from adatape.cli import main
from adatape.config import Budget, Experiment, ReaderConfig, from_dict, to_dict
from adatape.data.loaders import Labelled
from adatape.evaluate.budget import (
    Point,
    Target,
    apply_budget,
    choose,
    frontier,
    grid,
    milliseconds_per_image,
    scaled_budget,
    target_of,
    trained_budget,
)
from adatape.evaluate.reading import Reads
from adatape.packing import truncate_tape
from adatape.reader import TapeReader
from adatape.report.budgets import write_budgets
from adatape.report.pictures.budget_overview import examples_of
from adatape.report.tables import budgets_table, evaluated_table, found_budget_table
from adatape.train.budgets import _every_other, _held_out, find_budget, reset_budget, store_budget
from adatape.train.folder import WEIGHTS, check_same, load_run, prepare, with_budget, write
from adatape.train.launch import evaluate_run
from adatape.train.task import build_for
from adatape.train.trainer import Trainer
from adatape.train.weights import write_weights

BUDGETED = ["adatape", "ut", "u2t", "uvit", "ponder", "parity adatape", "parity ut"]
IMAGES = torch.linspace(-1, 1, 6 * 64).reshape(6, 1, 8, 8).sin()


def untrained(folder: Path, family: str = "adatape", **fields: object) -> Path:
    """The folder of a finished run with untrained weights."""
    torch.manual_seed(0)
    experiment = tiny(family, **fields)
    prepare(folder, experiment, "cpu")
    write_weights(folder / WEIGHTS, build_for(experiment).state_dict())
    return folder


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Enlarges weights so that images read different tokens."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def settings(**chosen: object) -> ReaderConfig:
    return ReaderConfig(steps=4, threshold=1.5, merge=3, query_width=8, **chosen)  # type: ignore[arg-type]


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("family", ["adatape", "adatape-learn"])
def test_hiding_beyond_a_budget_answers_as_that_budget_does(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread(build_for(tiny(family, model__options__threshold=1.4))).eval()
    whole = model(IMAGES, output=True)
    assert whole.tape.length.max() > 1
    read = type(model.reader).forward
    for steps in range(5):
        model.set_budget(steps, 1.4)
        expected = model(IMAGES, output=True)
        model.set_budget()
        few = torch.full((6,), steps)
        monkeypatch.setattr(type(model.reader), "forward", lambda self, *a, few=few: truncate_tape(read(self, *a), few))
        hidden = model(IMAGES, output=True)
        monkeypatch.undo()
        torch.testing.assert_close(hidden.logits, expected.logits, rtol=1e-4, atol=1e-5)
        if steps:
            assert torch.equal(hidden.tape.length, expected.tape.length)
            assert torch.equal(hidden.tape.index[:, :steps], expected.tape.index)
            assert not hidden.tape.tokens[:, steps:].any()
            assert not hidden.tape.weight[:, steps:].any()


def test_a_hidden_token_leaves_no_trace_but_ponder() -> None:
    tape = TapeReader(8, settings(), 20).eval()(torch.randn(5, 8), torch.randn(20, 8))
    budget = torch.tensor([0, 1, 2, 3, 9])
    cut = truncate_tape(tape, budget)
    assert cut.length.tolist() == torch.minimum(tape.length, budget).tolist() == cut.mask.sum(1).tolist()
    assert (cut.index[~cut.mask] == -1).all()
    assert not cut.tokens[~cut.mask].any()
    assert not cut.weight[~cut.mask].any()
    assert torch.equal(cut.ponder, tape.ponder)
    assert same(tuple(each[4] for each in cut), tuple(each[4] for each in tape))


def test_a_drawn_budget_belongs_to_its_key_and_to_training() -> None:
    reader = TapeReader(8, settings(sample_budgets=True), 20).train()
    query, bank, key = torch.randn(400, 8), torch.randn(20, 8), torch.arange(400)
    whole = reader(query, bank, key)
    halves = [reader(query[part], bank, key[part]) for part in (slice(200), slice(200, 400))]
    assert same(whole, tuple(torch.cat(pair) for pair in zip(*halves, strict=True)))
    assert not torch.equal(whole.length, reader(query, bank, key + 400).length)
    assert set(whole.length.tolist()) >= {0, 1, 2}
    plain = TapeReader(8, settings(), 20).train()(query, bank, key)
    assert whole.mask.shape == plain.mask.shape
    assert (whole.length <= plain.length).all()
    assert same(reader.eval()(query, bank, key), plain)


def test_budgets_are_drawn_evenly_from_none_to_all() -> None:
    reader = TapeReader(8, dataclasses.replace(settings(sample_budgets=True), threshold=9.0), 20).train()
    length = reader(torch.randn(5000, 8), torch.randn(20, 8), torch.arange(5000)).length
    share = torch.bincount(length, minlength=5) / 5000
    torch.testing.assert_close(share, torch.full((5,), 0.2), rtol=0, atol=0.03)


@pytest.mark.parametrize("family", ["adatape", "parity adatape"])
def test_training_with_drawn_budgets_has_finite_gradients_and_uses_every_parameter(family: str) -> None:
    field = "model__reading__sample_budgets" if family.startswith("parity") else "model__options__sample_budgets"
    trainer = Trainer(tiny(family, steps=3, **{field: True}))
    assert all(bool(stats.loss.isfinite() & stats.norm.isfinite()) for stats in trainer.train(3))
    batch = next(trainer.task.batches(0))
    trainer.model.train()(batch.x, output=True, key=batch.key).logits.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in trainer.model.parameters())


def test_a_threshold_beyond_the_trained_one_warns() -> None:
    reader = TapeReader(8, settings(), 20)
    with pytest.warns(
        UserWarning, match=r"threshold is 2.5; the model was built, and perhaps trained, for at most 1.5"
    ):
        reader.set_budget(threshold=2.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader.set_budget(steps=4)
        reader.set_budget(steps=2, threshold=1.5)


@pytest.mark.parametrize("family", BUDGETED)
def test_every_setting_of_a_search_is_one_that_the_model_takes(family: str) -> None:
    model, x = build_for(tiny(family)), IMAGES
    if family.startswith("parity"):
        x = torch.randint(-1, 2, (6, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for budget in grid(model):
            apply_budget(model, budget)
            model.eval()(x)
    steps = [budget.steps for budget in grid(model)]
    assert max(steps) == trained_budget(model).steps
    assert min(steps) == (0 if "adatape" in family else 1)
    assert len(set(grid(model))) == len(steps)


@pytest.mark.parametrize(
    ("family", "why"), [("plainvit", "every sample costs the same"), ("avit", "by its trained score")]
)
def test_a_model_without_a_budget_is_refused_with_the_reason(family: str, why: str, tmp_path: Path) -> None:
    untrained(tmp_path / "run", family)
    with pytest.raises(ValueError, match=f"has no budget: .*{why}"):
        write_budgets(tmp_path / "run", (1,), "cpu")


def test_timing_leaves_the_first_round_out_and_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    model, turns = build_for(tiny()), []

    def fake(model, _) -> float:
        turns.append(model.reader.steps)
        return 1000.0 if len(turns) <= 2 else float(model.reader.steps)

    monkeypatch.setattr("adatape.evaluate.budget._seconds", fake)
    took = milliseconds_per_image(model, [scaled_budget(model, 1), scaled_budget(model, 3)], IMAGES, 2, seconds=0)
    assert took == [1000 * 1 / 6, 1000 * 3 / 6]
    assert turns[:6] == [3, 1, 1, 3, 3, 1]
    assert len(turns) == 2 * 6  # one round that is not measured, and five
    turns.clear()
    monkeypatch.setattr("adatape.evaluate.budget.PATIENCE", 0.0)
    took = milliseconds_per_image(model, [scaled_budget(model, 1), scaled_budget(model, 3)], IMAGES, 2, seconds=0)
    assert took == [1000 * 1 / 6, 1000 * 3 / 6]
    assert len(turns) == 2 * 2


POINTS = [
    Point(Budget(steps), accuracy, steps, steps + 1.0, steps + 1.0, steps + 1.0, {1: 2.0 * steps + 3})
    for steps, accuracy in enumerate((0.80, 0.90, 0.89, 0.904, 0.904))
]


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        (("9ms", None, None), 3),
        (("8.9ms", None, None), 1),
        ((None, 2.5, None), 1),
        ((None, 100.0, None), 3),
        ((None, None, "0.5pt-of-best"), 1),
        ((None, None, "0pt-of-best"), 3),
        ((None, None, "80%"), 0),
    ],
)
def test_the_choice_is_the_best_within_the_limit_and_the_cheapest_of_equals(target, steps: int) -> None:
    assert choose(POINTS, target_of(*target)).budget.steps == steps


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (("2ms", None, None), r"latency is 2 ms; the least possible is 3 ms, at steps 0"),
        ((None, 0.5, None), r"gflops is 0.5 GFLOPs; the least possible is 1 GFLOPs"),
        ((None, None, "95%"), r"accuracy is 95.00%; the greatest possible is 90.40%"),
        ((None, None, None), r"targets given: none; exactly one"),
        (("2ms", 1.0, None), r"targets given: latency and gflops; exactly one"),
        (("12", None, None), r"latency is '12'; it must be a time per image, as in 12ms"),
        ((None, None, "best"), r"accuracy is 'best'; it must be as in 0.5pt-of-best"),
    ],
)
def test_an_impossible_target_names_what_is_possible(target, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(POINTS, target_of(*target))


def test_the_frontier_holds_only_what_no_cheaper_budget_equals() -> None:
    assert [each.budget.steps for each in frontier(POINTS, lambda each: each.gflops_mean)] == [0, 1, 3]
    assert target_of("800us", None, None) == Target("latency", pytest.approx(0.8))


@pytest.mark.parametrize("family", ["adatape", "ponder", "parity adatape"])
def test_budgets_are_tabulated_stored_and_drawn(family: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("adatape.evaluate.budget.FEWEST", 1)
    monkeypatch.setattr("adatape.evaluate.budget.MOST", 2)
    run = untrained(tmp_path / "run", family)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = write_budgets(run, (1, 2, 0, 5, 500), "cpu")
    beyond = [each for each in caught if "was built, and perhaps trained" in str(each.message)]
    rows = {row["steps"]: row for row in result.rows}
    assert len(beyond) == any(row["beyond_trained"] for row in rows.values())
    assert "500" in {str(steps) for steps in result.left_out}
    assert any("budget 500 left out" in note for note in budgets_table(result).notes)
    assert rows[1]["gflops_mean"] <= rows[2]["gflops_mean"]
    assert rows[1]["length_mean"] <= 1
    assert all(row["ms_batch1"] > 0 for row in rows.values())
    stored = json.loads((run / "figures" / "budgets.json").read_text())
    assert stored["rows"] == result.rows
    assert (run / "figures" / "budgets.png").stat().st_size > 10_000


def test_examples_are_named_by_their_classes() -> None:
    label, sets, nothing = torch.tensor([0, 1]), torch.tensor([[0, 0], [1, 1]]), torch.zeros(2, 0, 0)
    figures = torch.tensor([0.9, 0.1]), torch.tensor([5, 6]), torch.tensor([2, 3])
    reads = Reads(label, label[[0, 0]], *figures, taken=nothing.long(), weight=nothing)
    for each, right, wrong in (
        (reads, "cat\nreads 2", "dog, said cat"),
        (reads._replace(sets=sets), "no label\nreads 2", "cat, dog,\nsaid no label"),
    ):
        (easy,), (hard,) = examples_of(each, [Labelled(torch.zeros(2, 1, 4, 4), label)], ["cat", "dog"])
        assert easy.text == right
        assert hard.text.startswith(wrong)


def test_a_found_budget_is_stored_applied_and_no_other_experiment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("adatape.evaluate.budget.FEWEST", 1)
    monkeypatch.setattr("adatape.evaluate.budget.MOST", 1)
    run = untrained(tmp_path / "run")
    experiment, whole = load_run(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    target = Target("gflops", 1000.0)
    least = find_budget(run, target, "cpu")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert least.config is None
    assert "not stored" in found_budget_table(least).notes[-1]
    assert "every other test sample" in least.chosen_on
    kept = store_budget(run, target, "cpu")
    assert kept.config == run / "config.json"
    assert "--reset` removes it" in found_budget_table(kept).notes[-1]
    found = kept.budget
    stored, model = load_run(run)
    assert stored.model.budget == found
    assert model.reader.steps == found.steps
    assert load_run(run, stored_budget=False)[1].reader.steps == whole.reader.steps
    check_same(run, experiment)
    assert reset_budget(run).budget == found
    assert load_run(run)[0].model.budget is None
    assert reset_budget(run).budget is None
    assert to_dict(from_dict(Experiment, to_dict(stored))) == to_dict(stored)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_given_number_of_steps_is_stored_without_a_search_beyond_the_trained_one_too(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run")
    trained = load_run(run)[1].reader.steps
    kept = store_budget(run, target_of(steps=trained + 1), "cpu")
    assert (kept.budget.steps, kept.settings) == (trained + 1, 1)
    assert "given, not searched for" in kept.chosen_on
    assert load_run(run)[1].reader.steps == trained + 1
    assert evaluate_run(run, device="cpu").as_dict()["budget"]["steps"] == trained + 1
    with pytest.raises(ValueError, match="1000"):
        find_budget(run, target_of(steps=1000), "cpu")


def test_eval_says_which_stored_budget_it_scored_at(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run")
    trained = evaluate_run(run, device="cpu")
    assert "budget" not in trained.as_dict()
    write(run / "config.json", to_dict(with_budget(load_run(run)[0], Budget(1, 0.25))))
    found = evaluate_run(run, device="cpu")
    assert found.as_dict()["budget"] == {"steps": 1, "threshold": 0.25}
    assert "at the budget stored in the run: steps 1, threshold 0.25" in evaluated_table(found).notes
    assert found.score.length_mean <= 1


@pytest.mark.parametrize("options", [["--store"], ["--gflops", "1"]])
def test_a_reset_looks_for_no_budget(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["budget", str(tmp_path), "--reset", *options])
    assert "so give it alone" in capsys.readouterr().err


def test_storing_into_what_is_no_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        store_budget(tmp_path / "none", Target("gflops", 1.0), "cpu")
    assert not list(tmp_path.iterdir())


def test_halves_of_a_test_set_share_no_sample() -> None:
    sizes, start, batches = (3, 4, 1, 5), 0, []
    for size in sizes:
        batches.append(Labelled(torch.arange(start, start + size), torch.arange(start, start + size)))
        start += size
    even, odd = (torch.cat([x for x, _ in _every_other(batches, first)]).tolist() for first in (0, 1))
    assert even == list(range(0, 13, 2))
    assert odd == list(range(1, 13, 2))


def test_a_replay_does_not_inherit_a_budget(tmp_path: Path) -> None:
    prepare(tmp_path / "again", with_budget(tiny(), Budget(2, 0.5)), "cpu")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model"]["budget"] is None


def test_a_stored_budget_scales_with_the_length_of_a_sequence(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", "parity adatape")
    steps = load_run(run)[1].reader.steps
    config = json.loads((run / "config.json").read_text())
    config["model"]["budget"] = {"steps": steps // 2, "threshold": 1.0}
    (run / "config.json").write_text(json.dumps(config))
    reader = load_run(run, length=16)[1].reader
    assert (reader.steps, reader.threshold) == (steps // 2 * 2, 2.0)


@pytest.mark.parametrize("family", ["adatape", "parity adatape"])
def test_a_validation_split_is_searched_and_the_whole_test_set_reported(family: str) -> None:
    fields = {} if family.startswith("parity") else {"data__validate_on": 0.1}
    held = _held_out(tiny(family, **fields), torch.device("cpu"), Target("gflops", 1.0))
    chosen, reported = (sum(len(label) for _, label in part()) for part in (held.chosen_on, held.reported_on))
    assert (chosen, reported) == ((64, 64) if fields == {} else (144, 360))
    assert "validation" in held.said
