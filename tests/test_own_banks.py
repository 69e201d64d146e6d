"""A tensor as a bank, a bank of one's own, and what a bank is opened with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
import timm
import torch
from torch import Tensor, nn

import adatape
from adatape.banks import BankView, FrozenBank
from adatape.export import export_model, open_export
from adatape.models import AdaTape

mpl.use("Agg")
WIDTH = 32
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "num_heads": 2, "depth": 3, "num_classes": 5}
READS = {"steps": 3, "threshold": 2.0, "merge": 2, "query_width": 16, "gate": False}
PAGE = (Path(__file__).parents[1] / "docs" / "banks.md").read_text()


def wrapped(bank: Any, **options: Any) -> AdaTape:
    torch.manual_seed(0)
    return adatape.wrap(timm.create_model("vit_tiny_patch16_224", **VIT), bank, **{**READS, **options})


def images(n: int = 3) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def tokens_of(count: int = 40) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))


def test_a_tensor_is_read_as_a_learned_bank_of_the_same_tokens() -> None:
    learned = adatape.LearnedBank(40, WIDTH)
    learned.tokens.data.copy_(tokens_of())
    mine, theirs = (wrapped(bank).eval()(images(), output=True) for bank in (tokens_of(), learned))
    assert torch.equal(mine.logits, theirs.logits)
    assert torch.equal(mine.tape.index, theirs.tape.index)


def test_a_tensor_is_copied_saved_with_the_model_and_not_trained() -> None:
    given = tokens_of()
    model = wrapped(given).train()
    before = given.clone()
    given.zero_()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(images()).square().sum().backward()
    optimizer.step()
    assert torch.equal(model.bank.tokens, before)  # type: ignore[arg-type]
    assert "bank.tokens" not in dict(model.named_parameters())
    other = wrapped(torch.zeros(40, WIDTH))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(images()), model.eval()(images()))


def test_a_tensor_follows_the_model_to_its_dtype_and_costs_nothing() -> None:
    model = wrapped(tokens_of())
    assert model.double().bank.tokens.dtype == torch.float64  # type: ignore[union-attr]
    bank = next(part for part in model.cost() if part.name == "bank")
    assert (bank.parameters, bank.macs) == (0, 0)


def test_a_model_that_reads_a_tensor_is_exported(tmp_path: Path) -> None:
    model = wrapped(tokens_of()).eval()
    export_model(model, images(), "torch", tmp_path / "m.pt2", {})
    exported = open_export(tmp_path / "m.pt2")
    found = exported({"images": images(), "slots": torch.arange(3), "threshold": torch.tensor(2.0)})
    torch.testing.assert_close(found.logits, model(images()), rtol=1e-5, atol=1e-5)


def test_what_is_read_of_a_tensor_is_drawn_by_index() -> None:
    assert adatape.show_tape(wrapped(tokens_of()), images(1)).get_xlabel().startswith("index in the bank")


@pytest.mark.parametrize(
    ("bank", "options", "message"),
    [
        (torch.zeros(40, 8), {}, "the bank's tokens have width 8 and the ViT's 32; they must be equal"),
        (adatape.LearnedBank(40, 8), {}, "the bank's tokens have width 8"),
        (adatape.InputBank(8, patch=4, image=32), {}, "the bank's tokens have width 8"),
        (torch.zeros(40), {}, r"a tensor of shape \(40,\) and torch.float32; it must be \(c, d\)"),
        (torch.zeros(40, WIDTH, dtype=torch.long), {}, "torch.int64; it must be"),
        (torch.full((40, WIDTH), torch.nan), {}, "bank has 1280 non-finite values of 1280"),
        (torch.zeros(5, WIDTH), {}, "bank has 5 tokens; steps × merge needs 6"),
        ("books", {}, "bank is 'books'; it must be 'input', 'learn', 'windows', a tensor or an adatape.Bank"),
        (torch.zeros(40, WIDTH).numpy(), {}, "bank is a ndarray; it must be 'input', 'learn', 'windows', a tensor"),
        (torch.zeros(40, WIDTH), {"image": (32, 32)}, "only bank='windows' takes it"),
    ],
)
def test_a_bank_that_does_not_fit_is_refused_when_a_model_is_built(bank: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrapped(bank, **options)


def test_a_budget_beyond_a_tensor_and_timms_format_are_refused() -> None:
    model = wrapped(tokens_of())
    with pytest.raises(ValueError, match="steps is 21; it needs 42 bank tokens, and the bank has 40"):
        model.set_budget(21)
    with pytest.raises(ValueError, match="the bank is a FrozenBank, which timm cannot build"):
        adatape.hub_settings(model)


class Recorded(adatape.Bank):
    """A bank of the sample's own tokens, shifted by its query."""

    size = 17

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Linear(WIDTH, WIDTH)
        self.opened_with: tuple[Tensor, ...] = ()

    def open(self, inputs: Tensor, tokens: Tensor, query: Tensor) -> BankView:
        self.opened_with = inputs, tokens, query
        return BankView(tokens + self.shift(query)[:, None])


