"""Image files in one folder per class; symbolic links are followed, cycles are refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from adatape.data.imageset import Files

SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
MOST_LINKS = 1000  # links to folders below one class folder; nested links could multiply without limit
Identity = tuple[int, int]


def class_folders(path: Path, train: bool, tests: tuple[str, str], exif_orientation: bool) -> Files:
    test = next((path / name for name in tests if (path / name).is_dir()), None)
    wanted = path / "train" if train else test
    if not (path / "train").is_dir() or wanted is None:
        raise FileNotFoundError(f"path {path} must contain train/CLASS/IMAGE and {' or '.join(tests)}/CLASS/IMAGE")
    names = _class_names(path / "train")
    if test and (odd := sorted(set(names) ^ set(_class_names(test)))):
        raise ValueError(f"class {odd[0]} is in only one of {path / 'train'} and {test}, as are {len(odd)} in all")
    found = [[file for file in files_below(wanted / name) if file.lower().endswith(SUFFIXES)] for name in names]
    for name, files in zip(names, found, strict=True):
        if not files:
            raise ValueError(f"class folder {wanted / name} contains no image; remove it or add images")
    labels = np.repeat(np.arange(len(names)), [len(files) for files in found])
    return Files(names, labels, (file for files in found for file in files), exif_orientation)


def files_below(folder: Path) -> list[str]:
    """All files below a folder, sorted by folder and name, in the order of torchvision.

    A link to a folder that contains it is refused: it would be followed forever and reach other classes.
    """
    home = folder.parent.resolve()
    above = frozenset(_identity(str(each)) for each in (home, *home.parents))
    pending = [(str(folder), _entered(str(folder), above))]
    found, links = [], 0
    while pending:
        place, passed = pending.pop()
        names = []
        with os.scandir(place) as entries:
            for entry in entries:
                if not _is_folder(entry):
                    names.append(entry.name)
                    continue
                links += entry.is_symlink()
                if links > MOST_LINKS:
                    raise ValueError(
                        f"{folder} contains more than {MOST_LINKS:,} links to folders; replace them by copies"
                    )
                pending.append((entry.path, _entered(entry.path, passed)))
        found.append((place, sorted(names)))
    return [os.path.join(place, name) for place, names in sorted(found) for name in names]


def _entered(place: str, passed: frozenset[Identity]) -> frozenset[Identity]:
    """`passed` and this folder; raises if it is already in `passed`."""
    identity = _identity(place)
    if identity in passed:
        raise ValueError(f"{place} links to {os.path.realpath(place)}, a folder that contains it; remove the link")
    return passed | {identity}


def _identity(place: str) -> Identity:
    found = os.stat(place)
    return found.st_dev, found.st_ino


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _class_names(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if _is_folder(entry))
    if not names:
        raise FileNotFoundError(f"{folder} contains no class folders; images must be at {folder}/CLASS/IMAGE")
    return names
