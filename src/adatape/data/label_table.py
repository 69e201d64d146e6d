"""A CSV file that names the labels of each image of a folder; errors name file, row, column and value."""

from __future__ import annotations

import csv
import hashlib
import io
import itertools
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np

from adatape.data.decode import read_regular
from adatape.data.images import Split, split_of
from adatape.data_config import Scenes

MOST_BYTES = 256_000_000
TEST_SHARE = 0.2  # of a table without a column of splits
FILE, LABELS, SPLIT = "file", "labels", "split"
BETWEEN = ";"


class Row(NamedTuple):
    line: int  # of the CSV file, from 1, where the row ends
    file: str
    labels: tuple[str, ...]
    split: str  # "" without that column


class LabelTable(NamedTuple):
    """The rows of one split, in the order of the file."""

    names: list[str]
    files: list[Path]
    labels: np.ndarray  # (n, classes) float32: 1 where a label is given, else 0


def read_table(config: Scenes, split: Split) -> LabelTable:
    """Reads a split; names are those of the whole table, so that all splits have the same."""
    folder = Path(config.path).expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(f"path {folder} is not a folder; it must contain {config.csv} and the images")
    path = folder / config.csv
    if path.suffix.lower() != ".csv":
        raise ValueError(f"csv is {config.csv!r}; it must end in .csv")
    rows = _checked(_rows(path), path)
    names = _names(rows, config.classes, path)
    chosen = _of_split(rows, split_of(config, split), config.validate_on, path)
    place = {name: n for n, name in enumerate(names)}
    labels = np.zeros((len(chosen), len(names)), np.float32)
    for n, row in enumerate(chosen):
        labels[n, [place[name] for name in row.labels]] = 1
        if not (folder / row.file).is_file():
            raise FileNotFoundError(f"{_place(path, row, FILE, row.file)}; {folder} has no such file")
    if not labels.any():
        raise ValueError(
            f"{path}: none of the {len(chosen)} rows of split {split} has a label, so nothing can be scored"
        )
    return LabelTable(names, [folder / row.file for row in chosen], labels)


def _rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; it must be a table with columns {FILE} and {LABELS}")
    content = read_regular(path, MOST_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + content.count(b"\n", 0, error.start)
        raise ValueError(f"{path} line {line} is not UTF-8: byte {content[error.start]:#04x}") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = _columns(next(reader, []), path)
        for cells in reader:
            if cells:  # an empty line
                yield _row(cells, columns, reader.line_num, path)
    except csv.Error as error:
        raise ValueError(f"{path} line {reader.line_num} is not CSV: {error}") from error


def _columns(header: Sequence[str], path: Path) -> list[str]:
    columns = [name.strip() for name in header]
    if not columns:
        raise ValueError(f"{path} is empty; its first line must name the columns {FILE}, {LABELS} and perhaps {SPLIT}")
    for name in (FILE, LABELS, SPLIT):
        if columns.count(name) != 1 and (name != SPLIT or name in columns):
            raise ValueError(
                f"{path} has {columns.count(name)} columns {name} in its first line, {reprlib.repr(columns)}; "
                f"it must name {FILE}, {LABELS} and perhaps {SPLIT}, each once"
            )
    return columns


def _row(cells: Sequence[str], columns: Sequence[str], line: int, path: Path) -> Row:
    if len(cells) != len(columns):
        raise ValueError(f"{path} line {line} has {len(cells)} cells; the first line names {len(columns)} columns")
    given = dict(zip(columns, (cell.strip() for cell in cells), strict=True))
    labels = tuple(dict.fromkeys(name for each in given[LABELS].split(BETWEEN) if (name := each.strip())))
    return Row(line, given[FILE], labels, given.get(SPLIT, ""))


def _checked(rows: Iterator[Row], path: Path) -> list[Row]:
    seen: dict[str, Row] = {}
    for row in rows:
        said = _place(path, row, FILE, row.file)
        inside = PurePosixPath(row.file)
        if not row.file or inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"{said}; it must be a file below the folder of {path.name}")
        if str(inside) in seen:
            raise ValueError(f"{said}; line {seen[str(inside)].line} has the same file")
        seen[str(inside)] = row
    if not seen:
        raise ValueError(f"{path} has no rows below its first line; each must name an image")
    found = list(seen.values())
    if any(row.split for row in found):
        for row in found:
            if row.split not in ("train", "test"):
                raise ValueError(f"{_place(path, row, SPLIT, row.split)}; it must be train or test")
    return found


def _names(rows: Sequence[Row], classes: Sequence[str] | None, path: Path) -> list[str]:
    if classes is None:
        return sorted({name for row in rows for name in row.labels})
    twice = next((name for name in classes if classes.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"classes has {twice!r} twice; each name must be there once")
    for row in rows:
        for name in row.labels:
            if name not in classes:
                raise ValueError(f"{_place(path, row, LABELS, name)}; classes are {', '.join(classes)}")
    return list(classes)


def _of_split(rows: Sequence[Row], split: Split, validate_on: float | None, path: Path) -> list[Row]:
    if any(row.split for row in rows):
        train, test = ([row for row in rows if row.split == name] for name in ("train", "test"))
    else:
        train, test = _parted(rows, TEST_SHARE, "test")
    if not test or not (train or split == "test"):
        raise ValueError(f"{path} has {len(train)} rows to train on and {len(test)} to test; both must be at least 1")
    if split == "test":
        return test
    if validate_on is None:
        return train
    kept, held = _parted(train, validate_on, "validation")
    if not kept or not held:
        raise ValueError(f"validate_on is {validate_on} of {len(train)} images; both parts must have at least one")
    return held if split == "validation" else kept


def _parted(rows: Sequence[Row], share: float, purpose: str) -> tuple[list[Row], list[Row]]:
    """The rows, less those whose files have the lowest hashes, and these: no function of the order of rows."""
    lowest = sorted(rows, key=lambda row: hashlib.sha256(f"{purpose}:{row.file}".encode()).digest())
    held = {row.line for row in itertools.islice(lowest, round(share * len(rows)))}
    return [row for row in rows if row.line not in held], [row for row in rows if row.line in held]


def _place(path: Path, row: Row, column: str, value: str) -> str:
    return f"{path} line {row.line}: {column} is {reprlib.repr(value)}"
