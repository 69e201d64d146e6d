"""A tape that leaves before the last block: what it told the inputs stays, what it costs ends."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import adatape
from adatape.encoder import listen, listens
from adatape.layout import key_mask, weighted_mean
from adatape.measure.cost import cost, total
from adatape.models import AdaTape
from adatape.ragged import hide_tail

SMALL = {"img_size": 32, "patch_size": 8, "bank_patch": 4, "depth": 4, "num_classes": 5, "steps": 6, "merge": 2}
KINDS: list[dict[str, Any]] = [
    {"threshold": 1.5},
    {"threshold": 1.5, "still": 1},
    {"threshold": 1.5, "still": 1, "echo": True},
    {"reader": "selective", "merge": 1, "echo": True},
    {"threshold": 6.0},
    {"reader": "selective", "merge": 1},
    {"threshold": 1.5, "tape_ffn": "append+blocks"},
    {"threshold": 1.5, "gate": True},
    {"threshold": 1.5, "bank": "learn", "bank_size": 40},
]


def model(**options: Any) -> AdaTape:
    torch.manual_seed(0)
    return timm.create_model("adatape_tiny_patch16_224", **{**SMALL, **options}).eval()


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def rows_fed(made: AdaTape, x: Tensor) -> list[int]:
    """By each block's feed-forward."""
    seen: list[int] = []
    hooks = [block.mlp.register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[1])) for block in made.vit.blocks]
    made(x)
    for hook in hooks:
        hook.remove()
    return seen


def test_blocks_beyond_see_the_inputs_alone() -> None:
    assert rows_fed(model(layer=1, leave=3), images()) == [16, 22, 16, 16]
    assert rows_fed(model(layer=0, leave=3, still=1), images()) == [22, 16, 16, 16]
    assert rows_fed(model(layer=0, leave=1), images()) == [16, 16, 16, 16]
    assert rows_fed(model(), images()) == [16, 22, 22, 22]


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2", "vit_base_patch16_rpn_224"])
def test_to_listen_is_the_inputs_share_of_the_block(name: str) -> None:
    torch.manual_seed(0)
    block = timm.create_model(name, img_size=56, depth=1, embed_dim=48, num_heads=3, qk_norm=True).blocks[0].eval()
    inputs, tape, visible = torch.randn(4, 7, 48), torch.randn(4, 5, 48), torch.ones(4, 12, dtype=torch.bool)
    visible[1:, 9:] = False
    for mask in (None, hide_tail(visible), key_mask(visible)):
        whole = block(torch.cat([inputs, tape], 1), attn_mask=mask)
        torch.testing.assert_close(listen(block, inputs, tape, mask), whole[:, :7])


def test_an_adapter_and_a_hook_are_not_passed_by() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * x.mean(-1, keepdim=True)

    torch.manual_seed(0)
    block = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, embed_dim=48, num_heads=3).blocks[0].eval()
    inputs, tape, called = torch.randn(2, 3, 48), torch.randn(2, 4, 48), []
    assert listens(block)
    block.attn.qkv = Adapted(48, 144)
    assert not listens(block)
    torch.testing.assert_close(listen(block, inputs, tape), block(torch.cat([inputs, tape], 1))[:, :3])
    block.attn.qkv = nn.Linear(48, 144)
    block.attn.register_forward_hook(lambda *_: called.append(1))
    listen(block, inputs, tape)
    assert called


def test_what_was_read_has_been_heard() -> None:
    made, x = model(layer=1, leave=2), images()
    with_tape = made(x)
    made.set_budget(steps=0)
    assert not torch.allclose(made(x), with_tape, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_and_in_buckets_as_padded(kind: dict[str, Any]) -> None:
    made, x = model(layer=1, leave=3, **kind), images()
    with torch.no_grad():
        padded = made(x)
        made.set_packed()
        torch.testing.assert_close(made(x), padded, rtol=1e-4, atol=1e-5)
        made.set_packed(buckets=2)
        torch.testing.assert_close(made(x), padded, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_cost_is_what_pytorch_counts(kind: dict[str, Any]) -> None:
    kind = {**kind, "threshold": 6.0} if "reader" not in kind else {**kind, "floor": 1e-6}
    made, x = model(layer=1, leave=3, **kind), images(1)
    # Before 2.15 torch counts the CPU's fused attention as nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        length = int(made(x, output=True).tape.length)
    assert length == 6
    counted, ours = counter.get_total_flops() // 2, total(cost(made, 6)).macs
    assert counted == ours
    assert ours < total(cost(model(layer=1, **kind), 6)).macs


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_parameter_learns(kind: dict[str, Any]) -> None:
    made = model(layer=1, leave=3, **kind).train()
    made(images(), key=torch.arange(6)).square().sum().backward()
    assert not [name for name, p in made.named_parameters() if p.grad is None]


def test_the_grid_is_seen_after_every_block() -> None:
    maps = model(layer=1, leave=3).forward_intermediates(images(), indices=[0, 1, 2, 3], intermediates_only=True)
    assert [tuple(each.shape) for each in maps] == [(6, 192, 4, 4)] * 4


def test_a_wrapped_vit_starts_as_itself_and_compiles_in_full() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=5).eval()
    plain = vit(images())
    made = adatape.wrap(vit, patch=4, merge=2, layer=1, leave=2).eval()
    torch.testing.assert_close(made(images()), plain, rtol=1e-4, atol=1e-5)
    assert isinstance(made.gate, nn.Module)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), made(images()))


