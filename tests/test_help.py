"""What `--help` says: every option of every recipe with a text, a group and a default."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path

import pytest

import adatape
from adatape import cli
from adatape.recipes import RECIPES
from adatape.recipes.options import GROUPS, OF_RECIPES, OPTIONS, field_docstring, option_of

SOURCE = Path(adatape.__file__).parent
PARAMETERS = [(name, each) for name in RECIPES for each in inspect.signature(RECIPES[name]).parameters.values()]


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert not stop.value.code
    return capsys.readouterr().out


def boxes_of(shown: str) -> dict[str, str]:
    """The words of each group of options, without frames and line breaks."""
    lines = [line.strip(" │╭╮╰╯─") for line in shown.partition("\nexamples:")[0].splitlines()]
    boxes: dict[str, list[str]] = {}
    for line in lines:
        if title := re.fullmatch(r"(?:(\w+) )?options", line):
            boxes[title[1] or ""] = []
        elif boxes and line.strip("-"):
            boxes[list(boxes)[-1]].append(line)
    return {group: " ".join(" ".join(words).split()) for group, words in boxes.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_every_option_of_a_recipe_has_a_text_a_group_and_a_default(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of(capsys, "train", name)
    boxes = boxes_of(shown)
    assert list(boxes) == ["", *(group for group in GROUPS if group in boxes)]
    for parameter in inspect.signature(RECIPES[name]).parameters.values():
        option = option_of(name, parameter.name)
        flag, told = f"--{parameter.name.replace('_', '-')}", option.help()
        assert len(told) > 15
        box = boxes[option.group]
        assert told in box[box.index(flag) :]
        required = parameter.default is inspect.Parameter.empty
        default = option.none or "None" if parameter.default is None else shlex.quote(str(parameter.default))
        assert ("(required)" if required else f"(default: {default})") in box


@pytest.mark.parametrize(("name", "told"), [("replay", "a config.json"), ("resume", "a run folder")])
def test_what_is_replayed_or_resumed_has_a_text(name: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told in help_of(capsys, "train", name).partition("positional arguments")[2].partition("options")[0]


def test_steps_means_training_steps_in_every_recipe() -> None:
    for name, parameter in PARAMETERS:
        if parameter.name == "steps":
            experiment = RECIPES[name](**{"path": "x"} if name in ("images", "finetune", "scenes", "megapixel") else {})
            assert experiment.optimizer.steps == parameter.default
    assert "tape_steps" in inspect.signature(RECIPES["cifar10"]).parameters


def test_an_option_that_may_be_left_open_says_what_that_is() -> None:
    for name, parameter in PARAMETERS:
        option = option_of(name, parameter.name)
        assert parameter.default is not None or option.none or "None" in option.help(), (name, parameter.name)


def test_no_text_is_left_that_no_recipe_has() -> None:
    used = {(name, parameter.name) for name, parameter in PARAMETERS}
    assert set(OF_RECIPES) <= used
    assert set(OPTIONS) == {option for _, option in used}


@pytest.mark.parametrize("file", ["config", "data_config"])
def test_every_setting_has_a_docstring(file: str) -> None:
    for kind in ast.parse((SOURCE / f"{file}.py").read_text()).body:
        if not isinstance(kind, ast.ClassDef):
            continue
        for field in kind.body:
            if isinstance(field, ast.AnnAssign) and "ClassVar" not in ast.unparse(field.annotation):
                assert isinstance(field.target, ast.Name)
                assert field_docstring(f"{file}:{kind.name}.{field.target.id}")


@pytest.mark.parametrize("name", RECIPES)
def test_commands_and_notes_have_lines_of_their_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    below = help_of(capsys, "train", name).partition("\nexamples:\n")[2].splitlines()
    said = inspect.cleandoc(RECIPES[name].__doc__ or "").splitlines()[2:]
    commands = [line for line in said if line.startswith(("adatape ", "torchrun "))]
    assert [line.strip() for line in below if line.startswith("  ") and line[2] != " "] == commands
    assert " ".join(" ".join(below).split()) == " ".join(" ".join(said).split())
    assert all(len(line) <= 80 for line in below if line.startswith("    "))


def test_the_list_of_recipes_has_their_titles_only(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(capsys, "train")
    assert "examples:" not in shown
    assert "adatape train" not in shown.partition("subcommands")[2]


def test_a_former_name_of_an_option_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, option in (("train", ["--steps", "5"]), ("sweep", ["--steps=5"])):
        with pytest.raises(SystemExit) as stop:
            cli.main([verb, "cifar10", *option])
        assert stop.value.code == 2
        said = capsys.readouterr().err
        assert "--steps of cifar10 had two meanings; type --tape-steps for tape tokens, or --epochs" in said


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["--version"])
    assert capsys.readouterr().out == f"adatape {adatape.__version__}\n"
    assert "adatape --version" in help_of(capsys)
