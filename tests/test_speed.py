"""Models are timed in turn, a failing one does not stop the others, and results are stored row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch

from adatape import cli
from adatape.config import Bench
from adatape.evaluate import speed
from adatape.evaluate.bench import groups_of, merged, read_rows, reference_of, spec_of
from adatape.evaluate.speed import TimedModel, compare, interleaved, ratios, repeats_within, rotated, spread
from adatape.evaluate.timed_models import (
    Mode,
    TimingSettings,
    build_timed,
    disable_halting,
    feeder,
    input_shape,
    loss_of,
)
from adatape.report.bench import write_bench
from adatape.report.pictures.speed import draw_speed
from adatape.report.tables import bench_table

VIT = "vit_tiny_patch16_224:img_size=32,depth=1"
TAPE = "adatape_tiny_patch16_224:img_size=32,depth=2,bank_patch=4"
SMALL = {"img_size": 32, "bank_patch": 4, "depth": 2}
OTHERS = ["ut", "u2t", "uvit", "avit", "ponder", "plainvit", "deit"]


def nothing() -> None:
    pass


class Clock:
    """Replaces the module `time`; it advances only when a test does so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds

    def taking(self, seconds: float) -> Callable[[], TimedModel]:
        return lambda: TimedModel(lambda: self.passes(seconds))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(speed, "time", clock)
    return clock


def row(**given: object) -> dict:
    usual = {"model": "a", "options": {}, "reference": "b", "mode": "train", "batch": 1, "hardware": "x", "data": False}
    figures = {"ratio": 0.9, "ratio_min": 0.8, "ratio_max": 1.0, "flops_ratio": 0.95, "error": None}
    return usual | figures | given


def test_a_side_that_takes_twice_as_long_is_half_as_fast(clock: Clock) -> None:
    sides = {"once": clock.taking(0.01), "twice": clock.taking(0.02)}
    found = compare(sides, rounds=5, seconds=0.02, synchronize=nothing)
    assert [len(outcome.seconds) for outcome in found.values()] == [5, 5]
    assert ratios(found["once"].seconds, found["twice"].seconds).median == pytest.approx(0.5)


