"""PonderNet: halting distribution, prior, loss, and timm's conventions."""

from __future__ import annotations

import math
import random

import pytest
import timm
import torch
import torch.nn.functional as F

from adatape.models.ponder import (
    PonderNet,
    divergence,
    expected_answer,
    log_halting,
    log_prior,
    ponder_loss,
    sampled_answer,
)
from adatape.models.rescale import Rescale
from adatape.records import Output

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_heads": 2, "num_classes": 5}


def small(spread: float = 0.0, **options) -> PonderNet:
    """A model on 32-pixel images; `spread` is the deviation of scores between samples."""
    model = timm.create_model("ponder_tiny_patch16_224", **{**SMALL, "steps": 6, **options})
    if spread:
        _spread_scores(model, spread)
    return model


@torch.no_grad()
def _spread_scores(model: PonderNet, spread: float) -> None:
    """Larger weights, since an untrained class token depends more on step signals than on the image."""
    bias = model.halt.bias.item()
    for p in model.vit.blocks.parameters():
        p.mul_(3.0 if p.dim() == 2 else 1.0)
    torch.nn.init.normal_(model.halt.weight)
    score = model._ponder(images(24), None, all_steps=True).score
    scale = spread / score.std(0).mean()
    model.halt.weight.mul_(scale)
    model.halt.bias.fill_(bias - (score.mean() - bias) * scale)


