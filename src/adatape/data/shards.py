"""WebDataset shards, tars of images and labels: finding them by a pattern, counting, writing and reading."""

from __future__ import annotations

import glob
import itertools
import json
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch

from adatape.counter_rng import key_of, keys_of
from adatape.data.decode import MOST_BYTES
from adatape.data.images import Split, library, split_of
from adatape.data.imageset import ImageSet
from adatape.data_config import Images
from adatape.validation import one_line

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
LABEL_SUFFIXES = ("cls", "json")
# webdataset also accepts `pipe:`, a shell command, which an untrusted config.json must not be able to run.
SCHEMES = ("", "file", "http", "https", "gs", "hf")
COUNTS = "shards.json"
NOTES = re.compile(r"__[^/]*__($|/)")  # webdataset's metadata files, which are not samples
HELD, WRITTEN = 203, 204  # first words of keys
UNREADABLE = (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)


class Raw(NamedTuple):
    name: str
    content: bytes
    label: int


def open_shards(config: Images, split: Split) -> list[str]:
    """The shards of a split; `validate_on` holds out whole shards of train.

    `path` is a pattern with {split}, or two patterns `TRAIN | TEST`. Ranges such as {000..123} are expanded, and *
    matches local files.
    """
    tested = split_of(config, split) == "test"
    urls = _expanded(_pattern(config, tested), config.may_fetch)
    if tested or config.validate_on is None:
        return urls
    count = max(1, round(config.validate_on * len(urls)))
    if not 0 < config.validate_on < 1 or count >= len(urls):
        raise ValueError(f"validate_on is {config.validate_on} of {len(urls)} shards; both parts need at least one")
    held = set(permutation(key_of(HELD), len(urls))[:count])
    return [url for k, url in enumerate(urls) if (k in held) == (split == "validation")]


def known_total(urls: Sequence[str]) -> int | None:
    """The number of samples of all shards, from shards.json next to them; None if it is missing."""
    listed = [_listed(folder).get(name) for folder, name in map(_parted, urls)]
    return None if None in listed else sum(count for count in listed if count is not None)


def write_shards(images: ImageSet, folder: str | Path, per_shard: int, prefix: str = "train") -> list[str]:
    """Writes shards of at most `per_shard` images, shuffled, since sets are often sorted by class, and shards.json."""
    if per_shard < 1:
        raise ValueError(f"per_shard is {per_shard}; it must be at least 1")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob(f"{prefix}-*.tar")):
        raise FileExistsError(f"{folder} already contains shards named {prefix}; choose another folder or remove them")
    order = permutation(key_of(WRITTEN), len(images))
    parts = [order[at : at + per_shard] for at in range(0, len(order), per_shard)]
    counts = {f"{prefix}-{k:06d}.tar": len(part) for k, part in enumerate(parts)}
    for name, part in zip(counts, parts, strict=True):
        _write_shard(images, part, folder / name)
    listed = _parsed_counts((folder / COUNTS).read_bytes(), folder) if (folder / COUNTS).exists() else {}
    (folder / COUNTS).write_text(json.dumps(listed | counts, indent=1))
    return [str(folder / name) for name in counts]


def _write_shard(images: ImageSet, rows: list[int], path: Path) -> None:
    with _webdataset().TarWriter(str(path), encoder=False, mtime=0) as tar:
        for row in rows:
            suffix, content = images.file(row)
            tar.write({"__key__": f"{row:08d}", suffix: content, "cls": str(images.labels[row]).encode()})


def permutation(key: int, count: int) -> list[int]:
    return keys_of(key, torch.arange(count)).argsort().tolist()


@cache
def count_of(url: str) -> int:
    """The number of samples of a shard, from shards.json next to it, else from the tar's headers."""
    folder, name = _parted(url)
    listed = _listed(folder).get(name)
    if listed is not None:
        return listed
    return sum(1 for _ in _grouped(_files(url) if local_path(url) is None else _headers(url), url))


def raws_from(urls: Sequence[str], start: int, classes: int | None) -> Iterator[Raw]:
    """One pass over the shards without the first `start` samples."""
    for url in urls:
        if start and start >= (count := count_of(url)):
            start -= count
            continue
        yield from raws_of(url, start, classes)
        start = 0


def raws_of(url: str, start: int, classes: int | None) -> Iterator[Raw]:
    for group in itertools.islice(_grouped(_files(url), url), start, None):
        yield Raw(*_sample(group, url, classes))


def places_in(url: str, classes: int | None) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Each sample of a local tar: its name, its image's offset and size, and its label."""
    for group in _grouped(_headers(url), url):
        yield _sample(group, url, classes)


def _sample(group: dict[str, Any], url: str, classes: int | None) -> tuple[str, Any, int]:
    where = f"{url}/{group['__key__']}"
    suffix = next((suffix for suffix in IMAGE_SUFFIXES if suffix in group), None)
    if suffix is None:
        raise ValueError(f"sample {where} has no image; it must have one of {', '.join(IMAGE_SUFFIXES)}")
    label = _label(group, where)
    if label < 0 or (classes is not None and label >= classes):
        raise ValueError(f"sample {where} has label {label}; it must be at least 0 and below {classes} classes")
    return f"{where}.{suffix}", group[suffix], label


