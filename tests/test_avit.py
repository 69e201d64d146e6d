"""A-ViT: properties of tokens that halt separately, masked or removed."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from adatape.models.avit import (
    AViT,
    build_avit,
    distribution_prior,
    gaussian_target,
    halting_mean,
    tokens_per_layer,
)
from adatape.models.prefix import filter_checkpoint

SMALL = {"img_size": 32, "patch_size": 8, "depth": 4, "embed_dim": 64, "num_heads": 2, "num_classes": 5}
DEPTH, TOKENS = 4, 17


def small(**options) -> AViT:
    return build_avit(**{**SMALL, **options})


def halting_apart(seed: int = 0, **options) -> AViT:
    """Strong blocks spread the first coordinates, class tokens' too, so that tokens halt at every layer."""
    torch.manual_seed(seed)
    model = small(**{"gamma": 4.0, "beta": -2.0, **options})
    with torch.no_grad():
        for parameter in model.vit.blocks.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return model


def images(n: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def layers_used(weight: Tensor) -> Tensor:
    """(b, n), the last layer in which each token has weight."""
    places = torch.arange(1, weight.shape[1] + 1)[None, :, None]
    return ((weight > 0) * places).amax(1)


class Counting(nn.Module):
    """Leaves rows as they are and notes how many they are, without a hook."""

    def __init__(self, counts: list[int]) -> None:
        super().__init__()
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        self.counts.append(x.shape[0] * x.shape[1])
        return x


class Scripted(nn.Module):
    """A block that sets the first coordinates to given values."""

    def __init__(self, first: Tensor) -> None:
        super().__init__()
        self.first = first

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:  # noqa: ARG002
        return torch.cat([self.first[..., None], x[..., 1:] + 1], -1)


def scripted(first: Tensor, **options) -> AViT:
    """An A-ViT in which token k of sample i has first coordinate first[i, l, k] after block l."""
    model = small(depth=first.shape[1], **options).eval()
    model.vit.blocks = nn.Sequential(*(Scripted(first[:, layer]) for layer in range(first.shape[1])))
    return model


def halt_one_token(first: list[float], gamma: float, beta: float, epsilon: float) -> tuple[list[float], int, float]:
    """The definition, for one token: its weights, the layer at which it halts, its remainder."""
    weights, cumulative = [0.0] * len(first), 0.0
    for layer, e in enumerate(first):
        h = 1.0 if layer == len(first) - 1 else 1 / (1 + math.exp(-(gamma * e + beta)))
        if cumulative + h > 1 - epsilon:
            weights[layer] = 1 - cumulative
            return weights, layer + 1, 1 - cumulative
        weights[layer] = h
        cumulative += h
    raise AssertionError("the last layer halts")


def answer_of_one_image(model: AViT, image: Tensor) -> tuple[Tensor, list[int]]:
    """Reference logits of one sample with halted tokens removed from a list, and the tokens run in each layer."""
    x = model.embed(image[None])[0]
    alive = {k: x[k] for k in range(x.shape[0])}
    cumulative, out, counts = dict.fromkeys(alive, 0.0), torch.zeros_like(x[0]), []
    for layer, block in enumerate(model.vit.blocks):
        counts.append(len(alive))
        if not alive:
            continue
        alive = dict(zip(alive, block(torch.stack(list(alive.values()))[None])[0], strict=True))
        for k, state in list(alive.items()):
            h = 1 / (1 + math.exp(-(model.gamma * state[0].item() + model.beta)))
            halts = cumulative[k] + h > 1 - model.epsilon or layer == len(model.vit.blocks) - 1
            if k == 0:
                out = out + (1 - cumulative[k] if halts else h) * state
            cumulative[k] += h
            if halts:
                del alive[k]
    return model.vit.head(model.vit.norm(out)), counts


@pytest.mark.parametrize(("name", "parameters"), [("tiny", 5_717_416), ("small", 22_050_664)])
def test_no_parameter_is_added_to_the_vits(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = timm.create_model(f"avit_{name}_patch16_224")
        plain = timm.create_model(f"vit_{name}_patch16_224")
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert {key.removeprefix("vit.") for key in model.state_dict()} == set(plain.state_dict())
    assert (model.gamma, model.beta, model.epsilon) == (5.0, -10.0, 0.01)


def test_the_test_model_halts_at_every_layer_and_its_class_tokens_apart() -> None:
    used = layers_used(halting_apart().eval()(images(), output=True).steps.weight)
    assert set(used.flatten().tolist()) == {1, 2, 3, 4}
    assert used[:, 0].unique().numel() > 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_tokens_weights_sum_to_one(packed: bool) -> None:
    model = halting_apart().eval()
    model.set_packed(packed)
    weight = model(images(), output=True).steps.weight
    assert weight.shape == (16, DEPTH, TOKENS)
    assert (weight >= 0).all()
    torch.testing.assert_close(weight.sum(1), torch.ones(16, TOKENS))


@pytest.mark.parametrize("seed", range(3))
def test_halting_is_the_definitions_token_by_token(seed: int) -> None:
    """3 × 16 × 17 random tokens, at several depths, gammas, betas and epsilons."""
    draw = torch.Generator().manual_seed(seed)
    depth = 3 + 4 * seed
    gamma, beta, epsilon = 1.0 + 2 * seed, -2.0 - seed, (0.01, 0.1, 0.4)[seed]
    first = torch.randn(16, depth, TOKENS, generator=draw)
    output = scripted(first, gamma=gamma, beta=beta, epsilon=epsilon)(images(), output=True)
    ponder = torch.zeros(16)
    for sample in range(16):
        for token in range(TOKENS):
            weights, layers, remainder = halt_one_token(first[sample, :, token].tolist(), gamma, beta, epsilon)
            torch.testing.assert_close(output.steps.weight[sample, :, token], torch.tensor(weights))
            ponder[sample] += (layers + remainder) / TOKENS
    torch.testing.assert_close(output.ponder, ponder)


def test_a_token_exactly_at_the_limit_runs_on() -> None:
    """Scores of 0.5 equal 1 - epsilon exactly; the public code gives such a token no weight."""
    output = scripted(torch.zeros(2, 3, TOKENS), gamma=1.0, beta=0.0, epsilon=0.5)(images(2), output=True)
    assert torch.equal(output.steps.weight[0, :, 0], torch.tensor([0.5, 0.5, 0.0]))
    assert torch.equal(output.ponder, torch.full((2,), 2.5))


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_logits_are_those_of_a_list_from_which_halted_tokens_are_taken(packed: bool) -> None:
    model = halting_apart().eval()
    model.set_packed(packed)
    output = model(images(), output=True)
    entered = tokens_per_layer(output.steps.weight)
    for row, image in enumerate(images()):
        logits, counts = answer_of_one_image(model, image)
        torch.testing.assert_close(output.logits[row], logits, rtol=1e-5, atol=1e-5)
        assert entered[row].tolist() == counts


@pytest.mark.parametrize("beta", [-10.0, -4.0, -2.0, 0.0, 10.0])
@torch.no_grad()
def test_removing_halted_tokens_gives_what_masking_them_gives(beta: float) -> None:
    for seed in range(3):
        model = halting_apart(seed, beta=beta).eval()
        masked, intermediates = model(images(), output=True), model.forward_intermediates(images())
        model.set_packed(True)
        packed = model(images(), output=True)
        torch.testing.assert_close(packed.logits, masked.logits, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed.ponder, masked.ponder, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed.steps.weight, masked.steps.weight, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.forward_intermediates(images()), intermediates, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_removed_tokens_are_not_computed() -> None:
    model = halting_apart().eval()
    seen: list[tuple[int, int]] = []
    for block in model.vit.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(tuple(inputs[0].shape[:2])))
    entered = tokens_per_layer(model(images(), output=True).steps.weight)
    assert seen == [(16, TOKENS)] * DEPTH
    seen.clear()
    model.set_packed(True)
    model(images())
    assert [rows * width for rows, width in seen] == entered.sum(0).tolist()
    assert sum(rows * width for rows, width in seen) < 16 * TOKENS * DEPTH
    seen.clear()
    model(images()[:1])
    assert [rows * width for rows, width in seen] == entered[0][entered[0] > 0].tolist()


@pytest.mark.parametrize(("width", "removes"), [(64, False), (512, True)])
@torch.no_grad()
def test_a_cpu_removes_tokens_of_large_samples_by_default(width: int, removes: bool) -> None:
    model = halting_apart(embed_dim=width, patch_size=4).eval()
    computed: list[int] = []
    for block in model.vit.blocks:
        block.drop_path1 = Counting(computed)
    by_default = model(images(), output=True)
    entered = tokens_per_layer(by_default.steps.weight).sum(0).tolist()
    assert min(entered) < max(entered)
    assert computed == (entered if removes else [max(entered)] * DEPTH)
    watched: list[torch.Size] = []
    model.vit.blocks[0].attn.register_forward_hook(lambda _, inputs, __: watched.append(inputs[0].shape))
    torch.testing.assert_close(model(images()), by_default.logits, rtol=1e-5, atol=1e-5)
    assert [shape[0] for shape in watched] == [16]


def test_training_masks_even_where_inference_removes() -> None:
    model = halting_apart().train()
    expected = model(images())
    model.set_packed(True)
    assert torch.equal(model(images()), expected)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_a_sample_answers_the_same_alone_as_in_a_batch(packed: bool) -> None:
    model = halting_apart().eval()
    model.set_packed(packed)
    together = model(images(), output=True)
    for row in range(16):
        alone = model(images()[row : row + 1], output=True)
        torch.testing.assert_close(alone.logits[0], together.logits[row], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(alone.ponder[0], together.ponder[row], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_from_scratch_every_token_uses_all_layers_and_answers_as_the_vit() -> None:
    model = small().eval()
    output = model(images(), output=True)
    assert (layers_used(output.steps.weight) == DEPTH).all()
    assert (output.steps.weight[:, -1, 0] > 0.999).all()
    torch.testing.assert_close(output.logits, model.vit(images()), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_larger_beta_uses_fewer_layers() -> None:
    used = []
    for beta in (-10.0, -6.0, -3.0, 0.0, 3.0, 10.0):
        output = halting_apart(beta=beta).eval()(images(), output=True)
        used.append(layers_used(output.steps.weight).float().mean().item())
    assert used == sorted(used, reverse=True)
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_when_all_halt_at_once_the_first_block_answers(packed: bool) -> None:
    """No NaN from samples whose tokens have all halted."""
    model = halting_apart(beta=1e4).eval()
    model.set_packed(packed)
    output = model(images(), output=True)
    first = model.vit.blocks[0](model.embed(images()))
    torch.testing.assert_close(output.logits, model.vit.head(model.vit.norm(first)[:, 0]))
    assert torch.equal(output.ponder, torch.full((16,), 2.0))


@torch.no_grad()
def test_halted_tokens_affect_no_output() -> None:
    """Changing halted rows before the last block changes no output."""
    model = halting_apart().eval()
    output, features = model(images(), output=True), model.forward_features(images())
    halted = layers_used(output.steps.weight) < DEPTH

    def disturb(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        return (inputs[0] + 100 * torch.randn_like(inputs[0]) * (halted & ~halted.all(1, keepdim=True))[..., None],)

    model.vit.blocks[-1].register_forward_pre_hook(disturb)
    torch.testing.assert_close(model.forward_features(images()), features, rtol=1e-5, atol=1e-5)


def test_gradients_are_finite_and_every_parameter_learns() -> None:
    model = halting_apart(prior_weight=1.0).train()
    output = model(images(), output=True)
    (output.logits.square().mean() + 0.01 * output.ponder.mean()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_finite_where_all_tokens_have_halted(fused: bool) -> None:
    """Unfused attention with all keys hidden, and its gradient, would be NaN."""
    model = halting_apart(beta=1e4).train()
    for block in model.vit.blocks:
        block.attn.fused_attn = fused
    model(images()).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("beta", [-2.0, 1e4])
def test_forward_and_backward_are_finite_in_bfloat16(beta: float) -> None:
    model = halting_apart(beta=beta, prior_weight=1.0).train()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(images(), output=True)
        loss = output.logits.float().square().mean() + output.ponder.mean()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    model = model.bfloat16()
    for packed in (False, True):
        model.eval().set_packed(packed)
        whole = model(images().bfloat16(), output=True)
        assert whole.logits.dtype == torch.bfloat16
        assert whole.logits.isfinite().all()
        assert whole.ponder.dtype == whole.steps.weight.dtype == torch.float32


def test_ponders_gradient_is_that_of_the_remainder() -> None:
    """d(N + r) / dh = -1 for each score before the halting layer, 0 after."""
    first = torch.tensor([-1.0, 0.5, 4.0, 1.0]).expand(1, TOKENS, 4).transpose(1, 2).clone().requires_grad_()
    scripted(first, gamma=1.0, beta=-2.0)(images(1), output=True).ponder.sum().backward()
    h = (first.detach()[0, :, 0] - 2).sigmoid()
    torch.testing.assert_close(first.grad.sum((0, 2)), -h * (1 - h) * torch.tensor([1.0, 1.0, 0.0, 0.0]))


def test_ponder_alone_halts_tokens_earlier() -> None:
    model = halting_apart().train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    before = layers_used(model(images(), output=True).steps.weight).float().mean()
    for _ in range(20):
        optimizer.zero_grad()
        model(images(), output=True).ponder.mean().backward()
        optimizer.step()
    assert layers_used(model(images(), output=True).steps.weight).float().mean() < before


def test_gradient_checkpointing_changes_nothing() -> None:
    gradients = []
    for enable in (False, True):
        model = halting_apart().train()
        model.set_grad_checkpointing(enable)
        model(images()).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, checkpointed)


@pytest.mark.parametrize("training", [False, True])
def test_compiles_without_a_graph_break(training: bool) -> None:
    model = halting_apart(prior_weight=1.0).train(training)
    model.set_packed(not training)  # a compiled model masks
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ours, theirs = compiled(images(), output=True), model(images(), output=True)
    torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.ponder, theirs.ponder)
    ours.logits.sum().backward()


def test_the_target_is_a_distribution_around_its_mean() -> None:
    target = gaussian_target(12, 8)
    torch.testing.assert_close(target.sum(), torch.tensor(1.0))
    assert target.argmax() == 8
    torch.testing.assert_close(target[7] / target[8], torch.tensor(math.exp(-0.5)))


def test_the_prior_is_zero_at_its_target_and_positive_elsewhere() -> None:
    target = gaussian_target(12, 8)
    assert distribution_prior(target, target).abs() < 1e-6
    assert distribution_prior(0.3 * target, target).abs() < 1e-6
    for _ in range(200):
        assert distribution_prior(torch.rand(12), target) > 0
    assert distribution_prior(torch.zeros(12), target).isfinite()


def test_the_prior_is_the_kl_from_target_to_scores() -> None:
    """If no share is clamped; the public code also divides by the depth."""
    target, halting = torch.tensor([0.2, 0.5, 0.3]), torch.tensor([0.3, 0.3, 0.4])
    expected = sum(t * math.log(t / h) for t, h in zip(target.tolist(), halting.tolist(), strict=True))
    assert distribution_prior(2 * halting, target).item() == pytest.approx(expected, abs=1e-6)


def test_the_layer_means_count_every_running_patch_of_every_sample_and_no_class_token() -> None:
    score, running = torch.rand(5, 3, 7), torch.rand(5, 3, 7) < 0.6
    running[:, 2] = False
    for layer in range(3):
        counted = [score[i, layer, k] for i in range(5) for k in range(1, 7) if running[i, layer, k]]
        expected = torch.stack(counted).mean() if counted else torch.tensor(0.0)
        torch.testing.assert_close(halting_mean(score, running)[layer], expected)
    other_class, other_first = score.clone(), score.clone()
    other_class[:, :, 0] = 9.0
    other_first[0, :, 1:] += 1.0
    assert torch.equal(halting_mean(other_class, running), halting_mean(score, running))
    assert not torch.allclose(halting_mean(other_first, running), halting_mean(score, running))


def test_the_prior_joins_every_samples_ponder_in_training_alone() -> None:
    plain, with_prior = halting_apart(), halting_apart(prior_weight=2.0)
    added = with_prior(images(), output=True).ponder - plain(images(), output=True).ponder
    assert (added > 0).all()
    torch.testing.assert_close(added, added[:1].expand(16), rtol=1e-4, atol=1e-5)
    plain.eval(), with_prior.eval()
    assert torch.equal(with_prior(images(), output=True).ponder, plain(images(), output=True).ponder)


def test_the_prior_alone_moves_scores_towards_its_target() -> None:
    model = small(gamma=1.0, beta=-2.0).train()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def prior() -> Tensor:
        model.prior_weight = 1.0
        with_prior = model(images(), output=True).ponder.mean()
        model.prior_weight = 0.0
        return with_prior - model(images(), output=True).ponder.mean()

    before = prior()
    for _ in range(10):  # later the last layer empties, and a layer without tokens has no score to move
        optimizer.zero_grad()
        prior().backward()
        optimizer.step()
    assert prior() < 0.2 * before


def test_a_plain_vit_is_wrapped_as_it_is_and_its_checkpoint_loads() -> None:
    vit = VisionTransformer(**SMALL)
    assert AViT(vit).vit is vit
    model = small()
    model.load_state_dict(filter_checkpoint(vit.state_dict(), model), strict=True)
    assert torch.equal(model.vit.blocks[1].mlp.fc1.weight, vit.blocks[1].mlp.fc1.weight)


def test_timms_conventions_hold() -> None:
    model = timm.create_model("avit_tiny_patch16_224", **SMALL, gamma=3.0).eval()
    assert model.gamma == 3.0
    output = model(images(), output=True)
    assert torch.equal(output.logits, model(images()))
    assert torch.equal(model.forward_head(model.forward_features(images())), output.logits)
    features = timm.create_model("avit_tiny_patch16_224", features_only=True, out_indices=(0, 3), **SMALL).eval()
    assert [m.shape for m in features(images())] == [(16, 64, 4, 4)] * 2
    registers = halting_apart(reg_tokens=2, init_values=0.1).eval()
    assert registers(images(), output=True).steps.weight.shape == (16, DEPTH, TOKENS + 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_token": False, "global_pool": "avg"}, "class_token is False; .* it must be True"),
        ({"global_pool": "avg"}, "global_pool is 'avg'; .* it must be 'token'"),
        ({"epsilon": 0.0}, "epsilon is 0.0; it must be above 0 and below 1"),
        ({"epsilon": 1.0}, "epsilon is 1.0; it must be above 0 and below 1"),
        ({"gamma": 0.0}, "gamma is 0.0; it must be above 0"),
        ({"gamma": -5.0}, "gamma is -5.0; it must be above 0"),
        ({"prior_weight": -0.1}, "prior_weight is -0.1; it must be at least 0"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)
