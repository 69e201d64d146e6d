"""Structure: import direction, lazy names, and documents that refer to existing things."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "adatape"
# Left to right only; names in one group may use each other. `config` and `recipes` are free of torch.
ORDER = [
    {"config", "data_config", "dropped", "extras", "limits", "validation"},
    {"records"},
    {"atr", "act", "packing", "ragged_attention", "counter_rng", "cuda_graphs", "patches", "macs", "losses"},
    {"banks", "kernels", "reader", "ablation", "windows"},
    {"encoder"},
    {"models"},
    {"data"},
    {"evaluate"},
    {"train"},
    {"report", "serve", "export", "retrieval"},
    {"cli"},
]
RANK = {room: rank for rank, rooms in enumerate(ORDER) for room in rooms} | {"recipes": 0.5, "": len(ORDER)}


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    room = path.relative_to(SOURCE).with_suffix("").parts[0]
    room = "" if room in ("__init__", "__main__") else room
    assert room in RANK, f"{room} has no place in the order of rooms"
    for module in imports_of(path):
        if module.startswith("adatape."):
            assert RANK[room_of(module)] <= RANK[room], f"{path.name} imports {module}"


def names_in(path: Path) -> tuple[set[str], set[str]]:
    """Names that code reads, without those in annotations, and names that it binds anywhere."""
    read, bound = set(), set(dir(builtins)) | {"__file__", "__name__", "__doc__"}

    def visit(node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns"):
                continue
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, ast.AST):
                    visit(each)
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound.update((each.asname or each.name).split(".")[0] for each in names)

    visit(ast.parse(path.read_text()))
    return read, bound


def test_every_name_that_code_reads_is_bound_in_its_file() -> None:
    """Linters cannot say so here: shapes in annotations would be unknown names to them."""
    folders = [SOURCE, *(ROOT / name for name in ("research", "benchmarks", "tests"))]
    files = {path.relative_to(ROOT): names_in(path) for folder in folders for path in folder.rglob("*.py")}
    assert {path: read - bound for path, (read, bound) in files.items() if read - bound} == {}


def test_the_package_imports_neither_research_nor_benchmarks() -> None:
    """They run as scripts, so an import of any of their module names would be one of them."""
    outside = {path.stem for folder in ("research", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    outside |= {"research", "benchmarks"}
    for path in SOURCE.rglob("*.py"):
        found = {module.split(".")[0] for module in imports_of(path)} & outside
        assert not found, f"{path.relative_to(SOURCE)} imports {found}"


@pytest.mark.parametrize(
    "path",
    [
        *(SOURCE / f"{name}.py" for name in ("config", "data_config", "limits")),
        *sorted((SOURCE / "cli").glob("*.py")),
        *sorted((SOURCE / "recipes").glob("*.py")),
    ],
)
def test_what_must_answer_at_once_imports_no_torch(path: Path) -> None:
    tree = ast.parse(path.read_text())
    top = {name for node in tree.body for name in imports_of_node(node)}
    assert not {name.split(".")[0] for name in top} & {"torch", "timm", "matplotlib", "pydantic"}


def test_outside_models_nobody_asks_whether_a_model_is_an_adatape() -> None:
    """Differences between models are methods of their base class."""
    for path in SOURCE.rglob("*.py"):
        if "models" not in path.relative_to(SOURCE).parts:
            assert "adatape.models.adatape" not in imports_of(path), path


def test_the_papers_model_is_short() -> None:
    assert len((SOURCE / "models" / "adatape.py").read_text().splitlines()) <= 200


def imports_of_node(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {node.module or ""}
    return {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["train", "--help"],
        ["train", "scenes", "--help"],
        ["train", "digits", "--steps", "many"],
    ],
)
def test_help_and_refusals_import_nothing_that_takes_long(arguments: list[str]) -> None:
    code = (
        "import atexit, sys; from adatape.__main__ import main;"
        "atexit.register(lambda: print(len(sys.modules), *{name.partition('.')[0] for name in sys.modules})); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == (2 if "many" in arguments else 0), done.stderr
    count, *imported = done.stdout.splitlines()[-1].split()
    assert not set(imported) & {"torch", "timm", "numpy", "pydantic", "matplotlib", "sklearn", "fastapi", "PIL"}
    assert int(count) < 700  # tyro and what it needs are about 330


def test_an_unknown_name_lists_the_known_ones() -> None:
    import adatape

    with pytest.raises(AttributeError, match=r"no attribute 'AdaTap'; it has AdaTape, wrap"):
        _ = adatape.AdaTap


def definitions(path: Path) -> set[str]:
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if hasattr(node, "name")]
    assigned = re.findall(r"^(\w+)(?:: [^=]+)? =", path.read_text(), re.MULTILINE)
    return {node.name for node in nodes} | set(assigned)


def test_the_papers_map_points_at_things_that_exist() -> None:
    pointers = re.findall(
        r"`((?:src|tests|benchmarks|research)/[\w/.]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "paper.md").read_text()
    )
    assert len(pointers) > 30
    for file, name in pointers:
        path = ROOT / file
        assert path.is_file(), file
        assert not name or name in definitions(path), f"{file}::{name}"


def test_every_departure_of_the_specification_has_its_row() -> None:
    rows = re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "departures.md").read_text(), re.MULTILINE)
    assert [int(row) for row in rows[:34]] == list(range(1, 35))


def test_atr_cites_departures_that_exist() -> None:
    cited = {int(n) for n in re.findall(r"departure (\d+)", (SOURCE / "atr.py").read_text())}
    rows = {int(n) for n in re.findall(r"^\| (\d+) \|", (ROOT / "docs" / "departures.md").read_text(), re.MULTILINE)}
    assert cited
    assert cited <= rows
