"""README and docs: links lead somewhere, figures agree with tables, Python runs, public names are in the reference."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image
from scripts import ROOT, script

import adatape

DOCS = ROOT / "docs"
HOST = "https://github.com/adatape/adatape/blob/main/"
RAW = "https://raw.githubusercontent.com/adatape/adatape/main/"
NAMES = ("README", "CHANGELOG", "CONTRIBUTING", "SECURITY")
PAGES = [*(ROOT / f"{name}.md" for name in NAMES), *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The anchors that a code host makes of headings: lower case, without punctuation, hyphens for spaces."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE), re.M)
    found: Counter[str] = Counter()
    named = set()
    for head in heads:
        plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", head).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        named.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return named


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(without_code(page.read_text())):
        path, _, anchor = link.partition("#")
        local = path.startswith((HOST, RAW)) or not re.match(r"\w+:", path)
        if not local:
            continue
        target = ROOT / path.removeprefix(HOST).removeprefix(RAW) if path.startswith("https:") else page.parent / path
        target = target if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_and_anchor_leads_somewhere(page: Path) -> None:
    assert not broken_links(page)


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One head · two\n\n[a](page.md#one-head--two) [b](#nothing) [c](gone.md) [d](https://example.org)\n"
    )
    assert broken_links(page) == ["#nothing", "gone.md"]


def python_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", ["training.md", "large_images.md"])
def test_the_python_of_the_guides_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README's is run by tests of the command line, that of the page on export by tests of export."""
    monkeypatch.chdir(tmp_path)
    blocks, scope = python_of(DOCS / name), {"__name__": "page"}
    assert blocks
    for block in blocks:
        exec(compile(block, name, "exec"), scope)


def other_commands(page: Path) -> list[str]:
    """Commands that start a script, and targets of make, in blocks or between backticks."""
    text = page.read_text()
    blocks = [
        line
        for block in re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.DOTALL | re.M)
        for line in block.splitlines()
    ]
    found = [*blocks, *re.findall(r"`((?:python|make) [^`\n]+)`", text)]
    return [
        line.partition("#")[0].strip() for line in found if re.match(r"(python (research|benchmarks)/|make )", line)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_scripts_options_and_targets_that_pages_name_exist(page: Path) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in other_commands(page):
        program, first, *words = line.split()
        if program == "make":
            assert first in targets, line
            continue
        source = (ROOT / first).read_text()
        imported = [
            ROOT / first.replace(Path(first).name, f"{name}.py")
            for name in re.findall(r"^from (\w+) import", source, re.M)
        ]
        known = source + "".join(path.read_text() for path in imported if path.is_file())
        assert [word for word in words if word.startswith("--") and f'"{word}"' not in known] == [], line


def test_readme_is_short_and_its_first_picture_is_near_the_top() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) < 950
    assert text.index("![") < 2000
    first = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert len([line for line in first.splitlines() if line]) <= 10


def test_results_are_read_in_a_sitting() -> None:
    """Generated tables are folded; what is shown at once stays short."""
    shown = re.sub(r"<details>.*?</details>", "", (DOCS / "results.md").read_text(), flags=re.DOTALL)
    assert len(shown.split()) <= 3000


def test_figures_of_the_verdicts_are_those_of_the_tables() -> None:
    """Every `a ± b` of a verdict, and of the paper's table, is a cell of a table that is made from the files."""
    results = (DOCS / "results.md").read_text().replace("−", "-")
    made = " ".join(re.findall(r"<details>.*?</details>", results, re.DOTALL))
    claimed = results.split("## Verdicts")[1].split("\n## ")[0] + (DOCS / "paper.md").read_text().replace("−", "-")
    figures = re.findall(r"[+-]?\d+\.\d+ ± \d+\.\d+", claimed)
    assert len(figures) > 10
    assert not [figure for figure in figures if figure not in made]


def test_the_papers_items_are_counted_as_they_stand() -> None:
    text = (DOCS / "paper.md").read_text()
    rows = [line for line in text.split("## Where each piece lives")[0].splitlines() if re.match(r"\| (?!item)", line)]
    status = Counter(re.split(r":| at \d", row.split("|")[-2].strip())[0] for row in rows)
    said = (
        f"Of {len(rows)} rows, {status['reproduced']} are reproduced, {status['at smaller scale']} at smaller scale, "
        f"{status['contradicted']} contradicted"
    )
    assert said in text
    assert f"{status['needs ImageNet or JFT']} need ImageNet or JFT" in text
    assert set(status) == {"reproduced", "at smaller scale", "contradicted", "needs ImageNet or JFT"}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_page_says_that_something_which_exists_is_missing(page: Path) -> None:
    assert "not built yet" not in page.read_text()


def test_every_public_name_is_in_the_reference() -> None:
    """The reference lists all public names of the package, and names of modules that exist."""
    pages = pytest.importorskip("site_pages")
    text = (DOCS / "api.md").read_text()
    assert "<!--api adatape-->" in text
    shown = pages.rewritten("api", text)
    for name in set(adatape.__all__) - {"__version__"}:
        assert re.search(rf"^\.\. auto(class|function):: {name}$", shown, re.MULTILINE), name


def test_pages_that_do_not_exist_are_left_out_and_files_above_docs_become_links() -> None:
    pages = pytest.importorskip("site_pages")
    listed = {name for names in pages.CONTENTS.values() for name in names}
    written = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    assert written - {"index"} <= listed, "a page is in no table of contents"
    assert "\nresults\n" in pages.rewritten("index", "")
    assert pages.rewritten("serve", "[x](../SECURITY.md)") == f"[x]({HOST}SECURITY.md)"
    assert pages.rewritten("notebooks/a", "[x](../budgets.md)") == "[x](../budgets.md)"


def test_what_a_built_page_would_fetch_is_found(tmp_path: Path) -> None:
    pages = pytest.importorskip("site_pages")
    (tmp_path / "a.html").write_text(
        '<a href="https://fine.org">x</a><img src="local.png"><script src="//cdn.org/x.js">'
    )
    (tmp_path / "a.css").write_text("@font-face { src: url(https://fonts.org/x.woff2) } b { background: url(x.png) }")
    assert [each.split(":")[0] for each in pages.fetched(tmp_path)] == ["a.html", "a.css"]


def test_the_concepts_pictures_are_drawn_by_their_script(tmp_path: Path) -> None:
    script("research/concept_pictures.py").main(["--into", str(tmp_path)])
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {f"concept_{name}.png" for name in ("bank", "reader", "tape", "budget")}
    for name in drawn:
        assert Image.open(tmp_path / name).size == Image.open(DOCS / "images" / name).size
        assert f"images/{name}" in (DOCS / "concepts.md").read_text()