def _label(group: dict[str, Any], where: str) -> int:
    try:
        if "cls" in group:
            return int(group["cls"])
        found = json.loads(group["json"])
        label = found["label"] if isinstance(found, dict) else found
        if isinstance(label, int) and not isinstance(label, bool):
            return label
    except (KeyError, ValueError):
        pass
    raise ValueError(f"sample {where} has no label; it must have cls, an integer, or json with an integer label")


def _grouped(files: Iterable[dict[str, Any]], url: str) -> Iterator[dict[str, Any]]:
    """The files of a shard, grouped by sample; errors name the shard."""
    count = 0
    try:
        for group in _webdataset().tariterators.group_by_keys({**file, "__url__": url} for file in files):
            count += 1
            yield group
    except UNREADABLE as error:
        raise OSError(f"shard {url} could not be read: {one_line(error)}") from error
    if not count:
        raise ValueError(f"shard {url} contains no samples")
    folder, name = _parted(url)
    if _listed(folder).get(name, count) != count:  # tarfile does not notice a tar truncated between two files
        raise ValueError(f"shard {url} contains {count} samples; {COUNTS} lists {_listed(folder)[name]}")


def _files(url: str) -> Iterator[dict[str, Any]]:
    """Each file of a shard with its content."""
    with _webdataset().gopen(url) as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
        for file in _wanted_files(tar):
            yield {"fname": file.name, "data": tar.extractfile(file).read()}  # type: ignore[union-attr]


def _headers(url: str) -> Iterator[dict[str, Any]]:
    """Each file of a local shard: labels with their content, images with offset and size."""
    with tarfile.open(local_path(url)) as tar:
        for file in _wanted_files(tar):
            labels = file.name.lower().endswith(LABEL_SUFFIXES)
            content = tar.extractfile(file).read() if labels else (file.offset_data, file.size)  # type: ignore[union-attr]
            yield {"fname": file.name, "data": content}


def _wanted_files(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Images and labels of a tar; large and sparse files, which can claim any size, are refused."""
    for file in tar:
        if file.isreg() and _wanted(file.name):
            if file.size > MOST_BYTES:
                raise ValueError(f"{file.name} has {file.size:,} bytes; at most {MOST_BYTES:,} are read")
            if file.issparse():
                raise ValueError(f"{file.name} is stored as a sparse file; write the tar without --sparse")
            yield file
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep all headers in memory


def _wanted(name: str) -> bool:
    suffix = _webdataset().tariterators.base_plus_ext(name)[1]
    return suffix is not None and suffix.lower() in IMAGE_SUFFIXES + LABEL_SUFFIXES and not NOTES.match(name)


@cache
def _listed(folder: str) -> dict[str, int]:
    """Samples per shard from a folder's shards.json; without it, a resumed run must read the samples that it skips."""
    path = local_path(folder + COUNTS)
    if path is not None:
        return _parsed_counts(path.read_bytes(), folder) if path.is_file() else {}
    try:
        with _webdataset().gopen(folder + COUNTS) as stream:
            content = stream.read()
    except UNREADABLE:
        return {}
    return _parsed_counts(content, folder) if content else {}


def _parsed_counts(content: bytes, folder: str | Path) -> dict[str, int]:
    try:
        return {str(name): int(count) for name, count in json.loads(content).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{COUNTS} in {folder} must map names of shards to counts: {one_line(error)}") from error


def _parted(url: str) -> tuple[str, str]:
    """Splits a URL into folder, with its slash, and file name."""
    cut = url.rfind("/") + 1
    return url[:cut], url[cut:].partition("?")[0]


def _pattern(config: Images, tested: bool) -> str:
    if config.path is None:
        raise ValueError("path is None; source shards needs a path or URL such as /data/{split}-{000000..000146}.tar")
    if "|" in config.path:
        return config.path.split("|", 1)[tested].strip()
    if tested and "{split}" not in config.path:
        raise ValueError(f"path {config.path} names no test shards; write {{split}} in it, or TRAIN | TEST")
    return config.path.replace("{split}", "test" if tested else "train")


def _expanded(pattern: str, may_fetch: bool) -> list[str]:
    urls = [os.path.expanduser(url) for url in _webdataset().shardlists.expand_urls(pattern)]
    for url in urls:
        if not may_fetch and local_path(url) is None:
            raise ValueError(
                f"path is {url}; a file may name local shards only: give --trust if the file is your own, or "
                "data.path on the command line"
            )
        if urlparse(url).scheme not in SCHEMES:
            raise ValueError(
                f"path {url} has scheme {urlparse(url).scheme}; it must be a file or {', '.join(SCHEMES[1:])}"
            )
    urls = [found for url in urls for found in (sorted(glob.glob(url)) if "*" in url and local_path(url) else [url])]
    missing = [url for url in urls if (path := local_path(url)) and not path.is_file()]
    if missing:
        raise FileNotFoundError(f"{len(missing)} of {len(urls)} shards do not exist; first {missing[0]}")
    if not urls:
        raise FileNotFoundError(f"path {pattern} matches no shards")
    return urls


def local_path(url: str) -> Path | None:
    """The path of a local shard; None for a remote URL."""
    parsed = urlparse(url)
    if parsed.scheme == "":
        return Path(url)
    return Path(url2pathname(parsed.path)) if parsed.scheme == "file" else None


def _webdataset() -> Any:
    return library("webdataset", "webdataset", "shards")