def images(n: int = 6, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def labels(n: int = 6) -> torch.Tensor:
    return torch.randint(5, (n,), generator=torch.Generator().manual_seed(1))


def literal_halting(hazards: list[float]) -> list[float]:
    """p_n = λ_n Π_{j<n} (1 - λ_j), the last λ being 1."""
    p, alive = [], 1.0
    for step, hazard in enumerate(hazards):
        taken = 1.0 if step == len(hazards) - 1 else hazard
        p.append(alive * taken)
        alive *= 1 - taken
    return p


def mean_step(p: torch.Tensor) -> torch.Tensor:
    return (p * torch.arange(1, p.shape[1] + 1)).sum(1)


def block_calls(model: PonderNet) -> list[int]:
    """A list with one entry per run of the block."""
    calls: list[int] = []
    model.vit.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_the_distribution_is_the_literal_loop() -> None:
    source = random.Random(0)
    for case in range(400):
        steps = source.randint(1, 20)
        scale = source.choice([0.1, 1.0, 5.0, 30.0, 300.0])
        scores = [source.gauss(0, scale) for _ in range(steps)]
        hazards = [1 / (1 + math.exp(-min(max(score, -700), 700))) for score in scores]
        p = log_halting(torch.tensor([scores])[:, :-1]).exp()
        assert p.shape == (1, steps)
        assert p[0].tolist() == pytest.approx(literal_halting(hazards), rel=2e-5, abs=1e-6), case
        assert p.sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("score", [-1e4, -100.0, -20.0, 0.0, 20.0, 100.0, 1e4])
def test_extreme_scores_sum_to_one_and_have_finite_gradients(score: float) -> None:
    scores = torch.full((2, 11), score, requires_grad=True)
    log_p = log_halting(scores)
    torch.testing.assert_close(log_p.exp().sum(1), torch.ones(2), rtol=0, atol=1e-6)
    ponder = divergence(log_p, log_prior(12, 0.2))
    ponder.sum().backward()
    assert ponder.isfinite().all()
    assert scores.grad.isfinite().all()


def test_the_last_step_takes_the_rest() -> None:
    """Public code gives 0.168 here, with a sum of 0.758."""
    constant = torch.full((1, 4), math.log(0.2 / 0.8))
    p = log_halting(constant).exp()[0]
    assert p.tolist() == pytest.approx([0.2, 0.16, 0.128, 0.1024, 0.4096])


@pytest.mark.parametrize("lambda_p", [0.01, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_the_prior_is_a_geometric_law_cut_and_renormalised(steps: int, lambda_p: float) -> None:
    geometric = [lambda_p * (1 - lambda_p) ** n for n in range(steps)]
    prior = log_prior(steps, lambda_p).exp()
    assert prior.sum().item() == pytest.approx(1, abs=1e-6)
    assert prior.tolist() == pytest.approx([p / sum(geometric) for p in geometric], rel=1e-5)


def test_divergence_is_zero_for_the_prior_and_for_nothing_else() -> None:
    log_q = log_prior(6, 0.2)
    q = log_q.exp()
    hazard = q / q.flip(0).cumsum(0).flip(0)
    log_p = log_halting(hazard[None, :-1].logit())
    assert divergence(log_p, log_q).item() == pytest.approx(0, abs=1e-6)
    others = log_halting(hazard[None, :-1].logit() + torch.randn(50, 5))
    assert (divergence(others, log_q) > 1e-4).all()


def test_divergence_is_taken_from_p_to_the_prior() -> None:
    """Two steps, p = (1/4, 3/4), λ_p = 1/2 so that the prior is (2/3, 1/3)."""
    log_p, log_q = torch.tensor([[0.25, 0.75]]).log(), log_prior(2, 0.5)
    forward = 0.25 * math.log(0.25 * 3 / 2) + 0.75 * math.log(0.75 * 3)
    reverse = 2 / 3 * math.log(2 / 3 / 0.25) + 1 / 3 * math.log(1 / 3 / 0.75)
    assert divergence(log_p, log_q).item() == pytest.approx(forward, rel=1e-6)
    assert abs(forward - reverse) > 0.01


def test_output_holds_every_step() -> None:
    model = small(spread=1.0).train()
    output = model(images(), output=True)
    assert isinstance(output, Output)
    p, each = output.steps
    assert p.shape == (6, 6)
    assert each.shape == (6, 6, 5)
    torch.testing.assert_close(p.sum(1), torch.ones(6), rtol=0, atol=1e-6)
    torch.testing.assert_close(output.logits, (p[..., None] * each).sum(1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.logits, model(images()))
    torch.testing.assert_close(output.ponder, divergence(p.log(), log_prior(6, 0.2)), rtol=1e-4, atol=1e-6)
    assert torch.equal(output.logits, model.get_classifier()(output.features))


def test_before_training_halting_follows_the_prior() -> None:
    output = small().train()(images(), output=True)
    assert output.steps.weight[0].tolist() == pytest.approx([0.8**n * 0.2 for n in range(5)] + [0.8**5], rel=1e-5)


def test_the_loss_weighs_each_steps_cross_entropy_by_its_probability() -> None:
    output = small(spread=1.0).train()(images(), output=True)
    p, each = output.steps
    by_hand = sum(p[b, n] * F.cross_entropy(each[b, n], labels()[b]) for b in range(6) for n in range(6)) / 6
    torch.testing.assert_close(ponder_loss(output, labels()), by_hand)
    torch.testing.assert_close(ponder_loss(output, F.one_hot(labels(), 5).float()), by_hand)


@pytest.mark.parametrize("term", ["loss", "ponder", "logits"])
def test_gradients_reach_the_halting_layer(term: str) -> None:
    model = small(spread=0.1).train()
    output = model(images(), output=True)
    value = {"loss": ponder_loss(output, labels()), "ponder": output.ponder.mean(), "logits": output.logits.sum()}
    value[term].backward()
    assert model.halt.weight.grad.abs().max() > 0
    assert model.halt.bias.grad.abs() > 0


def test_every_parameter_learns() -> None:
    model = small().train()
    output = model(images(), output=True)
    (ponder_loss(output, labels()) + 0.01 * output.ponder.mean()).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_one_step_leaves_no_parameter_without_a_gradient() -> None:
    model = small(steps=1).train()
    output = model(images(), output=True)
    assert output.steps.weight.tolist() == [[1.0]] * 6
    assert not output.ponder.any()
    output.logits.square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_training_by_the_divergence_alone_finds_the_prior() -> None:
    model = small(spread=0.5, halting_bias=2.0).train()
    optimizer = torch.optim.Adam(model.halt.parameters(), 0.05)
    before = model(images(), output=True).ponder.mean()
    for _ in range(40):
        optimizer.zero_grad()
        model(images(), output=True).ponder.mean().backward()
        optimizer.step()
    assert model(images(), output=True).ponder.mean() < 0.2 * before


def test_a_larger_halting_bias_means_fewer_expected_steps() -> None:
    steps = [mean_step(small(halting_bias=b).eval()(images(), output=True).steps.weight).mean() for b in (-3, -1, 1, 3)]
    assert steps == sorted(steps, reverse=True)
    assert steps[-1] < steps[0] - 2


def test_inference_answers_by_the_step_nearest_the_expected_one() -> None:
    model = small(spread=1.0).eval()
    output = model(images(24), output=True)
    nearest = (mean_step(output.steps.weight) + 0.5).floor().long() - 1
    assert len(nearest.unique()) > 1
    torch.testing.assert_close(output.logits, output.steps.logits[torch.arange(24), nearest])
    assert torch.equal(output.logits, model.get_classifier()(output.features))


@pytest.mark.parametrize("steps", [1, 2, 5, 12])
def test_an_expected_answer_once_settled_stays(steps: int) -> None:
    score = torch.randn(300, steps, generator=torch.Generator().manual_seed(steps)) * 2
    final = expected_answer(score, steps)
    assert final.halted.all()
    assert ((final.step >= 0) & (final.step < steps)).all()
    for taken in range(1, steps):
        early = expected_answer(score[:, :taken], steps)
        assert torch.equal(early.step[early.halted], final.step[early.halted])
        assert (early.step[early.halted] < taken).all()


def test_half_way_between_two_steps_the_later_one_answers() -> None:
    assert expected_answer(torch.zeros(1, 2), 2).step.tolist() == [1]


def test_sampling_follows_the_distribution() -> None:
    scores = torch.tensor([-1.0, 0.5, -2.0, 0.0, 7.0])
    draws = torch.rand(40_000, 5, generator=torch.Generator().manual_seed(0))
    answer = sampled_answer(scores.expand(40_000, 5), draws)
    assert answer.halted.all()
    found = answer.step.bincount(minlength=5) / 40_000
    torch.testing.assert_close(found, log_halting(scores[None, :-1]).exp()[0], rtol=0, atol=0.01)


def test_sampled_logits_follow_the_distribution_and_the_keys() -> None:
    model = small(spread=0.5, steps=4, halting="sample").eval()
    many = images(1).expand(4000, -1, -1, -1)
    with torch.no_grad():
        one, again = (model(many, output=True, key=torch.arange(4000)) for _ in range(2))
    assert torch.equal(one.logits, again.logits)
    distance = (one.logits[:, None] - one.steps.logits).abs().sum(-1)
    assert distance.amin(1).max() < 1e-5
    found = distance.argmin(1).bincount(minlength=4) / 4000
    torch.testing.assert_close(found, one.steps.weight[0], rtol=0, atol=0.03)


@pytest.mark.parametrize("halting", ["expected", "sample"])
@pytest.mark.parametrize("bias", [-2.0, 0.0, 3.0])
def test_stopping_early_changes_no_logits(halting: str, bias: float) -> None:
    model = small(spread=0.5, steps=12, halting=halting, halting_bias=bias).eval()
    calls = block_calls(model)
    key = torch.arange(images().shape[0])
    logits = model(images(), key=key)
    taken = len(calls)
    torch.testing.assert_close(logits, model(images(), output=True, key=key).logits)
    assert len(calls) - taken == 12
    assert taken < 12 or bias < 1


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_a_sample_alone_equals_the_same_sample_in_a_batch(spread: float) -> None:
    model = small(spread=spread).eval()
    together, features = model(images(), output=True), model.forward_features(images())
    for row in range(6):
        alone = model(images()[row : row + 1], output=True)
        for ours, theirs in ((alone.logits, together.logits), (alone.steps.weight, together.steps.weight)):
            torch.testing.assert_close(ours[0], theirs[row], rtol=1e-4, atol=1e-5)
        apart = model.forward_features(images()[row : row + 1])
        torch.testing.assert_close(apart[0], features[row], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_head_of_features_is_forward_at_inference(pool: str) -> None:
    model = small(spread=1.0, global_pool=pool).eval()
    features = model.forward_features(images())
    assert features.shape == (6, 17, 64)
    torch.testing.assert_close(model.forward_head(features), model(images()))
    model.train()
    torch.testing.assert_close(
        model.forward_head(model.forward_features(images())), model(images(), output=True).steps.logits[:, -1]
    )


def test_a_budget_bounds_the_steps_and_cuts_the_prior() -> None:
    model = small(halting_bias=-5.0).eval()
    calls = block_calls(model)
    model.set_budget(3)
    output = model(images(), output=True)
    assert len(calls) == 3
    assert output.steps.weight.shape == (6, 3)
    torch.testing.assert_close(output.steps.weight.sum(1), torch.ones(6), rtol=0, atol=1e-6)
    expected = divergence(output.steps.weight.log(), log_prior(3, 0.2))
    torch.testing.assert_close(output.ponder, expected, rtol=1e-4, atol=1e-5)
    model.set_budget()
    assert model(images(), output=True).steps.weight.shape == (6, 6)
    for steps in (0, 7):
        with pytest.raises(ValueError, match=f"steps is {steps}; it must be between 1 and the 6"):
            model.set_budget(steps)


def test_steps_signals_make_steps_differ() -> None:
    model = small().eval()
    assert "signals" not in model.state_dict()
    before = model(images(), output=True).steps.logits
    torch.nn.init.zeros_(model.signals)
    assert not torch.allclose(model(images(), output=True).steps.logits, before)


def test_forward_and_backward_are_finite_in_bfloat16() -> None:
    model = small(spread=1.0).train()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images(), output=True)
        loss = ponder_loss(output, labels()) + 0.01 * output.ponder.mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert output.steps.weight.dtype == output.ponder.dtype == torch.float32
    for training in (True, False):
        whole = model.bfloat16().train(training)(images().bfloat16(), output=True)
        assert whole.logits.isfinite().all()
        assert whole.logits.dtype == torch.bfloat16
        torch.testing.assert_close(whole.steps.weight.sum(1), torch.ones(6), rtol=0, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_compiles_without_a_graph_break(training: bool) -> None:
    model = small(spread=0.5, steps=3).train(training)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours, theirs = compiled(images(), output=True), model(images(), output=True)
    torch.testing.assert_close(ours.logits, theirs.logits)
    torch.testing.assert_close(ours.ponder, theirs.ponder)
    (ponder_loss(ours, labels()) + ours.ponder.mean()).backward()
    assert model.halt.weight.grad.any()


def test_exports_with_a_dynamic_batch() -> None:
    model = small(spread=0.5, steps=3).eval()
    program = torch.export.export(model, (images(3),), dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    for n in (1, 6):
        torch.testing.assert_close(program.module()(images(n)), model(images(n)), rtol=1e-4, atol=1e-5)


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for enable in (False, True):
        torch.manual_seed(0)
        model = small(spread=0.1).train()
        model.set_grad_checkpointing(enable)
        ponder_loss(model(images(), output=True), labels()).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


def test_reset_classifier_leaves_halting_as_it_was() -> None:
    model = small(spread=1.0).eval()
    before = model(images(), output=True).steps.weight
    model.reset_classifier(7)
    after = model(images(), output=True)
    assert after.logits.shape == (6, 7)
    assert torch.equal(after.steps.weight, before)
    model.reset_classifier(0, "")
    assert torch.equal(model(images(), output=True).steps.weight, before)
    assert model.forward_head(model.forward_features(images())).shape == (6, 17, 64)


def test_features_only_gives_the_patch_grid() -> None:
    features = timm.create_model("ponder_tiny_patch16_224", features_only=True, out_indices=(0,), **SMALL).eval()
    assert [m.shape for m in features(images())] == [(6, 64, 4, 4)]


@pytest.mark.parametrize(("name", "width"), [("ponder_tiny_patch16_224", 192), ("ponder_small_patch16_224", 384)])
def test_names_are_in_timms_registry(name: str, width: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert isinstance(model, PonderNet)
    assert (model.steps, model.lambda_p, model.halting, model.embed_dim) == (12, 0.2, "expected", width)
    assert len(model.vit.blocks) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small(steps=0), "steps is 0; it must be at least 1"),
        (lambda: small(lambda_p=0.0), "lambda_p is 0.0; it must be a probability"),
        (lambda: small(lambda_p=1.0), "lambda_p is 1.0; it must be a probability"),
        (lambda: small(halting="first"), "halting is 'first'; it must be expected or sample"),
        (lambda: PonderNet(timm.create_model("vit_tiny_patch16_224", depth=2)), "the ViT has 2 blocks"),
        (
            lambda: ponder_loss(Output(torch.zeros(2, 5), torch.zeros(2, 4), torch.zeros(2)), labels(2)),
            "output.steps has no logits",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("output", [False, True])
def test_an_image_that_is_not_finite_has_no_finite_answer_and_leaves_the_others_alone(output: bool) -> None:
    model, x = small(spread=1.0).eval(), images()
    x[1] = torch.nan
    found, alone = model(x, output=output), model(images(), output=output)
    found, alone = (each.logits if output else each for each in (found, alone))
    assert found[1].isnan().all()
    others = [0, 2, 3, 4, 5]
    torch.testing.assert_close(found[others], alone[others], rtol=1e-5, atol=1e-5)


def test_a_loss_of_several_labels_is_refused() -> None:
    model = small().train()
    with pytest.raises(ValueError, match="kind is 'sigmoid'; PonderNet's loss is that of one label"):
        model.loss(model(images(), output=True), labels(), kind="sigmoid")


def test_images_are_rescaled_in_every_call() -> None:
    model = small(spread=1.0).eval()
    model.rescale = Rescale((0.3, 0.4, 0.5), (0.2, 0.2, 0.3))
    with torch.no_grad():
        torch.testing.assert_close(model(images()), model.forward_head(model.forward_features(images())))
