"""compile_blocks: results are unchanged, and equal blocks of all models compile once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from small_runs import tiny

from adatape.models.base import Adaptive
from adatape.train.trainer import Trainer

SHAPE = {"img_size": 32, "patch_size": 8, "num_classes": 5}
TAPE = {"bank_patch": 4, "depth": 5, "layer": 1, "steps": 6}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counting() -> tuple[list[Any], Callable[..., Any]]:
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        seen.append(graph)
        return graph.forward

    return seen, backend


def model(name: str, **options: Any) -> Adaptive:
    torch.manual_seed(0)
    return timm.create_model(f"{name}_tiny_patch16_224", **SHAPE, **options).eval()


def test_plain_vits_of_all_depths_are_one_compilation() -> None:
    seen, backend = counting()
    x = torch.randn(2, 3, 32, 32)
    for depth in (2, 3, 5):
        made = model("plainvit", depth=depth)
        plain = made(x)
        made.compile_blocks(backend=backend)
        torch.testing.assert_close(made(x), plain)
    assert len(seen) == 1


def test_a_tape_is_one_compilation_more() -> None:
    seen, backend = counting()
    x, made = torch.randn(2, 3, 32, 32), model("adatape", **TAPE)
    plain = made(x)
    made.compile_blocks(backend=backend)
    torch.testing.assert_close(made(x), plain)
    assert len(seen) == 2  # inputs alone, and with the tape


@pytest.mark.parametrize("family", ["adatape", "uvit"])
def test_a_run_learns_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, used = Adaptive.compile_blocks, []

    def quick(self: Adaptive, **options: Any) -> None:
        used.append(self)
        whole(self, backend="aot_eager", **options)

    eager = Trainer(tiny(family, steps=3))
    plain = [stats.loss.item() for stats in eager.train(3)]
    monkeypatch.setattr(Adaptive, "compile_blocks", quick)
    trainer = Trainer(tiny(family, steps=3, engine__compile="blocks"))
    assert [stats.loss.item() for stats in trainer.train(3)] == pytest.approx(plain, rel=1e-4)
    assert trainer.evaluate().loss == pytest.approx(eager.evaluate().loss, rel=1e-3)
    assert used == [trainer.model]
