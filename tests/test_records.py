"""Records print shortly, and stay what pytree and torch.compile know: plain NamedTuples."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch.utils._pytree import tree_map, tree_map_only, tree_structure

import adatape.models  # noqa: F401  registers the names
from adatape.records import Output, Places, Searched, Steps, Tape

SHAPE: dict[str, Any] = {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def tape_of(length: torch.Tensor) -> Tape:
    b, t, k = len(length), 4, 2
    tokens, index = torch.zeros(b, t, 8), torch.zeros(b, t, k, dtype=torch.int64)
    return Tape(tokens, torch.zeros(b, t, dtype=torch.bool), index, torch.zeros(b, t, k), length, torch.zeros(b))


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    options = {"bank_patch": 8, "steps": 4, "query_width": 16}
    return timm.create_model("adatape_tiny_patch16_224", **SHAPE, **options).eval()


def test_a_tape_prints_shapes_dtypes_and_lengths_only() -> None:
    assert repr(tape_of(torch.tensor([1, 4, 3]))) == (
        "Tape(tokens=float32[3, 4, 8], mask=bool[3, 4], index=int64[3, 4, 2], weight=float32[3, 4, 2], "
        "length=int64[3] of 1 to 4, ponder=float32[3])"
    )
    assert "length=int64[2] of 3, " in repr(tape_of(torch.tensor([3, 3])))
    assert "length=int64[0], " in repr(tape_of(torch.zeros(0, dtype=torch.int64)))


def test_an_output_leaves_out_what_it_has_not() -> None:
    output = Output(torch.zeros(2, 5), torch.zeros(2, 8, dtype=torch.bfloat16), torch.zeros(2))
    assert repr(output) == "Output(logits=float32[2, 5], features=bfloat16[2, 8], ponder=float32[2])"
    assert repr(output) == str(output) == f"{output}"


@pytest.mark.parametrize("kind", [Tape, Steps, Searched, Places, Output])
def test_every_record_is_short_whatever_its_fields_hold(kind: Any) -> None:
    large = kind(*(torch.zeros(50, 60, 70) for _ in kind._fields))
    assert len(repr(large)) < 60 * len(kind._fields)
    assert "(1)" not in repr(kind(*(None for _ in kind._fields)))
    assert "=7" in repr(kind(*(7 for _ in kind._fields)))  # of a tree_map
    assert "meta" in repr(kind(*(torch.zeros(3, dtype=torch.int64, device="meta") for _ in kind._fields)))
    assert kind.__bases__ == (tuple,)


def test_printing_under_vmap_needs_no_value() -> None:
    said: list[str] = []

    def printed(length: torch.Tensor) -> torch.Tensor:
        said.append(repr(Steps(length)))
        return length

    torch.func.vmap(printed)(torch.arange(6).view(2, 3))
    assert said == ["Steps(weight=int64[3])"]


def test_tree_map_goes_through_a_record_and_keeps_its_type(model: Any) -> None:
    output = model(torch.randn(2, 3, 32, 32), output=True)
    shapes = tree_map(lambda each: None if each is None else tuple(each.shape), output)  # None is a leaf to pytree
    assert isinstance(shapes, Output)
    assert isinstance(shapes.tape, Tape)
    assert shapes.tape.tokens == (2, 4, 32)
    assert tree_structure(output) == tree_structure(tree_map_only(torch.Tensor, torch.clone, output))


def test_records_cross_a_compiled_graph_without_a_break(model: Any) -> None:
    x = torch.randn(2, 3, 32, 32)
    compiled = torch.compile(lambda x: model(x, output=True), fullgraph=True, backend="eager")
    output, expected = compiled(x), model(x, output=True)
    assert isinstance(output, Output)
    assert isinstance(output.tape, Tape)
    assert repr(output) == repr(expected)
    assert torch.equal(output.tape.index, expected.tape.index)
