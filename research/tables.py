"""Generates all tables of the docs that come from results/.

    python research/tables.py --write                          or `make tables`: all of them, in their places
    python research/tables.py results/tried/light.jsonl        the tables of one study on images, to read

A table is between the lines `<!-- NAME -->` and `<!-- end of NAME -->` of its page; tests/test_tables.py checks that
pages and files agree. Long ones are folded: a browser shows their titles. `pictures.py` draws the figures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import parity_tables
import retrieval_tables
import speed_tables
from image_tables import tables_of
from rows import RESULTS, read_rows

DOCS = RESULTS.parent / "docs"
STUDIES = ("evidence", "long", "still", "ablations", "length")


class Place(NamedTuple):
    """A table's page and name, and the function that makes it."""

    page: str
    make: Callable[[], str]


def study(name: str) -> str:
    found = tables_of(read_rows(RESULTS / f"{name}.jsonl"))
    return "\n\n".join(folded(title, text) for title, text in found.items())


def folded(title: str, text: str) -> str:
    """A table that a browser shows when its title is clicked; Markdown needs the empty lines."""
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def small_parity() -> str:
    return folded("Small models on a CPU, by seed", parity_tables.small())


def loop_and_loader() -> str:
    return folded("Time of the training loop and of the loader", speed_tables.loop_and_loader())


PLACES = {
    **{name: Place("results.md", partial(study, name)) for name in STUDIES},
    "parity": Place("results.md", parity_tables.by_length),
    "parity beyond 128": Place("results.md", parity_tables.beyond),
    "small parity": Place("results.md", small_parity),
    "loop and loader": Place("results.md", loop_and_loader),
    "speed as built": Place("performance.md", speed_tables.as_built),
    "speed": Place("performance.md", speed_tables.against_timm),
    "reading and packing": Place("performance.md", speed_tables.reading_and_packing),
    "speed by batch": Place("performance.md", speed_tables.by_batch),
    "kernels by part": Place("log.md", speed_tables.parts),
    "speed on a CPU": Place("performance.md", speed_tables.on_cpu),
    "server": Place("budgets.md", speed_tables.served),
    "retrieval": Place("banks.md", retrieval_tables.by_size),
    "hostile clients": Place("budgets.md", speed_tables.served_beside_hostile_clients),
}


def replaced(page: str, name: str, text: str) -> str:
    """The page with `text` between its two marker lines, surrounded by empty lines."""
    begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"a page must have one line {begin.strip()} and one line {end.strip()}, for a table between")
    return f"{page.split(begin)[0]}{begin}\n{text}\n{end}{page.split(end)[1]}"


def renewed(page: str) -> str:
    """A page of the docs with all its tables regenerated."""
    text = (DOCS / page).read_text()
    for name, place in PLACES.items():
        text = replaced(text, name, place.make()) if place.page == page else text
    return text


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, nargs="?", help="a JSONL file under results/ whose tables are printed")
    parser.add_argument("--write", action="store_true", help="renew the tables of all pages")
    arguments = parser.parse_args(given)
    if not arguments.write and arguments.study is None:
        parser.error("nothing to do; name a study, or --write")
    if arguments.study is not None:
        for title, text in tables_of(read_rows(arguments.study)).items():
            print(f"### {title}\n\n{text}\n")
    for page in sorted({place.page for place in PLACES.values()}) if arguments.write else ():
        (DOCS / page).write_text(renewed(page))


if __name__ == "__main__":
    main()
