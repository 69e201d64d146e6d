"""Random access to local shards: the offset of each image is read once from the tars' headers."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from adatape.data.decode import BrokenImage, Decoded, Modes, decode
from adatape.data.imageset import ImageSet
from adatape.data.shards import local_path, places_in
from adatape.data_config import Images

COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # first bytes of gzip, bzip2, xz and zstd


class Tars(ImageSet):
    """Images in uncompressed tars."""

    def __init__(
        self,
        names: list[str],
        labels: Int64[np.ndarray, "n"],
        urls: Sequence[str],
        places: Int64[np.ndarray, "n 3"],  # shard, offset, size
        files: np.ndarray,  # (n,) names as bytes; an array for the reason given in `Files`
        modes: Modes,
        exif_orientation: bool,
    ) -> None:
        super().__init__(names, labels)
        self.urls, self.places, self.files = urls, places, files
        self.modes, self.exif_orientation = modes, exif_orientation

    def load(self, i: int) -> Decoded:
        shard, start, size = self.places[i].tolist()
        name, path = os.fsdecode(self.files[i].item()), local_path(self.urls[shard])
        try:
            with open(path, "rb") as tar:  # type: ignore[arg-type]  # remote shards are not indexed
                tar.seek(start)
                content = tar.read(size)
        except OSError as error:
            raise BrokenImage(f"{name}: {error.strerror}") from error
        return decode(content, name, self.modes, self.exif_orientation)

    def subset(self, rows: Int64[np.ndarray, "m"]) -> Tars:
        places, files = self.places[rows], self.files[rows]
        return Tars(self.names, self.labels[rows], self.urls, places, files, self.modes, self.exif_orientation)


def index_shards(urls: Sequence[str], config: Images, names: list[str]) -> Tars | None:
    """Indexes the shards; None if one is remote or compressed."""
    if not all(map(_seekable, urls)):
        return None
    rows = [
        (os.fsencode(name), (shard, *place), label)
        for shard, url in enumerate(urls)
        for name, place, label in places_in(url, len(names))
    ]
    files, places, labels = map(np.array, zip(*rows, strict=True))
    return Tars(names, labels, urls, places, files, config.modes, config.exif_orientation)


def _seekable(url: str) -> bool:
    path = local_path(url)
    if path is None:
        return False
    with path.open("rb") as tar:
        return not tar.read(6).startswith(COMPRESSED)