def test_a_ratio_compares_times_of_one_round_and_not_medians() -> None:
    slow_machine_in_round_two = ratios([1.0, 10.0, 1.0], [2.0, 20.0, 2.0])
    assert slow_machine_in_round_two == spread([0.5])
    assert ratios([1.0, 2.0, 6.0], [1.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)


def test_every_side_is_first_in_its_turn() -> None:
    called: list[str] = []
    sides = {name: lambda name=name: called.append(name) for name in "abc"}
    interleaved(sides, rounds=3, repeats=dict.fromkeys("abc", 1), synchronize=nothing)
    assert "".join(called) == "abcbcacab"
    assert rotated([], 3) == []


def test_the_clock_waits_for_the_device_before_and_after_a_turn() -> None:
    called: list[str] = []
    interleaved({"side": lambda: called.append("call")}, 2, {"side": 3}, lambda: called.append("wait"))
    assert called == ["wait", "call", "call", "call", "wait"] * 2


def test_repeats_fill_the_time_and_are_at_least_one(clock: Clock) -> None:
    assert repeats_within(lambda: clock.passes(0.01), 0.1, nothing) == 10
    assert repeats_within(lambda: clock.passes(0.01), 0.001, nothing) == 1


def test_a_side_that_cannot_be_built_leaves_the_others(clock: Clock) -> None:
    def broken() -> TimedModel:
        raise torch.OutOfMemoryError("no room\nfor 9 GiB")

    found = compare({"broken": broken, "good": clock.taking(0.001)}, 2, 0.002, nothing)
    assert found["broken"].error == "OutOfMemoryError: no room"
    assert found["broken"].seconds == []
    assert (found["good"].error, len(found["good"].seconds)) == (None, 2)


def test_a_side_that_fails_while_it_is_timed_leaves_the_others(clock: Clock) -> None:
    left = iter(range(6))
    late = compare({"late": lambda: TimedModel(lambda: next(left)), "good": clock.taking(0.001)}, 9, 0.002, nothing)
    assert late["late"].error == "StopIteration: without a word"
    assert (late["late"].seconds, len(late["good"].seconds)) == ([], 9)


def test_warm_up_happens_before_anything_is_timed(clock: Clock) -> None:
    built: list[str] = []

    def slow(name: str) -> TimedModel:
        clock.passes(0.3)
        built.append(name)
        return TimedModel(lambda: clock.passes(0.01))

    found = compare({name: lambda name=name: slow(name) for name in "ab"}, 2, 1e-9, nothing)
    assert built == ["a", "b"]
    assert found["a"].seconds + found["b"].seconds == pytest.approx([0.01] * 4)


@pytest.mark.parametrize("bank", ["input", "learn"])
def test_a_full_tape_has_every_token_in_every_row(bank: str) -> None:
    model = timm.create_model("adatape_tiny_patch16_224", bank=bank, norm_scale=3.0, **SMALL).eval()
    x = torch.randn(4, 3, 32, 32)
    assert model(x, output=True).tape.length.min() < model.reader.steps
    disable_halting(model)
    assert model(x, output=True).tape.length.tolist() == [model.reader.steps] * 4


@pytest.mark.parametrize(("name", "steps"), [("ut", 12), ("uvit", 3), ("avit", 12), ("ponder", 12)])
def test_nothing_halts_where_depth_adapts(name: str, steps: int) -> None:
    model = timm.create_model(f"{name}_tiny_patch16_224", img_size=32).eval()
    disable_halting(model)
    with torch.no_grad():
        output = model(torch.randn(2, 3, 32, 32), output=True)
    assert output.logits.isfinite().all()
    weight = output.steps.weight.flatten(2).mean(2) if output.steps.weight.dim() == 3 else output.steps.weight
    assert weight.shape[1] == steps
    assert weight[:, -1].tolist() == pytest.approx([1.0, 1.0], abs=1e-6)


@pytest.mark.parametrize("mode", ["train", "inference"])
@pytest.mark.parametrize("data", [False, True])
def test_a_side_runs_with_and_without_data(mode: Mode, data: bool) -> None:
    timing = TimingSettings(mode, batch=2, data=data)
    x, *rest = feeder((3, 16, 16), 10, timing)()
    assert (x.shape, x.dtype) == ((2, 3, 16, 16), torch.float32)
    assert [each.shape for each in rest] == ([(2,), (2,)] if mode == "train" else [])
    build_timed("adatape_tiny_patch16_224", SMALL, timing).call()


def test_a_training_step_moves_the_weights_and_inference_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.nn.Module] = []
    create = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda *a, **k: made.append(create(*a, **k)) or made[-1])
    for mode, moves in (("train", True), ("inference", False)):
        side = build_timed("vit_tiny_patch16_224", {"img_size": 32, "depth": 1}, TimingSettings(mode, 2))
        before = made[-1].head.weight.detach().clone()
        side.call()
        assert (not torch.equal(before, made[-1].head.weight)) is moves
        assert made[-1].training is moves
        assert made[-1].head.weight.grad is None


def test_the_length_loss_counts_only_where_there_is_one() -> None:
    x, target = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    model = timm.create_model("adatape_tiny_patch16_224", **SMALL).eval()
    with torch.no_grad():
        given = model(x, output=True)
    longer = loss_of(model, given, target) - loss_of(model, given.logits, target)
    assert float(longer) == pytest.approx(0.01 * float(given.ponder.mean()), rel=1e-3)
    assert longer > 0


def test_models_of_any_image_size_are_fed_what_they_take() -> None:
    assert input_shape(timm.create_model("vit_tiny_patch16_224", img_size=48, in_chans=1)) == (1, 48, 48)
    assert input_shape(timm.create_model("adatape_tiny_patch16_224", **SMALL)) == (3, 32, 32)
    assert input_shape(timm.create_model("resnet10t")) == (3, 176, 176)


@pytest.mark.parametrize(
    ("model", "reference"),
    [
        ("adatape_base_patch16_224:bank=learn", "vit_base_patch16_224"),
        ("adatape_tiny_patch32_224:img_size=64,steps=4", "vit_tiny_patch32_224:img_size=64"),
        ("vit3ffn_base_patch28_224", "vit_base_patch28_224"),
        ("deit_small_patch16_224", "vit_small_patch16_224"),
        ("vit_base_patch16_clip_224:depth=2", "vit_base_patch16_224:depth=2"),
    ],
)
def test_the_reference_is_the_vit_of_the_same_size_and_patch(model: str, reference: str) -> None:
    assert str(reference_of(spec_of(model), None)) == reference
    assert str(reference_of(spec_of(model), "vit_tiny_patch16_224")) == "vit_tiny_patch16_224"


