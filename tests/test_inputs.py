"""Wrong input gives one line with file, field and limit, exit code 2, and leaves no files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from annotated_types import BaseMetadata
from fuzz_inputs import carried_out, make_case, wrong_with
from small_runs import LONG, contents, no_watch, tiny

from adatape import config, limits
from adatape.banks.index import IndexFacts
from adatape.config import Experiment, ImageModel, from_dict, to_dict
from adatape.data_config import Megapixel, Scenes
from adatape.serve.server import Server
from adatape.train.folder import absent_folders, load_config, removed_on_failure
from adatape.train.launch import Swept
from adatape.train.run import run
from adatape.train.sweep import with_fields
from adatape.train.trainer import Trainer

ROOT = Path(__file__).parents[1]
RECORDS = limits.Record.__subclasses__()
CASES = 1000 if LONG else 60
ENDLESS = range(CASES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Finished runs of images, of sequences, and of a ViT that was wrapped."""
    base, made = tmp_path_factory.mktemp("runs"), []
    vit = tiny("vit", steps=2, evaluate_every=2)
    tape = {"bank": "input", "patch": 2, "steps": 3, "threshold": 1.0, "merge": 2, "query_width": 16}
    assert isinstance(vit.model, ImageModel)
    wrapped = dataclasses.replace(vit, model=dataclasses.replace(vit.model, wrap=tape))
    few = {"steps": 2, "evaluate_every": 2}
    for n, experiment in enumerate((tiny("adatape", **few), tiny("parity adatape", **few), wrapped)):
        run(experiment, base / str(n), "cpu", no_watch)
        made.append(base / str(n))
    return made


def refused(*arguments: str) -> str:
    """The one line of a command that is refused."""
    ended = carried_out(list(arguments))
    assert ended.code == 2, ended
    [line] = ended.err.splitlines()
    return line


WRONG = [
    ("optimizer.ema", 2, "it must be less than 1"),
    ("optimizer.steps", -1, "it must be at least 0"),
    ("optimizer.clip", 0, "it must be more than 0"),
    ("optimizer.lr", 1e300, "it must be at most 1e+30"),
    ("optimizer.batch", 0, "it must be at least 1"),
    ("optimizer.warmup", 2.5, "it must be a whole number"),
    ("data.augment.smoothing", 2, "it must be less than 1"),
    ("data.augment.pad", -1, "it must be at least 0"),
    ("data.augment.randaug", -1, "it must be at least 0"),
    ("data.size", -8, "it must be at least 1"),
    ("data.classes", 0, "it must be at least 1"),
    ("data.validate_on", 1, "it must be less than 1"),
    ("engine.workers", -1, "it must be at least 0"),
    ("engine.compile", "all", "it must be true or false or blocks"),
    ("stop_at", 2, "it must be at most 1"),
    ("seed", -1, "it must be at least 0"),
    ("seed", True, "it must be a whole number"),
    ("loss", None, "it must be one of softmax, sigmoid"),
    ("engine", None, "it must be an object"),
    ("model.options", [], "it must be an object"),
    ("data.augment.area", [0.5, 2], "it must be at most 1"),
    ("data.augment.area", [1, 0.5], "the first must be at most the second"),
]


@pytest.mark.parametrize(("field", "value", "limit"), WRONG)
def test_a_value_beyond_its_limit_is_refused_everywhere(field: str, value: Any, limit: str, here: Path) -> None:
    sound = to_dict(tiny("adatape"))
    *path, last = field.split(".")
    place = sound
    for name in path:
        place = place[name]
    place[last] = value
    (here / "odd.json").write_text(json.dumps(sound))
    said = refused("train", "odd.json", "--out", "run", "--device", "cpu")
    assert said.startswith(f"adatape: odd.json: {field}")
    assert said.endswith(limit)
    said = refused("train", "digits", "--set", f"{field}={json.dumps(value)}", "--out", "run", "--device", "cpu")
    assert said.startswith(f"adatape: {field}")
    assert said.endswith(limit)
    assert sorted(path.name for path in here.iterdir()) == ["odd.json"]


def test_what_python_callers_make_is_checked_where_it_is_trained() -> None:
    experiment = tiny("adatape")
    senseless = dataclasses.replace(experiment, optimizer=dataclasses.replace(experiment.optimizer, ema=2.0))
    with pytest.raises(ValueError, match=r"optimizer\.ema is 2\.0; it must be less than 1"):
        Trainer(senseless)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_every_number_of_every_record_has_limits(record: type) -> None:
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        for each in _numbers(hint):
            assert any(isinstance(limit, BaseMetadata) for limit in getattr(each, "__metadata__", ())), name