@pytest.mark.parametrize(("layer", "query"), [(0, "token"), (1, "mean"), (2, "token")])
def test_a_bank_is_opened_with_the_rows_and_the_query_of_its_layer(layer: int, query: str) -> None:
    model, x = wrapped(Recorded(), layer=layer, query=query), images()
    model(x).square().sum().backward()
    tokens = model.vit._pos_embed(model.vit.patch_embed(x))
    for block in model.vit.blocks[:layer]:
        tokens = block(tokens)
    inputs, rows, asked = model.bank.opened_with  # type: ignore[union-attr, misc]
    assert torch.equal(inputs, x)  # type: ignore[has-type]
    torch.testing.assert_close(rows, tokens)  # type: ignore[has-type]
    torch.testing.assert_close(asked, tokens[:, 0] if query == "token" else tokens.mean(1))  # type: ignore[has-type]
    assert model.bank.shift.weight.grad.abs().max() > 0  # type: ignore[union-attr, operator]


def test_public_names_are_those_of_the_package() -> None:
    assert adatape.Bank is FrozenBank.__mro__[1]
    assert adatape.BankView is BankView
    assert callable(adatape.build_index)


def test_the_guides_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert names["model"].bank.size == 5000


class Given(adatape.Bank):
    """A bank whose `forward` or `open` returns what it is given."""

    size = 40

    def __init__(self, given: Any, opened: bool = False) -> None:
        super().__init__()
        self.given, self.opened = given, opened

    def forward(self, inputs: Tensor) -> Any:  # noqa: ARG002
        return self.given

    def open(self, inputs: Tensor, tokens: Tensor, query: Tensor) -> Any:
        return self.given if self.opened else super().open(inputs, tokens, query)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize(
    ("bank", "message"),
    [
        (Given(torch.zeros(40, 8)), "the bank's tokens have width 8 and the ViT's 32; they must be equal"),
        (
            Given(torch.zeros(40)),
            r"the bank's tokens are of shape \(40,\); they must be a tensor \(c, d\) or \(b, c, d\)",
        ),
        (Given(torch.zeros(1, 1, 40, WIDTH)), r"the bank's tokens are of shape \(1, 1, 40, 32\)"),
        (Given(None), "the bank's tokens are a NoneType"),
        (Given([torch.zeros(40, WIDTH)]), "the bank's tokens are a list"),
        (Given(None, opened=True), "the bank's tokens are a NoneType"),
        (
            Given(adatape.KeyedView(torch.randn(40, 16), lambda index: index.new_zeros(*index.shape, 8)), True),
            "the bank's tokens have width 8 and the ViT's 32",
        ),
        (
            Given(adatape.KeyedView(torch.randn(40, 16), lambda index: index.new_zeros(index.numel(), WIDTH)), True),
            r"make's tokens are of shape \(18, 32\); for an index of shape \(3, 3, 2\) they must be \(3, 3, 2, 'd'\)",
        ),
        (Given(adatape.KeyedView(torch.randn(40, 16), lambda _: None), True), "make's tokens are a NoneType"),  # type: ignore[arg-type,return-value]
    ],
)
def test_what_a_bank_must_not_give_is_refused_where_it_is_read(bank: adatape.Bank, message: str, mode: str) -> None:
    model = wrapped(bank).train(mode == "training")
    with torch.set_grad_enabled(mode == "training"), pytest.raises(ValueError, match=message):
        model(images())
