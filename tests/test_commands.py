"""The command line, and the commands in the documents."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import in_the_long_suite

from adatape import cli
from adatape.data.augment import scaled
from adatape.data.images import haystack_of
from adatape.recipes.haystack import haystack
from adatape.recipes.parity import parity_small
from adatape.report import demo
from adatape.report.pictures.haystack import LOOKED_AT, typical
from adatape.report.pictures.tape import read
from adatape.train.folder import environment
from adatape.train.sweep import combinations, with_settings
from adatape.train.task import build_for
from adatape.validation import call_checked

ROOT = Path(__file__).parents[1]


def last_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_cost_prints_the_papers_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = "--bank learn --tape-ffn append+blocks --classes 18291 --json"
    cli.main(["cost", "adatape_base_patch16_224", *options.split()])
    said = last_json(capsys)
    assert said["parameters"] == 192_563_571
    assert said["gflops"] == pytest.approx(18.7606, abs=1e-4)
    assert sum(part["gflops"] for part in said["parts"].values()) == pytest.approx(said["gflops"])
    assert list(said["parts"]) == ["patch embedding", "bank", "reader", "blocks", "tape feed-forwards", "head"]


def test_a_shorter_tape_costs_less(capsys: pytest.CaptureFixture[str]) -> None:
    costs = []
    for tape in (0, 4, 10):
        cli.main(["cost", "adatape_tiny_patch16_224", "--tape", str(tape), "--json"])
        costs.append(last_json(capsys)["gflops"])
    assert costs == sorted(costs)
    assert costs[0] < costs[1] < costs[2]


def test_models_and_recipes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["models", "--json"])
    listed = last_json(capsys)
    assert listed["adatape_tiny_patch16_224 input"]["parameters"] == 6_386_152
    assert {row["adapts"] for row in listed.values()} == {"sequence", "tokens", "depth", "–"}
    cli.main(["models", "--paper", "--json"])
    assert last_json(capsys)["UViT-L/16"]["paper"]["gflops"] == 77.114
    cli.main(["recipes", "--json"])
    assert {"parity", "digits", "cifar10", "imagenet", "pretrain", "finetune"} <= set(last_json(capsys))


def test_a_run_folder_replays_to_the_same_weights(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(
        [*["train", "parity-small", "--length", "8", "--steps", "40", "--out", "runs/a", "--device", "cpu", "--json"]]
    )
    first = last_json(capsys)
    names = {path.name for path in (here / "runs/a").iterdir()}
    assert names == {"config.json", "env.json", "metrics.jsonl", "result.json", "checkpoints", "tensorboard"}
    assert first["steps"] == 40
    cli.main([*["train", "runs/a/config.json", "--out", "runs/b", "--device", "cpu", "--json"]])
    weights = Path("checkpoints/model.safetensors")
    assert (here / "runs/a" / weights).read_bytes() == (here / "runs/b" / weights).read_bytes()
    assert last_json(capsys)["accuracy"] == first["accuracy"]
    cli.main([*["eval", "runs/a", "--device", "cpu", "--json"]])
    assert last_json(capsys)["accuracy"] == first["accuracy"]
    cli.main([*["eval", "runs/a", "--length", "16", "--device", "cpu", "--json"]])
    assert last_json(capsys)["length_mean"] == pytest.approx(8, abs=1)


def test_a_run_records_no_commit_where_git_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert environment("cpu")["commit"] is None


def test_a_run_records_its_command_as_it_may_be_typed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for started in ("/usr/local/bin/adatape", "/usr/local/lib/adatape/__main__.py"):
        monkeypatch.setattr("sys.argv", [started, "train", "images", "--path", "my photos"])
        assert environment("cpu")["command"] == "adatape train images --path 'my photos'"


def test_a_sweep_runs_every_combination(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    over = ["--over", "reader.norm_scale=0.3,1.0", "--over", "seed=0,1"]
    options = "--length 8 --steps 2 --device cpu --json --out runs/s"
    cli.main(["sweep", "parity-small", *options.split(), *over])
    rows = last_json(capsys)["rows"]
    assert [(row["reader.norm_scale"], row["seed"]) for row in rows] == [(0.3, 0), (0.3, 1), (1.0, 0), (1.0, 1)]
    assert json.loads((here / "runs/s/sweep.json").read_text()) == rows
    config = json.loads((here / "runs/s/3/config.json").read_text())
    assert (config["model"]["reading"]["norm_scale"], config["seed"]) == (1.0, 1)


def test_a_run_that_has_learnt_stops_early(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([*["train", "parity-small", "--length", "8", "--steps", "3", "--out", "runs/a", "--device", "cpu"]])
    config = json.loads((here / "runs/a/config.json").read_text())
    config["optimizer"]["steps"], config["evaluate_every"], config["stop_at"] = 100, 1, 0.1
    (here / "easy.json").write_text(json.dumps(config))
    cli.main([*["train", "easy.json", "--out", "runs/b", "--device", "cpu", "--json"]])
    assert last_json(capsys)["steps"] == 3


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "cost adatape_bass_patch16_224",
            "adatape_bass_patch16_224 is not a model; near matches: adatape_base_patch16_224",
        ),
        ("sweep parity-small", "over is empty; say what to sweep, as in --over seed=0,1,2"),
        ("sweep parity-small --over seed", "over is 'seed'; it must be field=value,value"),
        (
            "sweep parity-small --over reader.stepps=1,2",
            "reader.stepps is not a field of this experiment; perhaps model.reading.steps was meant; it has",
        ),
        ("eval nowhere --device tpu9", "nowhere has no config.json"),
        ("train parity --device gpu", "device is 'gpu'; it must be auto, cpu, or cuda"),
        ("cost vit_tiny_patch16_224 --bank learn", "bank is 'learn'; vit_tiny_patch16_224 does not take it"),
        ("cost adatape_tiny_patch16_224 --tape 99", "tape is 99; it must be between 0 and 10"),
        ("cost adatape_tiny_patch16_224 --bank both", "bank is 'both'; it must be 'input', 'learn' or 'windows'"),
        ("eval nowhere", "nowhere has no config.json; it must be the folder of a finished run"),
        ("train missing.json", "missing.json"),
        ("train broken.json", "broken.json is not JSON"),
        ("train odd.json", "Experiment has no field sead; it has data, engine, evaluate_every"),
        ("train parity --length 5", "length is 5; it must be even and at least 4"),
        ("train parity-small --out full", "full exists and is not empty; choose another --out or remove it"),
        ("demo --out full", "full exists and is no earlier demo; choose another --out or remove it"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    (here / "full").mkdir()
    (here / "full" / "thesis.tex").write_text("precious")
    (here / "broken.json").write_text("{")
    (here / "odd.json").write_text('{"sead": 1}')
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert (here / "full" / "thesis.tex").read_text() == "precious"


def test_an_unknown_option_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "parity", "--lenght", "8"])
    assert stop.value.code == 2
    assert "--lenght" in capsys.readouterr().err


@in_the_long_suite
def test_the_demo_solves_parity_while_the_transformer_does_not(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["demo", "--only", "parity", "--json"])
    said = last_json(capsys)
    assert said["adatape"]["accuracy"] >= 0.99
    assert abs(said["transformer"]["accuracy"] - 0.5) < 0.04
    assert (here / "runs/demo/demo.png").stat().st_size > 20_000
    assert json.loads((here / "runs/demo/demo.json").read_text())["adatape"] == said["adatape"]


@in_the_long_suite
def test_the_demo_finds_digits_on_a_large_canvas(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["demo", "--only", "haystack", "--json"])
    said = last_json(capsys)["haystack"]
    every, needed, one = said["budgets"]
    assert every["accuracy"] >= 0.85
    assert one["accuracy"] >= 0.80
    assert said["rho"] >= 0.6
    assert needed["length_mean"] < 4
    assert (here / "runs/demo/haystack.png").stat().st_size > 20_000


@pytest.mark.usefixtures("few_canvases")
def test_a_demo_leaves_its_pictures_its_figures_and_its_runs(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "parity_small", functools.partial(parity_small, length=8, steps=2))
    monkeypatch.setattr(demo, "haystack", functools.partial(haystack, steps=2))
    cli.main(["demo", "--json"])
    said = last_json(capsys)
    for picture in ("demo.png", "haystack.png"):
        assert (here / "runs/demo" / picture).stat().st_size > 20_000
    assert json.loads((here / "runs/demo/demo.json").read_text())["adatape"] == said["adatape"]
    for run in ("adatape", "transformer", "haystack"):
        cli.main(["eval", f"runs/demo/{run}", "--device", "cpu", "--json"])
        assert last_json(capsys)["accuracy"] == said[run]["accuracy"]
    assert [budget["steps"] for budget in said["haystack"]["budgets"]] == [8, 8, 1]
    cli.main(["demo", "--only", "parity", "--json"])  # in the place of the first
    assert "haystack" not in last_json(capsys)


@pytest.mark.usefixtures("few_canvases")
def test_the_demo_draws_canvases_whose_tapes_have_the_usual_length() -> None:
    torch.manual_seed(0)
    canvases, model = haystack_of(train=False), build_for(haystack())
    x = scaled(torch.from_numpy(canvases.images).permute(0, 3, 1, 2))
    model.set_budget(threshold=float(read(model, x).weight.median()))  # some canvases read more than others
    lengths = read(model, x).length
    assert len(set(lengths.tolist())) > 1
    for count in range(1, 5):
        alike = lengths[torch.from_numpy(canvases.digits) == count][:LOOKED_AT]
        chosen = typical(model, canvases, count)
        assert canvases.digits[chosen] == count
        assert lengths[chosen] == alike.median()


def readme_blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.usefixtures("here")
def test_the_readmes_python_runs() -> None:
    blocks = readme_blocks("python")
    assert blocks
    scope: dict = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)


DOCUMENTS = [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEAST_COMMANDS = {"README.md": 12, "start.md": 12, "training.md": 8, "results.md": 8, "paper.md": 15}
# Words in capitals stand for what a reader has; the documents say `RUN` where any run would do.
STANDS_FOR = {"RUN": "runs/a", "NAME": "digits", "RECIPE": "digits", "S": "order", "N": "16", "L": "0.1", "B": "1"}
STANDS_FOR |= {"M": "inference", "MODEL": "adatape_tiny_patch16_224", "MODELS": "adatape_tiny_patch16_224"}


def commands_of(document: Path) -> list[str]:
    """Every command in a block of shell, and those between backticks that have more than a verb."""
    text = document.read_text()
    blocks = re.findall(r"^```(?:bash|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    prose = re.findall(r"`(adatape [^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))
    found = [re.sub(r"^(torchrun .*? -m )?(?=adatape )", "", line) for line in [*lines, *prose]]
    return [line for line in found if line.startswith("adatape ")]


def words_of(line: str) -> list[str]:
    return [STANDS_FOR.get(word, word) for word in shlex.split(line, comments=True)[1:]]


@pytest.fixture
def called(here: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Records the options of each verb call without running it; a recipe's experiment is built."""
    calls: list[dict[str, Any]] = []

    def noted(verb: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(verb)
        def note(*args: Any, **kwargs: Any) -> None:
            given = inspect.signature(verb).bind(*args, **kwargs).arguments
            recipe = given.get("what")
            if callable(recipe):
                experiment = call_checked(recipe.func, *recipe.args, **recipe.keywords)
                combinations(with_settings(experiment, given.get("set", ())), list(given.get("over", ())))
            calls.append(given)

        return note

    for name, verb in list(cli.VERBS.items()):
        monkeypatch.setitem(cli.VERBS, name, noted(verb))
    for folder in ("runs/a", "runs/x"):
        (here / folder).mkdir(parents=True)
    return calls


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_documents_commands_are_ones_that_the_command_line_takes(
    document: Path, called: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = commands_of(document)
    assert len(lines) >= {"README.md": 12, "start.md": 12, "training.md": 8, "results.md": 8, "paper.md": 15}.get(
        document.name, 0
    )
    for line in lines:
        words, count = words_of(line), len(called)
        with contextlib.suppress(SystemExit):  # --help ends so, and a refusal, which says why
            cli.main([*words[:1], "--help"] if "…" in words or len(words) == 1 else words)
        said = capsys.readouterr()
        spoken_of = "Missing from" in said.err and not any(word.startswith("-") for word in words)
        assert len(called) > count or said.out or spoken_of, f"{line}: {said.err}"


CHEAP = {line for document in DOCUMENTS for line in commands_of(document) if re.match("adatape (cost .|recipes)", line)}


@pytest.mark.parametrize("line", sorted({" ".join(["adatape", *words_of(line)]) for line in CHEAP}))
def test_the_documents_cheap_commands_run(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(words_of(line))
    assert len(capsys.readouterr().out.splitlines()) > 3


@pytest.mark.parametrize(
    "line",
    [
        "adatape cost adatape_tiny_patch16_224 --nonsense 4",
        "adatape cost adatape_tiny_patch16_224 --tape many",
        "adatape cost adatape_tiny_patch16_224 --classes -1",
        "adatape train parity --lenght 8",
        "adatape train digits --set optimizer.lrr=1",
        "adatape sweep parity-small --over reader.stepps=1,2",
        "adatape evaluate runs/a",
    ],
)
def test_a_command_that_the_command_line_would_refuse_does_not_pass(line: str, called: list[dict[str, Any]]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(words_of(line))
    assert stop.value.code == 2
    assert not called


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("digits") / "run"
    fields = ["--set", "model.options.depth=2", "--set", "optimizer.steps=30", "--set", "evaluate_every=15"]
    cli.main(["train", "digits", "--out", str(folder), "--device", "cpu", *fields])
    return folder


def test_a_run_on_images_is_scored_with_length_and_cost(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["eval", str(digits_run), "--device", "cpu", "--json"])
    said = last_json(capsys)
    assert said["accuracy"] == json.loads((digits_run / "result.json").read_text())["accuracy"]
    assert 0 < said["gflops_mean"] <= said["gflops_p95"] <= said["gflops"]
    assert said["sequence_mean"] == pytest.approx(4 + said["length_mean"])
    assert said["sequence_max"] <= 8
    assert sum(said["lengths"]) == 360


def test_metrics_have_throughput_length_and_a_histogram(digits_run: Path) -> None:
    lines = [json.loads(line) for line in (digits_run / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    scored = [line for line in lines if line["kind"] == "validation"]
    wanted = {"step", "epoch", "loss", "accuracy", "length_mean", "length_sd", "samples_per_second", "lr"}
    assert wanted <= set(trained[0])
    assert [line["step"] for line in scored] == [15, 30]
    assert sum(scored[0]["lengths"]) == 360
    assert list((digits_run / "tensorboard").iterdir())


def test_few_shot_accuracy_of_a_run(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--on digits --shots 1,5 --seeds 0,1 --device cpu --json"
    cli.main(["fewshot", str(digits_run), *options.split()])
    said = last_json(capsys)
    assert [(row["shots"], row["seed"]) for row in said["rows"]] == [(1, 0), (1, 1), (5, 0), (5, 1)]
    assert said["summary"][1]["mean"] > 0.3


def test_a_release_loads_with_timm_and_answers_alike(digits_run: Path, tmp_path: Path) -> None:
    import timm
    import torch

    from adatape.train.folder import load_run

    cli.main(["release", str(digits_run), "--to", str(tmp_path / "released")])
    model = timm.create_model(f"local-dir:{tmp_path / 'released'}", pretrained=True).eval()
    x = torch.rand(4, 1, 8, 8) * 2 - 1
    assert torch.equal(model(x), load_run(digits_run)[1].eval()(x))
    assert "accuracy" in (tmp_path / "released" / "README.md").read_text()


def test_a_folder_goes_on_and_a_finished_one_says_its_result(
    digits_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (digits_run / "checkpoints" / "model.safetensors").read_bytes()
    cli.main(["train", str(digits_run), "--device", "cpu", "--json"])
    assert last_json(capsys)["steps"] == 30
    assert (digits_run / "checkpoints" / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train cifar10 --path nowhere", "nowhere"),
        (
            "train digits --set optimizer.lrr=1",
            "not a field of this experiment; perhaps optimizer.lr was meant; it has",
        ),
        ("train digits --set optimzer.lr=1", "perhaps optimizer.lr was meant"),
        ("train digits --set optimizer.lr=fast", "lr is 'fast'; it must be a number"),
        ("train digits --set model.name=vit_huge", "model.name is 'vit_huge'; `adatape models` lists ours"),
        ("train digits --set model.options.bank=both", "bank is 'both'; it must be 'input'"),
        ("train digits --set model.options.stepps=4", "model.options.stepps is 4; stepps is not a permitted option"),
        ("train digits --set engine.accumulate=7", "batch is 64; with 1 processes and accumulate 7"),
        ("train digits --set loss=hinge", "loss is 'hinge'; it must be one of softmax, sigmoid"),
        ("fewshot nowhere --on digits", "nowhere has no config.json"),
        ("release nowhere --to x", "nowhere has no config.json"),
    ],
)
def test_a_mistake_in_training_is_one_clear_line_and_leaves_nothing(
    here: Path, capsys: pytest.CaptureFixture[str], command: str, message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(command.split())
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not list(here.iterdir())


def test_few_shot_refuses_what_it_cannot_read(digits_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for on, shots, message in (
        ("nothing-here", "1", "nothing-here is no folder"),
        ("digits", "one", "shots is 'one'; it must be numbers"),
        ("digits", "5000", "5000"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["fewshot", str(digits_run), "--on", on, "--shots", shots, "--device", "cpu"])
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["recipes"], ["sweep", "--help"]], ids=" ".join)
def test_whoever_reads_may_stop_reading(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, "-m", "adatape", *arguments], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert run.returncode == 1
    assert run.stderr == ""


def test_a_warning_of_ours_is_one_line_and_another_names_its_place() -> None:
    code = """
        import sys, warnings
        from adatape.__main__ import main
        from adatape.reader import warn_beyond
        sys.argv = ["adatape", "recipes"]
        main()
        warn_beyond("steps", 9, 4, stacklevel=1)
        warnings.warn("theirs")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    ours, theirs = run.stderr.splitlines()[:2]
    assert ours == "adatape: warning: steps is 9; the model was built, and perhaps trained, for at most 4"
    assert "UserWarning: theirs" in theirs
