"""`pip install adatape` is enough for the library; verbs that need an extra name it."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import adatape
from adatape import cli
from adatape.config import ReaderConfig
from adatape.extras import EXTRA_OF, how_to_install
from adatape.models.build import WrapOptions
from adatape.models.join import TapeJoin

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HOME = PROJECT["urls"]["Homepage"]
MODULE_OF = {"scikit-learn": "sklearn", "faiss-cpu": "faiss"}  # where pip and Python call a library by different names
OWN_USE = """
import adatape
assert not {"torch", "timm"} & set(sys.modules), "importing the package takes seconds"
from adatape import *
import timm, torch
import adatape.models
vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)
model = adatape.wrap(vit, bank="input", patch=2).eval()
assert model(torch.randn(2, 3, 32, 32), output=True).tape.length.min() > 0
model = timm.create_model("adatape_tiny_patch16_224", img_size=32, bank_patch=4, depth=2)
model(torch.randn(2, 3, 32, 32)).sum().backward()
assert adatape.read_tape(torch.randn(2, 64), torch.randn(30, 64), steps=3, threshold=2.0).length.min() > 0
"""


def without(libraries: list[str], code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python as if some libraries were not installed: None in sys.modules makes their import fail."""
    hidden = f"import sys\nsys.modules.update(dict.fromkeys({libraries}))\n{code}"
    quiet = {**os.environ, "PYTHONWARNINGS": "ignore"}
    return subprocess.run([sys.executable, "-c", hidden, *arguments], capture_output=True, text=True, env=quiet)


def names(requirements: list[str]) -> set[str]:
    found = {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements} - {"adatape"}
    return {MODULE_OF.get(name, name.replace("-", "_")) for name in found}


def test_importing_is_cheap_and_the_library_needs_no_extra() -> None:
    done = without(list(EXTRA_OF), OWN_USE)
    assert done.returncode == 0, done.stderr


def test_the_command_without_its_extra_says_the_one_line_that_installs_it() -> None:
    done = without(["tyro"], "from adatape.__main__ import main; main()", "models")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "adatape: tyro is not installed; `pip install 'adatape[cli]'` installs it\n"


@pytest.mark.parametrize(
    ("library", "module", "arguments", "extra"),
    [
        ("fastapi", "adatape.serve.server", "serve", "serve"),
        ("matplotlib", "adatape.report.figures", "figures run", "plot"),
        ("rich", "adatape.report.terminal", "recipes", "cli"),
        ("pydantic", "adatape.evaluate.recipes", "recipes", "cli"),
    ],
)
def test_a_verb_without_its_extra_says_the_one_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    library: str,
    module: str,
    arguments: str,
    extra: str,
) -> None:
    parts = [name for name in sys.modules if name.startswith(f"{library}.")]
    for name in (library, *parts):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments.split())
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        f"adatape: {library} is not installed; `pip install 'adatape[{extra}]'` installs it\n"
    )


def test_a_library_of_no_extra_is_an_error_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adatape.evaluate.recipes", None)
    with pytest.raises(ModuleNotFoundError, match=r"adatape\.evaluate\.recipes"):
        cli.main(["recipes"])
    assert how_to_install("torch.nn") is None
    assert how_to_install(None) is None


def test_every_extra_brings_the_libraries_that_the_messages_say() -> None:
    extras = {name: names(needs) for name, needs in PROJECT["optional-dependencies"].items()}
    for library, extra in EXTRA_OF.items():
        brought = extras[extra] | ({"starlette"} if "fastapi" in extras[extra] else set())
        assert library in brought, f"adatape[{extra}] does not bring {library}"
    assert not names(PROJECT["dependencies"]) & set(EXTRA_OF)
    [everything] = PROJECT["optional-dependencies"]["all"]
    assert set(re.findall(r"\w+", everything)) == {"adatape", *extras} - {"all", "docs", "dev"}


def test_a_link_of_the_readme_works_wherever_the_readme_is_shown() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 20
    raw = HOME.replace("github.com", "raw.githubusercontent.com") + "/main/"
    for link in links:
        assert link.startswith("https://"), f"{link} leads nowhere outside the repository"
        path = re.sub(rf"^({re.escape(HOME)}/blob/main/|{re.escape(raw)})", "", link).partition("#")[0]
        assert path.startswith("https://") or (ROOT / path).is_file(), link


def test_the_public_names_are_those_that_resolve() -> None:
    assert {*adatape.__all__} == {*adatape._HOMES, "__version__"}


def test_a_type_checker_knows_the_public_names(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    lines = [
        "import adatape, timm",
        "reveal_type(adatape.wrap)",
        "reveal_type(adatape.read_tape)",
        "adatape.wrapp",
        "adatape.wrap(None, bank=3)",
        'adatape.wrap(None, bankk="x")',
    ]
    (tmp_path / "user.py").write_text("\n".join(lines))
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, _, _ = api.run([*options, str(tmp_path / "user.py")])
    by_line = {int(number): text for number, text in reversed(re.findall(r"user\.py:(\d+): (.*)", said))}  # not notes
    assert "def (vit: Any" in by_line[2], said
    assert "adatape.models.adatape.AdaTape" in by_line[2]
    assert "adatape.records.Tape" in by_line[3]
    assert 'has no attribute "wrapp"' in by_line[4]
    assert 'No overload variant of "wrap"' in by_line[5]
    assert 'Unexpected keyword argument "bankk"' in by_line[6]


def test_the_options_that_a_type_checker_knows_are_those_of_the_records() -> None:
    records = [field.name for record in (ReaderConfig, TapeJoin) for field in dataclasses.fields(record)]
    assert {*WrapOptions.__annotations__} == {"reader", *records}
