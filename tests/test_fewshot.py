"""Few-shot accuracy by ridge regression, solved exactly in primal or dual form."""

from __future__ import annotations

import pytest
import timm
import torch
from torch import Tensor

import adatape.models  # noqa: F401  registers the models
from adatape.evaluate.fewshot import (
    FewShot,
    Spread,
    features_of,
    few_shot,
    pick_support,
    ridge,
    ridge_path,
    scale_of,
    signed_targets,
    summary,
    with_bias,
)

L2S = [2.0**-10, 1.0, 2.0**10, 2.0**19]
SHAPES = {"fewer samples than features": (20, 64), "more samples than features": (200, 16), "as many": (40, 39)}
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 4, "depth": 2}
TAPE = {"bank_patch": 4, "steps": 4, "threshold": 1.0, "merge": 4, "query_width": 32}


def problem(n: int, d: int, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Correlated features on scales from 0.01 to 100, one of them constant."""
    draw = torch.Generator().manual_seed(n)
    x = torch.randn(n, d, generator=draw) @ torch.randn(d, d, generator=draw) * torch.logspace(-2, 2, d) + 3
    x[:, 0] = 7.0
    return with_bias(scale_of(x)(x)), signed_targets(torch.arange(n) % classes, classes)


def clusters(n: int, d: int, classes: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, d, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(n) % classes
    return centres[labels] + spread * torch.randn(n, d, generator=draw), labels


@pytest.mark.parametrize("solver", ["svd", "cholesky"])
@pytest.mark.parametrize("l2", L2S)
@pytest.mark.parametrize("shape", SHAPES)
def test_ridge_is_that_of_scikit_learn(shape: str, l2: float, solver: str) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    x, y = problem(*SHAPES[shape])
    theirs = linear.Ridge(alpha=l2, fit_intercept=False, solver=solver).fit(x.numpy(), y.numpy())
    ours = ridge(x, y, l2)
    tolerance = 1e-6 * float(ours.abs().max())
    torch.testing.assert_close(ours, torch.from_numpy(theirs.coef_.T.copy()), rtol=0, atol=min(tolerance, 1e-6))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("l2", L2S)
@pytest.mark.parametrize("shape", SHAPES)
def test_ridge_is_the_solution_by_singular_values(shape: str, l2: float) -> None:
    x, y = problem(*SHAPES[shape])
    left, s, right = torch.linalg.svd(x, full_matrices=False)
    assert distance(ridge(x, y, l2), right.T @ ((s / (s**2 + l2))[:, None] * (left.T @ y))) < 1e-9


@pytest.mark.parametrize("l2", L2S[1:])  # below, the form that ridge avoids loses eight digits to the bias of 100
@pytest.mark.parametrize("shape", SHAPES)
def test_the_primal_and_the_dual_form_are_the_same_ridge(shape: str, l2: float) -> None:
    x, y = problem(*SHAPES[shape])
    n, d = x.shape
    primal = torch.linalg.solve(x.T @ x + l2 * torch.eye(d, dtype=x.dtype), x.T @ y)
    dual = x.T @ torch.linalg.solve(x @ x.T + l2 * torch.eye(n, dtype=x.dtype), y)
    assert distance(primal, dual) < 1e-8
    assert distance(ridge(x, y, l2), primal) < 1e-8


@pytest.mark.parametrize("shape", SHAPES)
def test_one_eigendecomposition_gives_ridge_for_every_l2(shape: str) -> None:
    x, y = problem(*SHAPES[shape])
    for l2, weight in zip(L2S, ridge_path(x, y, L2S), strict=True):
        assert distance(weight, ridge(x, y, l2)) < (1e-8 if l2 >= 1 else 1e-7)


def test_ridge_leaves_its_arguments_alone() -> None:
    for shape in SHAPES.values():
        x, y = problem(*shape)
        before = x.clone(), y.clone()
        ridge(x, y, 8.0), list(ridge_path(x, y, L2S))
        assert torch.equal(x, before[0])
        assert torch.equal(y, before[1])


def test_the_support_alone_sets_mean_and_scale() -> None:
    support, test = torch.randn(50, 6) * 3 + 5, torch.randn(7, 6)
    scale = scale_of(support)
    scaled, other = scale(support), scale(test)
    assert scaled.dtype == other.dtype == torch.float64
    torch.testing.assert_close(scaled.mean(0), torch.zeros(6).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(scaled.square().mean(0), torch.ones(6).double(), rtol=1e-4, atol=0)
    alone = torch.cat([scale(row) for row in test.split(1)])
    torch.testing.assert_close(alone, other, rtol=1e-12, atol=0)
    assert with_bias(other)[:, -1].tolist() == [100.0] * 7


def test_the_first_samples_of_each_class_are_taken_in_order() -> None:
    labels = torch.tensor([2, 0, 1, 0, 2, 1, 0, 2])
    assert pick_support(labels, 2, None).tolist() == [1, 3, 2, 5, 0, 4]


def test_a_seed_draws_as_many_of_each_class_and_the_same_ones_again() -> None:
    labels = torch.randint(0, 5, (400,))
    chosen = pick_support(labels, 9, 3)
    assert labels[chosen].tolist() == [c for c in range(5) for _ in range(9)]
    assert len(set(chosen.tolist())) == 45
    assert torch.equal(chosen, pick_support(labels, 9, 3))
    assert not torch.equal(chosen, pick_support(labels, 9, 4))


def test_a_smaller_support_is_part_of_a_larger_one() -> None:
    labels = torch.arange(200) % 4
    for seed in (None, 0, 1):
        assert set(pick_support(labels, 3, seed).tolist()) < set(pick_support(labels, 10, seed).tolist())


def test_every_sample_is_drawn_equally_often() -> None:
    drawn = torch.cat([pick_support(torch.arange(40) % 2, 5, seed) for seed in range(400)])
    counts = torch.bincount(drawn, minlength=40)
    assert counts.min() > 65  # 100 expected, standard deviation 8.7
    assert counts.max() < 135


@pytest.mark.parametrize(("classes", "poor", "count"), [(3, 1, 1), (4, 3, 0)])
def test_a_class_with_too_few_samples_is_named(classes: int, poor: int, count: int) -> None:
    labels = torch.tensor([0, 0, 1, 2, 2, 2]) if count else torch.tensor([0, 0, 1, 1, 2, 2])
    with pytest.raises(ValueError, match=rf"class {poor} has {count} training samples; shots is 2"):
        pick_support(labels, 2, 0, classes)


@pytest.mark.parametrize("shots", [1, 5, 25])
@pytest.mark.parametrize("seeds", [(None,), (0, 1, 2)])
def test_separable_classes_are_all_told_apart(shots: int, seeds: tuple[int | None, ...]) -> None:
    train, test = clusters(300, 48, 10, 0.02), clusters(500, 48, 10, 0.02, seed=1)
    rows = few_shot(*train, *test, [shots], L2S[:3], seeds, classes=10)
    assert [row.seed for row in rows] == [seed for seed in seeds for _ in range(3)]
    assert [row.accuracy for row in rows] == [1.0] * len(rows)


def test_permuted_labels_give_chance() -> None:
    features, labels = clusters(1000, 32, 10, 0.02)
    test, truth = clusters(5000, 32, 10, 0.5, seed=1)
    shuffled = labels[torch.randperm(1000)]
    rows = few_shot(features, shuffled, test, truth[torch.randperm(5000)], [25], classes=10)
    for row in rows:
        assert abs(row.accuracy - 0.1) < 0.03


def test_more_shots_help_where_classes_overlap() -> None:
    train, test = clusters(1000, 32, 10, 1.5), clusters(2000, 32, 10, 1.5, seed=1)
    found = [spread.mean for spread in summary(few_shot(*train, *test, [1, 5, 25], classes=10))]
    assert 0.1 < found[0] < found[1] < found[2] < 1


@pytest.mark.parametrize("shots", [2, 20])
def test_the_accuracy_is_that_of_the_protocol_written_out_with_scikit_learn(shots: int) -> None:
    linear = pytest.importorskip("sklearn.linear_model")
    (train, labels), (test, truth) = clusters(400, 48, 10, 1.5), clusters(3000, 48, 10, 1.5, seed=1)
    train, test = train * 20 + 4, test * 20 + 4
    support = train.numpy()[: 10 * shots].astype("float64")  # labels go round, so these are the first of each class
    mean, sd = support.mean(0), support.std(0) + 1e-5
    x, z = ((part - mean) / sd for part in (support, test.numpy()))
    x, z = ([[*row, 100.0] for row in part] for part in (x, z))
    y = [[1.0 if label == c else -1.0 for c in range(10)] for label in labels[: 10 * shots].tolist()]
    for l2 in (1.0, 2.0**10):
        guess = linear.Ridge(alpha=l2, fit_intercept=False, solver="svd").fit(x, y).predict(z).argmax(1)
        (row,) = few_shot(train, labels, test, truth, [shots], [l2], (None,), classes=10)
        assert 0.2 < row.accuracy < 0.999
        assert row.accuracy == pytest.approx((guess == truth.numpy()).mean(), abs=1e-9)


def test_the_order_of_the_test_set_and_its_chunks_do_not_matter() -> None:
    train, (test, truth) = clusters(100, 16, 5, 1.0), clusters(9000, 16, 5, 1.0, seed=1)
    order = torch.randperm(9000)
    same = few_shot(*train, test[order], truth[order], [5], classes=5)
    assert few_shot(*train, test, truth, [5], classes=5) == same


def test_one_l2_alone_scores_as_it_does_within_a_list() -> None:
    train, test = clusters(100, 16, 5, 1.0), clusters(1000, 16, 5, 1.0, seed=1)
    for shots in (2, 10):
        together = few_shot(*train, *test, [shots], L2S, (0,), classes=5)
        alone = [row for l2 in L2S for row in few_shot(*train, *test, [shots], [l2], (0,), classes=5)]
        assert together == alone


def test_the_summary_is_the_mean_and_spread_over_seeds() -> None:
    rows = [FewShot(5, 1.0, seed, accuracy) for seed, accuracy in enumerate([0.4, 0.5, 0.6])]
    spread, single = summary([*rows, FewShot(10, 1.0, None, 0.7)])
    assert spread == Spread(5, 1.0, 3, pytest.approx(0.5), pytest.approx(0.1))
    assert single == Spread(10, 1.0, 1, 0.7, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"l2s": (1.0, 0.0)}, "l2 is 0.0; it must be positive"),
        ({"shots": [0]}, "shots is 0; it must be at least 1"),
        ({"classes": 4}, "train labels run from 0 to 4; classes is 4"),
        ({"test_labels": torch.zeros(3, dtype=torch.long)}, "test has 50 features and 3 labels"),
        ({"test_features": torch.full((50, 8), torch.nan)}, "test features of 50 samples are not finite"),
    ],
)
def test_what_cannot_be_solved_is_refused_by_name(change: dict, message: str) -> None:
    train, test = clusters(50, 8, 5, 1.0), clusters(50, 8, 5, 1.0, seed=1)
    given = {"train_features": train[0], "train_labels": train[1], "test_features": test[0], "test_labels": test[1]}
    with pytest.raises(ValueError, match=message):
        few_shot(**{**given, "shots": [2], "classes": 5, **change})


def tinted(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four classes of noise: one without a tint, the others with one channel brighter."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 4
    tint = torch.cat([torch.zeros(1, 3), torch.eye(3)])[labels]
    return tint[:, :, None, None] + 0.5 * torch.randn(n, 3, 32, 32, generator=draw), labels


def in_batches(x: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(size), labels.split(size), strict=True))


def tiny(name: str) -> torch.nn.Module:
    return timm.create_model(name, **SMALL, **(TAPE if name.startswith("adatape") else {}))


@pytest.mark.parametrize("name", ["adatape_tiny_patch16_224", "plainvit_tiny_patch16_224"])
def test_even_untrained_features_tell_tints_apart(name: str) -> None:
    model = tiny(name)
    train, test = (features_of(model, in_batches(*tinted(n, n), 32), "cpu") for n in (80, 100))
    assert train[0].shape == (80, 64)
    assert train[0].dtype == torch.float32
    assert not train[0].requires_grad
    rows = few_shot(*train, *test, [10], classes=4)
    assert min(row.accuracy for row in rows) > 0.5


def test_features_do_not_depend_on_the_batches_and_keep_their_order() -> None:
    model, (x, labels) = tiny("adatape_tiny_patch16_224"), tinted(20, 0)
    features, kept = features_of(model, in_batches(x, labels, 7), "cpu")
    torch.testing.assert_close(features, model.eval()(x, output=True).features, rtol=1e-5, atol=1e-5)
    assert torch.equal(kept, labels)


@pytest.mark.parametrize("fails", [False, True])
def test_every_module_is_left_in_its_mode_even_after_a_failure(fails: bool) -> None:
    model = tiny("adatape_tiny_patch16_224").train()
    next(model.children()).eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    x, labels = tinted(4, 0)
    try:
        features_of(model, [(x[:, :2] if fails else x, labels)], "cpu")
    except Exception:
        assert fails
    assert [module.training for module in model.modules()] == modes


def test_no_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="features of 0 batches; at least 1 is needed"):
        features_of(tiny("plainvit_tiny_patch16_224"), [], "cpu")


def test_one_factorisation_serves_every_strength_and_every_class(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, factorise = [], torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda gram: sizes.append(tuple(gram.shape)) or factorise(gram))
    train, test = clusters(2_500, 256, 100, 3.0), clusters(1_000, 256, 100, 3.0, seed=1)
    rows = few_shot(*train, *test, [25], (1.0, 2.0**5, 2.0**10), (0,), classes=100)
    assert sizes == [(257, 257)]
    assert rows[0].accuracy > 0.5
