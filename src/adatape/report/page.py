"""The report as one HTML page that needs nothing beside it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

GENERATOR = '<meta name="generator" content="adatape report">'
CAPTIONS = {
    "training": "Loss, accuracy and tape length by training step; the band is one standard deviation over samples.",
    "parity": "Accuracy, tape lengths, and one sequence with the pairs that were read.",
    "quality": "Accuracy of the one model against what it costs at several budgets.",
    "budgets": "Budgets: accuracy against work and time, tape lengths, easy and hard samples.",
    "heatmap": "How often each patch of the image is read, in all and by step.",
    "long_tail": "How often each bank token is read, most read first; both axes are logarithmic.",
    "lengths": "Tape lengths of all samples, and of right and wrong answers.",
    "lengths_by_class": "Tape lengths by class.",
    "easy": "Samples that cost the model least.",
    "hard": "Samples that cost the model most.",
    "mistakes": "Samples that it gets wrong.",
}
STYLE = """
:root { color-scheme: light dark; --ink: #30343b; --faint: #6a707a; --line: #dfe3e6; --back: #fff; --card: #f6f8f7;
  --mark: #1b7f5c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --faint: #a0a7b0; --line: #3a4048; --back: #16191d;
  --card: #1f2429; --mark: #5fc9a0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.9rem; } h2 { margin: 2.8rem 0 .6rem; font-size: 1.35rem; }
h3 { margin: 0 0 .2rem; font-size: 1.1rem; overflow-wrap: anywhere; }
a { color: var(--mark); } p { margin: .4rem 0; } .faint, figcaption { color: var(--faint); font-size: .88rem; }
.wide { overflow-x: auto; margin: .6rem 0 1.6rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem 0 .4rem .8rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--line);
  vertical-align: top; }
th { border-bottom: 2px solid var(--ink); vertical-align: bottom; font-weight: 600; }
th.word, td.word { text-align: left; white-space: normal; min-width: 6rem; }
td.word + td.word { min-width: 15rem; }
th:first-child, td:first-child { padding-left: 0; }
article { margin: 1.2rem 0; padding: 1rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem;
  margin: .8rem 0; align-items: start; }
figure { margin: 0; break-inside: avoid; }
figure img { display: block; width: 100%; height: auto; border-radius: 6px; background: #fff; }
pre { margin: .3rem 0; padding: .6rem .8rem; overflow-x: auto; background: var(--back); border: 1px solid var(--line);
  border-radius: 6px; font-size: .82rem; }
summary { cursor: pointer; color: var(--mark); }
@media print { body { max-width: none; padding: 0; font-size: 11px; } article { border: 0; padding: 0; }
  .figures { grid-template-columns: 1fr 1fr; } .wide { overflow: visible; } pre { white-space: pre-wrap; } }
"""


def whole_page(title: str, parts: Iterable[str]) -> str:
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            GENERATOR,
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
            *parts,
            "</body>\n</html>\n",
        ]
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]], above: str = "", words: Sequence[int] = (0,)) -> str:
    """`words` are the columns that hold words; figures stand to the right. `above` stays put where a table scrolls."""
    kinds = ["word" if n in words else "" for n in range(len(head))]
    top = "".join(_cell("th", name, kind) for name, kind in zip(head, kinds, strict=True))
    body = "".join(
        f"<tr>{''.join(_cell('td', cell, kind) for cell, kind in zip(row, kinds, strict=True))}</tr>\n" for row in rows
    )
    note = f'<p class="faint">{escape(above)}</p>\n' if above else ""
    scrolled = f"<table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'{note}<div class="wide" tabindex="0">{scrolled}</div>'


def figures(folder: Path) -> str:
    """All pictures of a run inside the page, those we know first."""
    known = list(CAPTIONS)
    found = sorted(folder.glob("*.png"), key=lambda path: (_rank(path.stem, known), path.stem))
    return f'<div class="figures">{"".join(map(_figure, found))}</div>' if found else ""


def details(summary: str, text: str) -> str:
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2)


def _figure(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    caption = escape(CAPTIONS.get(path.stem, path.stem))
    image = f'<img loading="lazy" alt="{caption}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>\n"


def _rank(name: str, known: list[str]) -> int:
    return known.index(name) if name in known else len(known)


def _cell(tag: str, text: str, kind: str) -> str:
    marked = f' class="{kind}"' if kind else ""
    return f"<{tag}{marked}>{escape(text)}</{tag}>"
