"""An exported file equals the model at batches and tape lengths other than the traced ones."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from adatape.banks import LearnedBank
from adatape.config import Experiment, ImageModel, Optimizer, ReaderConfig, SequenceModel
from adatape.data_config import Images, Parity
from adatape.export import SUFFIX, Exported, arguments, export_model, export_run, open_export, write_export
from adatape.models import PonderNet
from adatape.models.adatape import AdaTape
from adatape.models.base import Adaptive
from adatape.models.join import TapeJoin
from adatape.report.tables import export_table
from adatape.train.folder import load_run, prepare
from adatape.train.task import build_for
from adatape.train.weights import write_weights

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")

STEPS, SIZE = 3, 16
READING = {"steps": STEPS, "threshold": 1.5, "merge": 2, "query_width": 16}
VIT = {"patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 2}
TAPE = {**VIT, **READING, "bank_patch": 4, "bank_size": 24}
TINY = "adatape_tiny_patch16_224"
MODELS = {
    "input": ImageModel(TINY, {**TAPE, "tape_ffn": "append+blocks"}),
    "learn": ImageModel(TINY, {**TAPE, "bank": "learn"}),
    "wrapped": ImageModel("vit_tiny_patch16_224", {**VIT, "reg_tokens": 1}, wrap={"patch": 4, **READING}),
    "rotating": ImageModel("eva02_tiny_patch14_224", VIT, wrap={"patch": 4, **READING}),
    "rotating, mixed": ImageModel("vit_small_patch16_rope_mixed_224", VIT, wrap={"patch": 4, **READING}),
    "plain": ImageModel("plainvit_tiny_patch16_224", VIT),
    "parity": SequenceModel(width=32, depth=2, heads=2, reading=ReaderConfig(**READING)),  # type: ignore[arg-type]
}
# The trace was of batch 3 and tape 2.
PAIRS = [(1, 0), (1, 1), (5, STEPS), (2, 2), (7, 1), (4, 0), (16, STEPS)]
CASES = [(name, to) for name in MODELS for to in SUFFIX if (name, to) != ("parity", "torch")]
each_file = pytest.mark.parametrize(("name", "to"), CASES)


class Made(NamedTuple):
    folder: Path
    path: Path
    model: Any


def lively(model: Adaptive, seed: int = 0) -> Adaptive:
    """Scales weights as in a trained model: logits near 1, tapes of several lengths, gates open."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def write_run(folder: Path, settings: ImageModel | SequenceModel) -> Path:
    """Writes the folder of a run with untrained weights."""
    data = Images("digits", size=SIZE) if isinstance(settings, ImageModel) else Parity(length=12)
    experiment = Experiment("test", data, settings, Optimizer())
    torch.manual_seed(0)
    prepare(folder, experiment, "cpu")
    write_weights(folder / "checkpoints" / "model.safetensors", lively(build_for(experiment)).state_dict())
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def run(name: str) -> Path:
        return write_run(tmp_path_factory.mktemp(name), MODELS[name])

    @cache
    def make(name: str, to: Any) -> Made:
        return Made(run(name), export_run(run(name), to), load_run(run(name))[1].eval())

    return make


