"""What the site adds to the pages, which are plain Markdown so that they read well on a code host.

- the order of pages (`CONTENTS`), of which those that do not exist are left out;
- signatures and docstrings in the place of a line `<!--api MODULE: NAME, NAME-->`, or of all public names of a module;
- links to files above docs/, as links to the code host;
- at the end, a check that no page fetches anything from another host.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import SphinxError

DOCS = Path(__file__).parent
HOST = "https://github.com/adatape/adatape/blob/main"
CONTENTS = {
    "index": [
        "start", "concepts", "guides", "paper", "results", "performance",
        "architecture", "api", "log", "releases", "glossary",
    ],
    "guides": [
        "training", "notebooks/give_your_vit_a_tape", "budgets", "large_images", "serve", "export", "banks",
        "notebooks/what_a_tape_reads", "tools",
    ],
    "paper": ["departures"],
}  # fmt: skip
# What a browser fetches by itself; a link that a reader may follow is none of it.
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|link)\b[^>]*?\b(?:src|href)=[\"'](?:https?:)?//[^\"']+", re.IGNORECASE
)
IMPORTED = re.compile(r"(?:@import\s*|url\(\s*)[\"']?(?:https?:)?//[^\"')]+", re.IGNORECASE)


def contents(page: str) -> str:
    """The table of contents that belongs at the end of a page, or nothing."""
    below = [name for name in CONTENTS.get(page, []) if (DOCS / f"{name}.md").is_file()]
    return "\n".join(["", "", "```{toctree}", ":hidden:", "", *below, "```", ""]) if below else ""


def api(module: str, names: list[str]) -> str:
    """Directives for the names of a module, or for all that it declares public."""
    lines = ["```{eval-rst}", f".. currentmodule:: {module}", ""]
    home = importlib.import_module(module)
    for name in names or [name for name in home.__all__ if not name.startswith("_")]:
        thing = getattr(home, name)
        lines += [f".. autoclass:: {name}", "   :members:", ""] if inspect.isclass(thing) else []
        lines += [f".. autofunction:: {name}", ""] if callable(thing) and not inspect.isclass(thing) else []
    return "\n".join([*lines, "```"])


def _named(match: re.Match[str]) -> str:
    return api(match["module"], [name.strip() for name in (match["names"] or "").split(",") if name.strip()])


def rewritten(page: str, text: str) -> str:
    """The source of a page as Sphinx reads it."""
    text = re.sub(r"^<!--api (?P<module>[\w.]+)(?:: (?P<names>[^>]+?))?-->$", _named, text, flags=re.MULTILINE)
    up = "../" * (page.count("/") + 1)
    text = re.sub(rf"\]\({re.escape(up)}(?!\.\./)", f"]({HOST}/", text)
    return text + contents(page)


def read_source(_: Sphinx, page: str, source: list[str]) -> None:
    source[0] = rewritten(page, source[0])


def fields_of(record: type) -> list[str]:
    """The fields of a NamedTuple with the comments beside them, as a list."""
    found = re.findall(
        r"^    (\w+): ([^#=\n]+?)(?: = [^#\n]+?)?  #(?: type: \S+  #)? (.+)$", inspect.getsource(record), re.MULTILINE
    )
    return ["", *(f"- ``{name}``: {comment}" for name, _, comment in found), ""]


LIMITED = re.compile(r"~typing\.Annotated\[(\w+)(?:, ~annotated_types\.\w+\([^)]*\))+\]")  # types of limits.py


def plain_types(
    _: Sphinx, __: str, ___: str, ____: Any, _____: Any, given: str | None, back: str | None
) -> tuple[str | None, str | None]:
    """Signatures without the limits of settings, which are checked and named where a value is wrong."""
    return (LIMITED.sub(r"\1", given) if given else given), back


def describe(_: Sphinx, __: str, ___: str, thing: Any, ____: Any, lines: list[str]) -> None:
    if inspect.isclass(thing) and issubclass(thing, tuple) and hasattr(thing, "_fields"):
        lines.extend(fields_of(thing))
    lines[:] = [re.sub(r"(?<![`\w*])\*(?=\w)", r"\\*", line) for line in lines]  # `(*shape, 4)` is no emphasis


def skip(_: Sphinx, __: str, ___: str, thing: Any, skipped: bool, ____: Any) -> bool | None:
    """Leaves out what NamedTuple writes itself, `Alias for field number 0`."""
    return True if str(getattr(thing, "__doc__", "")).startswith("Alias for field number") else skipped or None


def fetched(folder: Path) -> list[str]:
    """What the built pages and styles would fetch from other hosts."""
    pages = [(path, FETCHED) for path in sorted(folder.rglob("*.html"))]
    styles = [(path, IMPORTED) for path in sorted(folder.rglob("*.css"))]
    return [
        f"{path.relative_to(folder)}: {found}"
        for path, pattern in [*pages, *styles]
        for found in pattern.findall(path.read_text(errors="ignore"))
    ]


def check_offline(app: Sphinx, failure: Exception | None) -> None:
    found = [] if failure or app.builder.format != "html" else fetched(Path(app.outdir))
    if found:
        raise SphinxError("pages fetch from other hosts; bundle what they need:\n" + "\n".join(found[:20]))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", read_source)
    app.connect("autodoc-process-docstring", describe)
    app.connect("autodoc-process-signature", plain_types)
    app.connect("autodoc-skip-member", skip)
    app.connect("build-finished", check_offline)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