def test_models_with_one_reference_are_timed_together() -> None:
    models = (TAPE, f"{TAPE},bank=learn", "deit_small_patch16_224")
    groups = groups_of(models, Bench(batch=(1, 4), mode=("train",)), "cpu")
    as_built = [group for group in groups if not group.timing.full_tape]
    assert [(group.timing.batch, len(group.models)) for group in as_built] == [(1, 2), (1, 1), (4, 2), (4, 1)]
    assert {(group.timing.precision, group.timing.compile, group.timing.graphs) for group in groups} == {
        ("fp32", "none", False)
    }


def test_models_are_timed_as_they_are_built_and_then_with_full_tapes() -> None:
    models = (TAPE, "plainvit_tiny_patch16_224", "deit_tiny_patch16_224")
    groups = groups_of(models, Bench("vit_tiny_patch16_224", batch=(1,)), "cuda")
    assert [(group.timing.mode, group.timing.full_tape, len(group.models)) for group in groups] == [
        *[("train", False, 3), ("train", True, 1), ("inference", False, 3), ("inference", True, 1)]
    ]
    assert [group.timing.graphs for group in groups] == [False, False, False, True]
    [only] = groups_of((TAPE,), Bench(batch=(1,), mode=("inference",), full_tape=False), "cpu")
    assert not only.timing.full_tape


def test_on_a_gpu_small_inference_with_full_tapes_is_replayed_as_a_graph() -> None:
    groups = [each for each in groups_of((TAPE,), Bench(batch=(8, 64)), "cuda") if each.timing.full_tape]
    chosen = {(group.timing.mode, group.timing.batch): group.timing for group in groups}
    assert [at for at, timing in chosen.items() if timing.graphs] == [("inference", 8)]
    assert {(timing.precision, timing.compile) for timing in chosen.values()} == {("bf16", "default")}


def test_merged_results_replace_the_same_row_and_keep_the_others() -> None:
    before = [row(), row(batch=8), row(options={"bank": "learn"})]
    after = merged(before, [row(batch=8, ratio=1.0), row(mode="inference")])
    assert [(each["mode"], each["batch"], each["ratio"]) for each in after] == [
        ("train", 1, 0.9),
        ("train", 8, 1.0),
        ("train", 1, 0.9),
        ("inference", 1, 0.9),
    ]


def test_a_table_can_be_measured_in_parts_and_drawn_from_its_file(tmp_path: Path) -> None:
    out, plot = tmp_path / "new" / "speed.json", tmp_path / "speed.png"
    for batch in (1, 2):
        asked = Bench(batch=(batch,), mode=("inference",), device="cpu", rounds=1, seconds=0.001)
        write_bench((TAPE,), asked, out)
    shown = write_bench((TAPE,), Bench(device="cpu", rounds=0), out, plot)
    written = json.loads(out.read_text())
    assert set(written) == {"environment", "settings", "rows"}
    assert [(each["batch"], each["full_tape"]) for each in written["rows"]] == [
        *[(1, False), (1, True), (2, False), (2, True)]
    ]
    assert {"hardware", "torch", "commit", "date"} <= set(written["rows"][0])
    assert plot.stat().st_size > 10_000
    modes = ("inference", "inference, full tape")
    assert [row[1:3] for row in bench_table(shown).rows] == [(mode, batch) for batch in "12" for mode in modes]


def test_a_picture_needs_both_ratios(tmp_path: Path) -> None:
    assert draw_speed(tmp_path / "none.png", [row(ratio=None), row(flops_ratio=None)]) is None
    assert draw_speed(tmp_path / "some.png", [row(), row(mode="inference"), row(data=True)]) is not None