def test_a_still_tape_is_seen_as_it_was_read() -> None:
    with pytest.raises(ValueError, match="still is 3; the tape is seen in blocks 1 to 2, so one of these"):
        model(layer=1, leave=3, still=3)


@pytest.mark.parametrize("leave", [0, 1, 5])
def test_it_leaves_after_it_joins_and_no_later_than_the_end(leave: int) -> None:
    with pytest.raises(ValueError, match=f"leave is {leave}; the tape joins before block 1, so 2 to 4"):
        model(layer=1, leave=leave)


ECHOING = {"layer": 1, "still": 2, "reader": "selective", "merge": 1}


def echoing(**options: Any) -> tuple[AdaTape, AdaTape]:
    """The same weights without and with an echo."""
    made, loud = model(**options), model(**options, echo=True)
    loud.load_state_dict(made.state_dict())
    return made, loud


def test_an_echo_compiles_in_full_and_is_alone_as_in_a_batch() -> None:
    loud, x = model(**ECHOING, echo=True, num_classes=0), images()
    compiled = torch.compile(loud, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), loud(x))
    torch.testing.assert_close(loud(x[:1]), loud(x)[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooling", [{}, {"class_token": True, "global_pool": "token"}, {"fc_norm": True}])
def test_an_echo_is_the_mean_of_the_tape_by_its_weights_beside_what_is_pooled(pooling: dict[str, Any]) -> None:
    made, loud = echoing(**ECHOING, **pooling)
    x, inputs, rows = images(), 16 + made.vit.num_prefix_tokens, []
    hook = loud.vit.blocks[1].register_forward_hook(lambda _, __, out: rows.append(out[:, inputs:]))
    seen, plain = loud(x, output=True), made(x, output=True)
    hook.remove()
    weight = seen.tape.weight.squeeze(-1)
    mean = (weight[..., None] * rows[0]).sum(1) / weight.sum(1, keepdim=True)
    pooled, echo = seen.features.chunk(2, 1)
    assert loud.head_hidden_size == seen.features.shape[1] == 2 * made.head_hidden_size
    torch.testing.assert_close(pooled, plain.features)
    torch.testing.assert_close(echo, nn.functional.layer_norm(mean, mean.shape[-1:]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.logits, plain.logits)
    torch.testing.assert_close(loud.forward_head(loud.forward_features(x)), seen.logits)


@pytest.mark.parametrize("kind", [ECHOING, {"layer": 1, "gate": True}], ids=str)
def test_training_is_the_same_with_and_without_an_echo(kind: dict[str, Any]) -> None:
    made, loud = (each.train() for each in echoing(**kind))
    answers = [each(images(), key=torch.arange(6)) for each in (made, loud)]
    assert torch.equal(*answers)
    for answer in answers:
        answer.square().sum().backward()
    for ours, theirs in zip(made.parameters(), loud.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_without_a_tape_an_echo_is_silent() -> None:
    made, loud = echoing(layer=1, still=2)
    for each in (made, loud):
        each.set_budget(0)
    assert torch.equal(made(images()), loud(images()))
    assert not loud(images(), output=True).features[:, 192:].any()


def test_a_new_head_sees_what_is_pooled_and_no_head_everything() -> None:
    loud, x = model(layer=1, still=2, echo=True), images()
    loud.reset_classifier(7)
    seen = loud(x, output=True)
    torch.testing.assert_close(seen.logits, loud.vit.head(seen.features[:, :192]))
    loud.reset_classifier(0)
    assert torch.equal(loud(x), seen.features)


def test_rows_that_are_not_pooled_have_the_echo_behind_them() -> None:
    loud, x = model(layer=1, still=2, echo=True), images()
    loud.reset_classifier(0, "")
    assert loud(x).shape == (6, 16 + 1, 192)
    torch.testing.assert_close(loud(x), loud.forward_features(x))


def test_the_echo_of_nothing_is_nothing() -> None:
    assert torch.equal(weighted_mean(torch.randn(2, 3, 4), torch.zeros(2, 3, 2)), torch.zeros(2, 1, 4))
    assert torch.equal(weighted_mean(torch.randn(2, 0, 4), torch.zeros(2, 0, 2)), torch.zeros(2, 1, 4))


def test_a_wrapped_vit_may_have_an_echo() -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=3, num_classes=5).eval()
    plain = vit(images())
    made = adatape.wrap(vit, patch=4, merge=2, layer=1, echo=True).eval()
    torch.testing.assert_close(made(images()), plain, rtol=1e-4, atol=1e-5)
    assert made(images(), output=True).features[:, 192:].abs().sum() > 0
    made.reset_classifier(0, "")
    assert made.head_hidden_size == made(images()).shape[-1] == 192


def test_an_echo_needs_a_tape_that_is_not_pooled() -> None:
    with pytest.raises(ValueError, match="echo is True; the tape goes to the end"):
        model(echo=True)
