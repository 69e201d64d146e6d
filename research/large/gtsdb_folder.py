"""GTSDB as `adatape train scenes` reads it: a folder of images, and labels.csv with the categories of each scene.

    python research/large/gtsdb_folder.py --data DIR --out data/gtsdb
    adatape train scenes --path data/gtsdb

DIR has gtsdb_train.npz, gtsdb_test.npz (arrays bytes, offsets and boxes) and gtsdb_classes.json. Images are copied as
they are, byte for byte; boxes are left out but for the categories of their signs.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import numpy as np
from scenes import CATEGORIES


def write_folder(data: Path, out: Path) -> dict[str, int]:
    """How many scenes of each split were written."""
    category = {int(k): v[1] for k, v in json.loads((data / "gtsdb_classes.json").read_text()).items()}
    rows, counts = [], {}
    for split in ("train", "test"):
        packed = np.load(data / f"gtsdb_{split}.npz")
        blob, offsets, boxes = packed["bytes"].tobytes(), packed["offsets"], packed["boxes"]
        (out / split).mkdir(parents=True, exist_ok=True)
        for i in range(len(offsets) - 1):
            name = f"{split}/{i:05d}.webp"
            (out / name).write_bytes(blob[offsets[i] : offsets[i + 1]])
            found = {category[int(c)] for c in boxes[boxes[:, 0] == i, 5]}
            rows.append([name, ";".join(each for each in CATEGORIES if each in found), split])
        counts[split] = len(offsets) - 1
    with (out / "labels.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["file", "labels", "split"], *rows])
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    counts = write_folder(args.data, args.out)
    print(f"{args.out}: {', '.join(f'{count} scenes of {split}' for split, count in counts.items())}, labels.csv")


if __name__ == "__main__":
    main()