def test_the_verb_measures_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--device cpu --batch 1 --rounds 2 --seconds 0.001 --json"
    cli.main(["bench", VIT, TAPE, *options.split()])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(each["model"][:3], each["mode"]) for each in said["rows"]] == [
        *[("vit", "train"), ("ada", "train"), ("ada", "train")],
        *[("vit", "inference"), ("ada", "inference"), ("ada", "inference")],
    ]
    assert [each["full_tape"] for each in said["rows"]] == [False, False, True] * 2
    for each in said["rows"]:
        assert each["error"] is None
        assert each["ms_min"] <= each["ms"] <= each["ms_max"]
        assert each["ratio_min"] <= each["ratio"] <= each["ratio_max"]
        assert each["images_per_second"] == pytest.approx(1e3 / each["ms"])
    assert said["rows"][0]["flops_ratio"] == 1
    assert said["rows"][1]["flops_ratio"] < 1
    assert said["environment"]["device"] == "cpu"


def test_every_other_system_of_the_paper_can_be_named() -> None:
    names = tuple(f"{name}_tiny_patch16_224:img_size=32" for name in OTHERS)
    asked = Bench(batch=(1,), mode=("train",), device="cpu", rounds=1, seconds=0.001, full_tape=False)
    rows = write_bench(names, asked).rows
    assert [(each["model"], each["error"]) for each in rows if each["error"] or not each["ratio"]] == []
    assert len(rows) == len(OTHERS)


@pytest.mark.parametrize("failing", ["adatape_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_what_fails_is_a_row_with_its_error(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(name: str, options: dict, timing: TimingSettings) -> TimedModel:
        if name == failing:
            raise torch.OutOfMemoryError("no room")
        return build_timed(name, options, timing)

    monkeypatch.setattr("adatape.evaluate.bench.build_timed", built)
    asked = Bench(VIT, (1,), ("train",), "cpu", rounds=1, seconds=0.001, full_tape=False)
    found = write_bench((TAPE, "deit_tiny_patch16_224"), asked)
    tape, deit = found.rows
    assert any("OutOfMemoryError: no room" in note for note in bench_table(found).notes)
    assert "OutOfMemoryError: no room" in tape["error"]
    if failing == "vit_tiny_patch16_224":  # the reference: times are known, ratios are not
        assert deit["error"] == f"{VIT}: OutOfMemoryError: no room"
        assert deit["ms"] > 0
        assert deit["ratio"] is None
    else:
        assert deit["error"] is None
        assert (tape["ms"], tape["ratio"]) == (None, None)
        assert deit["ratio"] > 0


def test_a_model_without_a_formula_has_a_time_and_no_flops() -> None:
    asked = Bench("resnet10t", (1,), ("inference",), "cpu", rounds=1, seconds=0.001)
    [only] = write_bench(("resnet10t",), asked).rows
    assert (only["gflops"], only["flops_ratio"], only["error"]) == (None, None, None)
    assert only["ratio"] > 0


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("bench adatape_bass_patch16_224", "adatape_bass_patch16_224 is not a model; near matches: adatape_base"),
        ("bench vit_tiny_patch16_224:bank=learn", "bank is 'learn'; vit_tiny_patch16_224 does not take it"),
        ("bench adatape_tiny_patch16_224:bank", "its options must read name:option=value,option=value"),
        ("bench resnet10t", "resnet10t does not tell which ViT is its like; name one with --against"),
        ("bench --device cpu --rounds -1", "rounds is -1; it must be at least 0"),
        ("bench --device cpu --batch 4 0", "batch.1 is 0; it must be at least 1"),
        ("bench --device cpu --seconds 0", "seconds is 0.0; it must be more than 0"),
        ("bench --device cpu --graphs on", "graphs is 'on' and device 'cpu'; CUDA graphs need a CUDA GPU"),
        ("bench --device tpu9", "device is 'tpu9'; it must be auto, cpu, or cuda"),
        ("bench --device cpu --out thesis.tex", "thesis.tex exists and is no results file of adatape bench"),
    ],
)
def test_a_mistake_is_one_clear_line(
    command: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("thesis.tex").write_text("precious")
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in said
    assert said.count("\n") == 1
    assert Path("thesis.tex").read_text() == "precious"


def test_a_file_that_is_not_there_holds_no_rows(tmp_path: Path) -> None:
    assert read_rows(tmp_path / "none.json") == read_rows(None) == []