def _numbers(hint: Any) -> list[Any]:
    """Where a hint takes a number: int or float, with its limits if it has any."""
    if typing.get_origin(hint) is typing.Annotated:
        return [hint] if hint.__origin__ in (int, float) else []
    return [hint] if hint in (int, float) else [each for part in typing.get_args(hint) for each in _numbers(part)]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_defaults_are_within_their_limits(record: type) -> None:
    needed = {
        config.Budget: {"steps": 1},
        Scenes: {"path": "scenes"},
        Megapixel: {"path": "mnist"},
        IndexFacts: {
            **{"rows": 1, "width": 1, "query_width": 1, "kind": "exact", "norm": "", "largest_key": 0.0},
            **{"first_row": 0, "values": "values.npy", "values_hash": "", "index_hash": ""},
        },
    }.get(record, {})
    if record is not Experiment:
        assert from_dict(record, json.loads(json.dumps(to_dict(record(**needed))))) == record(**needed)


def test_every_stored_config_is_read() -> None:
    stored = [*ROOT.glob("results/**/config.json"), *ROOT.glob("src/**/config.json")]
    assert stored
    for path in stored:
        experiment = load_config(path, trust=True)
        assert from_dict(Experiment, to_dict(experiment)) == experiment


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("null", "odd.json: Experiment is null; it must be an object"),
        ("[]", "odd.json: Experiment is []; it must be an object"),
        ('{"data": null}', "odd.json: Experiment lacks model, optimizer, recipe"),
        ('{"recipe": "x", "data": [], "model": {}, "optimizer": {}}', "odd.json: data is []; it must be an object"),
        ('{"recipe": "x", "data": {"lenght": 3}, "model": {}, "optimizer": {}}', "odd.json: data has no field lenght"),
        ("{", "odd.json is not JSON: EOF while parsing"),
        ("", "odd.json is not JSON"),
        ("[" * 5000, "odd.json is not JSON"),
    ],
)
def test_a_file_that_is_not_a_config_is_named(content: str, message: str, here: Path) -> None:
    (here / "odd.json").write_text(content)
    assert message in refused("train", "odd.json")
    shutil.copytree(here, here / "run")
    (here / "run" / "odd.json").rename(here / "run" / "config.json")
    for verb in ("eval", "figures", "export", "serve", "train"):
        assert message.replace("odd.json", "config.json") in refused(verb, "run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("null", "result.json contains null; it must be a JSON object"),
        ("[1]", "result.json contains [1]; it must be a JSON object"),
        ('{"accuracy": null}', "result.json: accuracy is null; it must be a number"),
        ('{"accuracy": [1]}', "result.json: accuracy is [1]; it must be a number"),
        ('{"accuracy": NaN}', "result.json: accuracy is nan; it must be at most 1"),
    ],
)
def test_a_file_that_is_not_a_result_is_named(content: str, message: str, runs: list[Path], here: Path) -> None:
    shutil.copytree(runs[0], here / "run")
    (here / "run" / "result.json").write_text(content)
    for command in ("train run", "release run --to released", "report run --out report.html"):
        assert message in refused(*command.split())
    assert [path.name for path in here.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("patch_size", 3, "model.options.patch_size is 3; it must divide data.size, 8"),
        ("patch_size", 0, "model.options.patch_size is 0; it must be at least 1"),
        ("num_heads", 0, "model.options.num_heads is 0; it must be at least 1"),
        ("depth", -1, "model.options.depth is -1; it must be at least 1"),
        ("depth", 10**9, "model.options.depth is 1000000000; it must be at most 1,000"),
        ("act_layer", "foo", "model.options.act_layer is 'foo'; adatape_tiny_patch16_224 does not take it: 'foo'"),
        ("norm_layer", 3, "model.options.norm_layer is 3; it must be text"),
        ("embed_dim", 63, "model.options.embed_dim is 63; adatape_tiny_patch16_224 does not take it: dim should be"),
        ("global_pool", "", "model.options.global_pool is ''; for classification"),
        ("num_classes", 3, "model.options.num_classes is 3; the data has 10, so leave it out"),
        ("threshold", math.nan, "model.options.threshold is nan; it must be more than 0"),
        ("bank_patch", 3, "bank patch is 3; it must divide the image size 8 × 8"),
    ],
)
def test_an_option_that_a_model_does_not_take_is_named(option: str, value: Any, message: str, here: Path) -> None:
    setting = f"model.options.{option}={json.dumps(value)}"
    assert message in refused("train", "digits", "--set", setting, "--device", "cpu")
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("cost resnet18", "model is resnet18; no cost formula for ResNet"),
        ("cost vit_tiny_patch16_224 --classes -1", "classes is -1; it must be at least 1"),
        ("cost adatape_tiny_patch16_224 --tape -1", "tape is -1; it must be at least 0"),
        ("figures nowhere --samples 0", "samples is 0; it must be at least 1"),
        ("eval nowhere --length -4", "length is -4; it must be at least 1"),
        ("serve --queue 0", "queue is 0; it must be at least 1"),
        ("demo --seed -1", "seed is -1; it must be at least 0"),
        ("sweep digits --over optimizer.ema=0.9,2", "optimizer.ema is 2; it must be less than 1"),
        ("train digits --set seed", "set is 'seed'; it must be field=value"),
        ("train digits --set seed=1,2", "seed is '1,2'; it must be a whole number"),
        ("train cifar10 --batch 0", "batch is 0; it must be at least 1"),
        ("train digits --epochs -1", "epochs is -1; it must be at least 0"),
        ("train images --path x --lr nan", "lr is nan; it must be at most 1e+30"),
        ("eval nowhere --device meta", "nowhere has no config.json"),
        ("train digits --device meta", "device is 'meta'; it must be auto, cpu, or cuda"),
        ("train parity --lenght 8", "Unrecognized options: --lenght, 8; perhaps --length was meant"),
        ("train parity --length x", "Error parsing --length"),
        ("trian", "Unrecognized options: trian; perhaps train was meant"),
        ("train digit", "digit is no recipe, no config.json and no run folder; perhaps digits was meant"),
        ("train runs/gone", "runs/gone is no recipe, no config.json and no run folder; --help"),
        ("finetune --path x", "finetune --path x; perhaps adatape train finetune was meant"),
        ("train digits --steps 3", "Unrecognized or misplaced options: --steps 3; --help"),
        ("budget run --within 1", "Unrecognized options: --within, 1; --help"),
        ("eval", "Missing from adatape eval: PATH a run folder"),
    ],
)
def test_options_of_verbs_and_recipes_have_limits_too(command: str, message: str, here: Path) -> None:
    assert message in refused(*command.split())
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "", "..", "a/b", "a" * 101, "x\0"])
def test_the_name_of_a_recipe_leads_nowhere_else(name: str, here: Path) -> None:
    inner = here / "a" / "b"
    inner.mkdir(parents=True)
    odd = {**to_dict(tiny("adatape", steps=1)), "recipe": name}
    (inner / "odd.json").write_text(json.dumps(odd))
    os.chdir(inner)
    assert "odd.json: recipe is" in refused("train", "odd.json", "--device", "cpu")
    assert "odd.json: recipe is" in refused("sweep", "odd.json", "--device", "cpu", "--over", "seed=0")
    assert contents(here).keys() == {"a/b/odd.json"}


