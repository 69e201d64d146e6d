"""Banks with keys of their own: what is read is what scores say, only that is made, and keys learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import adatape
from adatape.atr import take
from adatape.banks import BankView, KeyedView, normed
from adatape.export import export_model, open_export
from adatape.models import AdaTape
from adatape.reader import TapeReader

WIDTH, KEY, PLACES = 32, 16, 64
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": WIDTH, "num_heads": 2, "depth": 3, "num_classes": 5}
READS = {"steps": 3, "threshold": 2.0, "merge": 2, "query_width": KEY, "gate": False}


class Cells(adatape.Bank):
    """Cells of 4 pixels: keys from their mean colours, tokens from their pixels."""

    size, width = PLACES, WIDTH

    def __init__(self, key: int) -> None:
        super().__init__()
        self.where, self.what = nn.Linear(3, key), nn.Linear(3 * 4 * 4, WIDTH)
        self.made: list[Tensor] = []
        self.dtypes: list[torch.dtype] = []

    def open(self, inputs: Tensor, tokens: Tensor, query: Tensor) -> BankView:  # noqa: ARG002
        cells = nn.functional.unfold(inputs, 4, stride=4).mT

        def make(index: Tensor) -> Tensor:
            tokens = self.what(take(cells, index))
            if not torch.compiler.is_compiling():
                self.made.append(index)
                self.dtypes.append(tokens.dtype)
            return tokens

        return KeyedView(self.where(cells.unflatten(2, (3, -1)).mean(-1)), make)


def wrapped(key: int = KEY, **options: Any) -> AdaTape:
    torch.manual_seed(0)
    return adatape.wrap(timm.create_model("vit_tiny_patch16_224", **VIT), Cells(key), **{**READS, **options})


def images(n: int = 3) -> Tensor:
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def made_by(model: AdaTape) -> list[Tensor]:
    assert isinstance(model.bank, Cells)
    return model.bank.made


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("use_kernels", [None, True, False])
def test_keys_that_are_first_coordinates_read_what_tokens_read(shared: bool, use_kernels: bool | None) -> None:
    torch.manual_seed(0)
    reader = TapeReader(WIDTH, adatape.ReaderConfig(steps=4, threshold=3.0, merge=2, query_width=KEY), PLACES)
    reader.use_kernels = use_kernels
    tokens = torch.randn(PLACES, WIDTH) if shared else torch.randn(2, PLACES, WIDTH)
    query, seen = torch.randn(2, WIDTH), torch.randn(2, 4, WIDTH)

    def read(keyed: bool) -> tuple[adatape.Tape, list[Tensor]]:
        q, z = query.clone().requires_grad_(), tokens.clone().requires_grad_()
        keys = normed(z, reader.norm)[..., :KEY]  # type: ignore[arg-type]
        tape = reader(q, KeyedView(keys, lambda index: take(z, index)) if keyed else z)
        loss = (tape.tokens * seen).sum() + tape.ponder.sum()
        return tape, list(torch.autograd.grad(loss, (q, z)))

    (mine, my_slopes), (theirs, their_slopes) = read(True), read(False)
    assert torch.equal(mine.index, theirs.index)
    assert torch.equal(mine.length, theirs.length)
    torch.testing.assert_close(mine.tokens, theirs.tokens)
    torch.testing.assert_close(my_slopes, their_slopes, rtol=1e-4, atol=1e-5)


def test_both_paths_of_the_reader_read_the_same_and_give_keys_the_same_gradient() -> None:
    found = []
    for use_kernels in (True, False):
        model = wrapped().train()
        model.reader.use_kernels = use_kernels
        out = model(images(), output=True, key=torch.arange(3))
        out.logits.square().sum().backward()
        found.append((out.tape.index, model.bank.where.weight.grad))  # type: ignore[union-attr]
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].abs().max() > 0  # type: ignore[union-attr]
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_only_what_is_read_is_made(training: bool) -> None:
    model = wrapped().train(training)
    tape = model(images(), output=True).tape
    (index,) = made_by(model)
    assert index.shape == (3, 3, 2)
    assert torch.equal(index[tape.mask], tape.index[tape.mask])


def test_a_budget_of_zero_makes_nothing() -> None:
    model = wrapped().eval()
    model.set_budget(0)
    model(images())
    assert made_by(model) == []


def test_keys_learn_where_to_look() -> None:
    """One cell in 64 tells the class, by a colour that its mean shows."""
    generator = torch.Generator().manual_seed(0)

    def batch(n: int) -> tuple[Tensor, Tensor]:
        x, y = 0.1 * torch.randn(n, 3, 32, 32, generator=generator), torch.randint(5, (n,), generator=generator)
        at = torch.randint(8, (n, 2), generator=generator)
        for i, (row, column) in enumerate(at.tolist()):
            x[i, 0, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = 3.0
            x[i, 1:, row * 4 : row * 4 + 4, column * 4 : column * 4 + 4] = (y[i].item() - 2) / 2
        return x, y

    model = wrapped(layer=0, steps=1, threshold=1.0, merge=2).train()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(150):
        x, y = batch(64)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    x, y = batch(256)
    bright = nn.functional.avg_pool2d(x[:, 0], 4).flatten(1).argmax(1)
    tape = model.eval()(x, output=True).tape
    share = (tape.index == bright[:, None, None]).any(2).float().mean()
    assert share > 0.9


def test_tokens_are_made_in_the_precision_of_autocast() -> None:
    model = wrapped().train()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images(), output=True)
    assert model.bank.dtypes == [torch.bfloat16]  # type: ignore[union-attr]
    assert out.tape.weight.dtype == torch.float32


def test_a_sample_reads_alone_what_it_reads_in_a_batch() -> None:
    model, x = wrapped().eval(), images()
    together, alone = model(x, output=True).tape, [model(x[i : i + 1], output=True).tape for i in range(3)]
    assert torch.equal(together.index, torch.cat([tape.index for tape in alone]))


def test_a_model_with_keys_compiles_as_one_graph_and_is_exported(tmp_path: Path) -> None:
    model, x = wrapped().eval(), images()
    whole = model(x)
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(compiled, whole, rtol=1e-5, atol=1e-5)
    export_model(model, x, "torch", tmp_path / "m.pt2", {})
    found = open_export(tmp_path / "m.pt2")(
        {"images": x, "slots": torch.arange(3), "threshold": torch.tensor(READS["threshold"])}
    )
    torch.testing.assert_close(found.logits, whole, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the bank's keys have width 8 and query_width is 16; they must be equal"):
        wrapped(key=8)(images())
    with pytest.raises(ValueError, match="reader is 'act'; its halting layer needs whole tokens"):
        wrapped(reader="act")(images())
    with pytest.raises(ValueError, match="makes tokens only where they are read"):
        KeyedView(torch.zeros(4, 2), lambda index: index).all()
    assert adatape.KeyedView is KeyedView


def test_all_at_once_reads_keys_too() -> None:
    model = wrapped(reader="parallel").eval()
    tape = model(images(), output=True).tape
    assert torch.equal(made_by(model)[0], tape.index)
    assert torch.equal(tape.weight, torch.ones_like(tape.weight))