def inputs_for(name: str, batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    if name == "parity":
        return torch.randint(-1, 2, (batch, 12), generator=generator)
    return 2 * torch.rand(batch, 1, SIZE, SIZE, generator=generator) - 1


def expected(model: Any, x: Tensor, length: int, threshold: float) -> Exported:
    if isinstance(model, AdaTape):
        model.set_budget(length, threshold)
    with torch.no_grad():
        output = model(x, output=True)
    return Exported(
        output.logits, torch.zeros(len(x), dtype=torch.int64) if output.tape is None else output.tape.length
    )


@each_file
def test_a_file_equals_the_model_at_any_batch_and_tape_length(made: Any, name: str, to: str) -> None:
    _, path, model = made(name, to)
    answer, lengths = open_export(path), set()
    for batch, length in PAIRS:
        for threshold in (0.7, 1.5):
            x = inputs_for(name, batch)
            given, wanted = answer(arguments(model, x, length, threshold)), expected(model, x, length, threshold)
            torch.testing.assert_close(given.logits, wanted.logits, rtol=0, atol=1e-5)
            if given.length is not None:
                assert given.length.tolist() == wanted.length.tolist()  # type: ignore[union-attr]
                lengths |= set(given.length.tolist())
    assert (lengths == {0, 1, 2, 3}) == isinstance(model, AdaTape), "too few lengths to tell a threshold from none"


@each_file
def test_a_file_tells_what_it_holds(made: Any, name: str, to: str) -> None:
    _, path, model = made(name, to)
    if to == "onnx":
        file = onnx.load(path, load_external_data=False)
        about = {each.key: each.value for each in file.metadata_props}
        sizes = {each.name: each.type.tensor_type.shape.dim[0].dim_param for each in file.graph.input[:2]}
        assert set(sizes.values()) <= {"batch", "length"}
    else:
        about = json.loads(path.with_suffix(".json").read_text())
    adaptive = isinstance(model, AdaTape)
    first = "symbols" if name == "parity" else "images"
    assert json.loads(str(about["inputs"]).replace("'", '"')) == [first, *["slots", "threshold"] * adaptive]
    assert int(about["classes"]) == model.num_classes
    assert {"model", "adatape", "input_size"} | ({"steps", "threshold"} if adaptive else set()) <= set(about)
    assert [each.name for each in path.parent.iterdir() if each.suffix in (".partial", ".data")] == []


@pytest.mark.parametrize("to", SUFFIX)
def test_a_file_names_no_path_of_the_machine_that_wrote_it(made: Any, to: str) -> None:
    assert str(Path(__file__).parents[1]).encode() not in made("input", to).path.read_bytes()


def test_the_guides_python_opens_a_file(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the guide has it, but for a model of larger images."""
    page = (Path(__file__).parents[1] / "docs" / "export.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    shutil.copy(made("input", "onnx").path, tmp_path / "runs" / "digits" / "model.onnx")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(compile(code.replace("1, 8, 8", f"1, {SIZE}, {SIZE}"), "export.md", "exec"), scope)
    assert scope["answer"].logits.shape == (3, 10)
    assert scope["answer"].length.max() <= 2


def test_scores_are_summed_in_float64_in_onnx_too(made: Any) -> None:
    file = onnx.load(made("input", "onnx").path)
    wide = {each.name for each in file.graph.value_info if each.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE}
    assert sum(node.op_type == "MatMul" and set(node.input) <= wide for node in file.graph.node) == STEPS


def test_the_cost_falls_with_the_tape(made: Any) -> None:
    _, path, model = made("input", "torch")
    answer = open_export(path)

    def cost(length: int) -> int:
        with FlopCounterMode(display=False) as counter:
            answer(arguments(model, inputs_for("input", 2), length, 1.5))
        return counter.get_total_flops()

    costs = [cost(length) for length in range(STEPS + 1)]
    assert costs == sorted(set(costs))


def twins() -> AdaTape:
    """A model whose bank tokens come in pairs with equal scores but different values."""
    vit = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, num_classes=3, **{**VIT, "depth": 1})
    bank = LearnedBank(24, 32)
    model = lively(
        AdaTape(vit, bank, ReaderConfig(**{**READING, "steps": 2, "merge": 3}, norm=False), TapeJoin(layer=0))
    )  # type: ignore[arg-type]
    with torch.no_grad():
        bank.tokens[12:, :16] = bank.tokens[:12, :16]
    return model  # type: ignore[return-value]


def test_the_lowest_index_wins_a_tie_in_onnx_too(tmp_path: Path) -> None:
    model, x = twins(), torch.randn(6, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    model.set_budget(1, 1.0)
    export_model(model, x, "onnx", tmp_path / "model.onnx", {})
    left = model.reader.steps, model.reader.threshold, len(model.reader._forward_hooks)
    assert left == (1, 1.0, 0), "exporting changed the model"
    given = open_export(tmp_path / "model.onnx")(arguments(model, x, 2, 9.0))
    with pytest.warns(UserWarning, match="threshold"):
        wanted = expected(model, x, 2, 9.0)
    torch.testing.assert_close(given.logits, wanted.logits, rtol=0, atol=1e-5)
    with torch.no_grad():
        model.bank.tokens[:] = model.bank.tokens.roll(12, 0)
        assert (model(x) - wanted.logits).abs().max() > 1e-3, "the twins answer alike, so a tie shows nothing"


@pytest.mark.parametrize("to", SUFFIX)
def test_a_tape_longer_than_the_model_was_built_for_is_refused(made: Any, to: str) -> None:
    _, path, model = made("input", to)
    answer = open_export(path)
    with pytest.raises(Exception, match=r"(?i)index|idx|range|guard"):
        answer(arguments(model, inputs_for("input", 2), STEPS + 1, 1.5))


def test_an_existing_file_is_not_overwritten(made: Any, tmp_path: Path) -> None:
    folder, path, _ = made("plain", "onnx")
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"model\.onnx exists; choose another --out"):
        export_run(folder, "onnx")
    assert path.read_bytes() == before
    (tmp_path / "other.json").write_text("mine")
    with pytest.raises(FileExistsError, match=r"other\.json exists"):
        export_run(folder, "torch", tmp_path / "other.pt2")
    assert (tmp_path / "other.json").read_text() == "mine"


@pytest.mark.parametrize(
    ("to", "out", "message"),
    [
        ("tflite", None, "to is 'tflite'; it must be one of onnx, torch"),
        ("onnx", "model.pt2", r"model\.pt2; for onnx it must end in \.onnx"),
    ],
)
def test_an_unknown_format_or_name_is_refused(to: Any, out: str | None, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export_run(tmp_path, to, out and tmp_path / out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reader": "act"}, "reader is act; the last token of a tape has"),
        ({"choose": "random"}, "choose is 'random'; an exported graph is deterministic"),
    ],
)
def test_what_no_free_length_can_hold_is_refused_with_the_reason(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    settings = MODELS["input"]
    assert isinstance(settings, ImageModel)
    other = dataclasses.replace(settings, options={**settings.options, **options})
    with pytest.raises(ValueError, match=message):
        export_run(write_run(tmp_path / "run", other), "torch")
    assert not (tmp_path / "run" / "model.pt2").exists()


def test_a_model_that_draws_its_answer_is_refused(tmp_path: Path) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, **{**VIT, "depth": 1})
    with pytest.raises(ValueError, match="halting is 'sample'"):
        export_model(
            PonderNet(vit, 2, halting="sample"), torch.zeros(1, 3, SIZE, SIZE), "torch", tmp_path / "m.pt2", {}
        )


def test_the_command_says_how_far_the_file_is_from_the_model(made: Any, tmp_path: Path, capsys: Any) -> None:
    made_now = write_export(made("parity", "onnx").folder, "torch", tmp_path / "new" / "m.pt2")
    found = json.loads(made_now.to_json())
    assert found["bytes"] == Path(found["out"]).stat().st_size
    assert [each["length"] for each in found["checks"]] == [0, 1, 2, 2, 3]
    assert found["largest_difference"] <= 1e-5
    assert "m.pt2" in export_table(made_now).notes[-1]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("to", ["onnx", "torch"])
def test_a_file_that_cannot_be_run_is_removed_and_the_reason_is_one_line(
    made: Any, to: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        assert path.stat().st_size
        raise RuntimeError("no kernel\nfor this node")

    monkeypatch.setattr("adatape.export.open_export", fails)
    with pytest.raises(ValueError, match=r"cannot be run, so it was removed: no kernel") as raised:
        write_export(made("plain", "onnx").folder, to, tmp_path / f"m{SUFFIX[to]}")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