WITHOUT_WEIGHTS = "{run} has no checkpoints/model.safetensors: the weights of this run are missing"


@pytest.mark.parametrize(
    "command",
    ["eval", "budget --gflops 1", "fewshot --on digits", "figures", "export", "serve --port 0", "release --to r"],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_run_without_weights_says_so_in_every_verb_alike(
    command: str, number: int, runs: list[Path], here: Path
) -> None:
    shutil.copytree(runs[number], here / "run")
    (here / "run" / "checkpoints" / "model.safetensors").unlink()
    verb, *options = command.split()
    assert f"adatape: {WITHOUT_WEIGHTS.format(run='run')}" in refused(verb, "run", *options)


@pytest.mark.parametrize("command", ["report run --out report.html", "train run --device cpu"])
def test_what_needs_no_weights_says_that_they_are_gone(command: str, runs: list[Path], here: Path) -> None:
    shutil.copytree(runs[0], here / "run")
    (here / "run" / "checkpoints" / "model.safetensors").unlink()
    ended = carried_out(command.split())
    assert ended.code == 0
    assert WITHOUT_WEIGHTS.format(run="run") in " ".join(ended.out.split())


def test_a_run_without_weights_whose_data_is_gone_says_the_same(runs: list[Path], here: Path) -> None:
    shutil.copytree(runs[0], here / "run")
    (here / "run" / "checkpoints" / "model.safetensors").unlink()
    settings = json.loads((here / "run" / "config.json").read_text())
    settings["data"] |= {"source": "folder", "path": "nowhere"}
    (here / "run" / "config.json").write_text(json.dumps(settings))
    assert WITHOUT_WEIGHTS.format(run="run") in refused("serve", "run", "--port", "0")


@pytest.mark.parametrize("out", ["runs/deep/run", "there"])
def test_what_fails_before_the_first_step_leaves_no_folder(
    out: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("the first batch cannot be read")

    (here / "there").mkdir()
    monkeypatch.setattr(Trainer, "train", fail)
    with pytest.raises(OSError, match="first batch"):
        run(tiny("adatape"), Path(out), "cpu", no_watch)
    assert [str(path.relative_to(here)) for path in here.rglob("*")] == ["there"]


def test_what_fails_after_a_step_keeps_its_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Trainer.take_step

    def second_fails(trainer: Trainer, *given: Any) -> Any:
        if trainer.step:
            raise OSError("the second batch cannot be read")
        return plain(trainer, *given)

    monkeypatch.setattr(Trainer, "take_step", second_fails)
    with pytest.raises(OSError, match="second batch"):
        run(tiny("adatape"), here / "run", "cpu", no_watch)
    assert (here / "run" / "metrics.jsonl").is_file()


def test_what_somebody_else_put_there_is_not_removed(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    absent = absent_folders(out)
    out.mkdir(parents=True)
    (tmp_path / "a" / "other").write_text("precious")
    with pytest.raises(OSError, match="full"), removed_on_failure(out, absent):
        raise OSError("full")
    assert contents(tmp_path) == {"a/other": b"precious"}
    assert not out.exists()


def test_json_has_null_for_what_is_not_finite() -> None:
    found = Swept([{"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1.5, "NaN")}], Path("out"))
    written = '{"rows": [{"a": null, "b": [null, {"c": null}], "d": [1.5, "NaN"]}], "out": "out"}'
    assert found.to_json() == written


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def broken_import(*_: Any, **__: Any) -> None:
    try:
        interrupt()
    except KeyboardInterrupt:
        raise ImportError("numpy cannot be imported") from None


@pytest.mark.parametrize("how", [interrupt, broken_import], ids=["interrupted", "interrupted in an import"])
@pytest.mark.parametrize("verb", ["eval", "figures", "report"])
def test_ctrl_c_is_one_line_and_exit_code_130(
    how: Callable[..., None], verb: str, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("train.launch.evaluate_run", "report.figures.write_figures", "report.page.write_report"):
        monkeypatch.setattr(f"adatape.{name}", how)
    ended = carried_out([verb, str(runs[0])])
    assert (ended.code, ended.err) == (130, "adatape: stopped\n")


@pytest.mark.parametrize("module", ["tyro", "torch"])
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str) -> None:
    program = f"""
import builtins, sys
plain = builtins.__import__
def found(name, *rest):
    if name == {module!r}:
        raise KeyboardInterrupt
    return plain(name, *rest)
builtins.__import__ = found
sys.argv = ["adatape", "eval", "nowhere"]
from adatape.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "adatape: stopped\n")


def test_memory_that_does_not_suffice_is_one_line(monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory\nand so on")

    monkeypatch.setattr(Trainer, "take_step", full)
    said = refused("train", "digits", "--out", "run", "--device", "cpu")
    assert "the memory does not suffice" in said
    assert not list(here.iterdir())


def test_help_does_not_wait_for_pydantic() -> None:
    program = (
        "import sys; from adatape.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: print({'pydantic', 'torch'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "set()"


def test_options_that_json_cannot_write_are_refused() -> None:
    with pytest.raises(ValueError, match="Experiment cannot be written as JSON"):
        with_fields(tiny("adatape"), {"model.options.act_layer": object()})


@pytest.mark.skipif(not hasattr(__import__("signal"), "SIGALRM"), reason="a case is given up by an alarm")
def test_whatever_is_typed_or_found_ends_in_success_or_in_one_line(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Server, "run", lambda *_, **__: None)  # it would answer until it is told to stop
    wrong, codes = [], {0: 0, 2: 0}
    for number in ENDLESS:
        place = tmp_path / str(number)
        place.mkdir()
        monkeypatch.chdir(place)
        case = make_case(number, runs, place)
        before = {str(path.relative_to(place)) for path in place.rglob("*")}
        try:
            ended = carried_out(case.arguments)
            why = wrong_with(case, ended, before, place)
            codes[ended.code] = codes.get(ended.code, 0) + 1
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            wrong.append(f"{case}\n    {why}")
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(place)
    if LONG:
        with capsys.disabled():
            print(f"\n{CASES} wrong inputs: {codes[0]} ended well, {codes[2]} in one line, {len(wrong)} otherwise")
    assert not wrong, "\n".join(wrong)
