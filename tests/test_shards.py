"""Shards: the order is a function of the seed and can start anywhere; errors name the shard."""

from __future__ import annotations

import functools
import http.server
import io
import itertools
import json
import os
import shutil
import tarfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from adatape.data import shards, streams
from adatape.data.decode import BrokenImage
from adatape.data.images import open_images
from adatape.data.imageset import Pixels
from adatape.data.shards import count_of, open_shards
from adatape.data.streams import ShardSample, ShardStream, owned_streams, streams_of
from adatape.data_config import Images


def numbered(n: int) -> Pixels:
    """Images whose first pixel is their number."""
    pixels = np.zeros((n, 4, 4, 3), np.uint8)
    pixels[:, 0, 0, 0] = np.arange(n)
    return Pixels([str(label) for label in range(5)], np.arange(n) % 5, pixels)


def number(sample: ShardSample) -> int:
    return sample.image.getpixel((0, 0))[0]  # type: ignore[index,return-value]


def first(samples: Iterator[ShardSample], count: int) -> list[tuple[int, int, int]]:
    return [(sample.id, number(sample), sample.label) for sample in itertools.islice(samples, count)]


def tar(path: Path, files: dict[str, bytes]) -> str:
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return str(path)


def png(value: int, mode: str = "RGB") -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (2, 2), (value, 0, 0)).convert(mode).save(content, "PNG")
    return content.getvalue()


@pytest.fixture
def urls(tmp_path: Path) -> list[str]:
    return shards.write_shards(numbered(75), tmp_path, per_shard=10)


def test_written_shards_hold_every_image_once_with_its_label(urls: list[str], tmp_path: Path) -> None:
    samples = list(streams.ordered_samples(urls))
    assert sorted(map(number, samples)) == list(range(75))
    assert all(sample.label == number(sample) % 5 for sample in samples)
    assert [sample.id for sample in samples] == list(range(75))
    assert json.loads((tmp_path / "shards.json").read_text()) == {
        f"train-{k:06d}.tar": 10 if k < 7 else 5 for k in range(8)
    }


def test_a_set_sorted_by_class_is_mixed_when_written(tmp_path: Path) -> None:
    images = Pixels(["a", "b"], np.repeat([0, 1], 40), np.zeros((80, 2, 2, 3), np.uint8))
    written = shards.write_shards(images, tmp_path, per_shard=20)
    assert all(5 <= sum(s.label for s in streams.ordered_samples([url])) <= 15 for url in written)


def test_files_are_written_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "set" / "train" / "ant" / "x.JPG"
    path.parent.mkdir(parents=True)
    Image.new("RGB", (9, 9), (7, 8, 9)).save(path, "JPEG")
    images = open_images(Images(source="folder", path=str(tmp_path / "set")), "train")
    with tarfile.open(shards.write_shards(images, tmp_path / "out", per_shard=5)[0]) as archive:
        assert archive.getnames() == ["00000000.cls", "00000000.jpg"]
        assert archive.extractfile("00000000.jpg").read() == path.read_bytes()  # type: ignore[union-attr]


def test_writing_twice_never_mixes_two_sets(urls: list[str], tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match="already contains shards named train"):
        shards.write_shards(numbered(3), tmp_path, per_shard=3)
    shards.write_shards(numbered(3), tmp_path, per_shard=3, prefix="test")
    assert len(json.loads((tmp_path / "shards.json").read_text())) == len(urls) + 1
    with pytest.raises(ValueError, match="per_shard is 0"):
        shards.write_shards(numbered(3), tmp_path, per_shard=0, prefix="none")


def test_no_two_samples_share_an_id(urls: list[str]) -> None:
    ids = [s[0] for stream in range(4) for s in first(ShardStream(urls, stream, 4, 0).samples(), 60)]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("counted", [True, False])
def test_any_stretch_of_test_samples_is_that_of_the_whole_pass(urls: list[str], tmp_path: Path, counted: bool) -> None:
    if not counted:
        (tmp_path / "shards.json").unlink()
    whole = [(s.id, number(s), s.label) for s in streams.ordered_samples(urls)]
    for start, stop in ((0, 1), (9, 11), (10, 20), (33, 75), (74, 75)):
        assert [(s.id, number(s), s.label) for s in streams.ordered_samples(urls, start=start, stop=stop)] == whole[
            start:stop
        ]
    assert shards.known_total(urls) == (75 if counted else None)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("window", [1, 4, 128])
def test_starting_at_a_number_equals_skipping_to_it(
    urls: list[str], tmp_path: Path, counted: bool, window: int
) -> None:
    if not counted:
        (tmp_path / "shards.json").unlink()
    stream = ShardStream(urls, 1, 2, seed=5, window=window)
    unbroken = first(stream.samples(), 130)
    for start in (0, 1, 3, 4, 9, 10, 17, 34, 35, 36, 70, 99):
        assert first(stream.samples(start), 20) == unbroken[start : start + 20], start


def test_a_late_start_opens_only_the_shard_it_starts_in(urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = shards._files
    monkeypatch.setattr(shards, "_files", lambda url: (opened.append(url), real(url))[1])
    next(ShardStream(urls, 0, 1, seed=0).samples(75 * 1000 + 31))
    assert len(opened) == 1


def test_each_pass_has_every_sample_once_in_an_order_of_its_own(urls: list[str]) -> None:
    seen = [s[1] for s in first(ShardStream(urls, 0, 1, seed=0, window=4).samples(), 225)]
    passes = [seen[at : at + 75] for at in (0, 75, 150)]
    assert all(sorted(one) == list(range(75)) for one in passes)
    assert passes[0] != passes[1] != passes[2]
    other = [s[1] for s in first(ShardStream(urls, 0, 1, seed=1, window=4).samples(), 75)]
    assert other != passes[0]


def test_windows_mix_samples_within_a_shard(urls: list[str]) -> None:
    plain = [s[1] for s in first(ShardStream(urls[:1], 0, 1, 0, window=1).samples(), 10)]
    mixed = [s[1] for s in first(ShardStream(urls[:1], 0, 1, 0, window=5).samples(), 10)]
    assert plain == [number(s) for s in streams.ordered_samples(urls[:1])]
    assert (mixed != plain, sorted(mixed[:5]) == sorted(plain[:5])) == (True, True)
    places = [plain.index(n) % 5 for n in mixed]
    assert places[:5] != places[5:], "each window is mixed in its own way"


def test_streams_share_out_every_shard(urls: list[str]) -> None:
    own = [ShardStream(urls, stream, 4, seed=0).order(3) for stream in range(4)]
    assert sorted(itertools.chain(*own)) == urls
    assert len({tuple(ShardStream(urls, 0, 1, seed=0).order(turn)) for turn in range(5)}) == 5


@pytest.mark.parametrize(("count", "streams"), [(1, 1), (2, 2), (3, 2), (15, 8), (16, 16), (147, 16)])
def test_streams_are_a_power_of_two_and_none_lacks_a_shard(count: int, streams: int) -> None:
    assert streams_of(["x"] * count) == streams


@pytest.mark.parametrize(("batch", "streams"), [(1024, 16), (96, 16), (100, 4), (7, 1)])
def test_streams_fill_equal_stretches_of_a_batch(batch: int, streams: int) -> None:
    assert streams_of(["x"] * 147, batch) == streams
    assert [s for rank in range(streams) for s in owned_streams(streams, rank, streams)] == list(range(streams))


def test_processes_that_cannot_share_streams_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="3 processes do not divide 8 streams"):
        owned_streams(8, 0, 3)


def test_a_count_by_headers_is_the_count_by_reading(urls: list[str], tmp_path: Path) -> None:
    (tmp_path / "shards.json").unlink()
    assert [count_of(url) for url in urls] == [len(list(streams.ordered_samples([url]))) for url in urls]


def test_a_count_that_the_shard_does_not_hold_is_an_error(urls: list[str], tmp_path: Path) -> None:
    names = json.loads((tmp_path / "shards.json").read_text())
    (tmp_path / "shards.json").write_text(json.dumps(dict.fromkeys(names, 11)))
    with pytest.raises(ValueError, match=r"train-000000.tar contains 10 samples; shards.json lists 11"):
        list(streams.ordered_samples(urls))


def test_an_invalid_list_of_counts_is_an_error(urls: list[str], tmp_path: Path) -> None:
    (tmp_path / "shards.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"shards.json in .* must map names of shards to counts"):
        count_of(urls[0])


def test_a_broken_image_keeps_its_number_and_shows_its_successor(tmp_path: Path) -> None:
    files = {f"{i}.{kind}": content for i in range(6) for kind, content in (("png", png(i)), ("cls", b"%d" % i))}
    url = tar(tmp_path / "x.tar", files | {"2.png": b"", "3.png": b"text", "5.png": png(5)[:40]})
    samples = list(streams.ordered_samples([url]))
    assert [(s.id, number(s), s.label, len(s.broken)) for s in samples] == [
        (0, 0, 0, 0),
        (1, 1, 1, 0),
        (2, 4, 4, 2),
        (3, 4, 4, 1),
        (4, 4, 4, 0),
        (5, 0, 0, 1),
    ]
    assert samples[2].broken == (
        f"{url}/2.png: the file is empty",
        f"{url}/3.png: not an image that Pillow can identify",
    )
    endless = ShardStream([url], 0, 1, 0, window=1)
    unbroken = first(endless.samples(), 20)
    assert all(first(endless.samples(start), 3) == unbroken[start : start + 3] for start in range(15))


def test_shards_without_a_readable_image_end_in_an_error(tmp_path: Path) -> None:
    url = tar(tmp_path / "x.tar", {"0.png": b"", "0.cls": b"0"})
    with pytest.raises(ValueError, match="2 images in a row could not be read"):
        list(streams.ordered_samples([url]))
    with pytest.raises(ValueError, match="100 images in a row could not be read"):
        next(ShardStream([url], 0, 1, 0).samples())


def test_labels_are_read_from_cls_or_json_and_other_files_are_ignored(tmp_path: Path) -> None:
    files = {
        "a/0.jpg": png(0),
        "a/0.json": b'{"label": 3, "caption": "x"}',
        "a/0.txt": b"ignored",
        "a/0.mask.png": b"ignored",
        "a/1.PNG": png(1),
        "a/1.cls": b"4\n",
        "a/2.webp": png(2),
        "a/2.json": b"2",
    }
    url = tar(tmp_path / "x.tar", files)
    assert [sample.label for sample in streams.ordered_samples([url])] == [3, 4, 2]
    assert count_of(url) == 3


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"0.png": png(0)}, r"sample .*x.tar/0 has no label"),
        ({"0.png": png(0), "0.cls": b"ant"}, "has no label; it must have cls, an integer"),
        ({"0.png": png(0), "0.json": b'{"class": 3}'}, "has no label"),
        ({"0.png": png(0), "0.json": b'{"label": 0.5}'}, "has no label"),
        ({"0.cls": b"0"}, r"has no image; it must have one of jpg, jpeg, png, webp"),
        ({"0.png": png(0), "0.cls": b"7"}, "has label 7; it must be at least 0 and below 5 classes"),
        ({"0.png": png(0), "0.cls": b"-1"}, "has label -1"),
        ({"readme.txt": b""}, "contains no samples"),
    ],
)
def test_each_bad_sample_is_named_in_one_line(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        list(streams.ordered_samples([tar(tmp_path / "x.tar", files)], classes=5))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("length", [0, 300, 512, 1000, 2048, 5300, 10_240, 19_900])
def test_a_shard_that_is_cut_off_anywhere_is_named_in_one_line(urls: list[str], length: int) -> None:
    content = Path(urls[2]).read_bytes()[:length]
    Path(urls[2]).unlink()
    Path(urls[2]).write_bytes(content)
    with pytest.raises((OSError, ValueError), match=r"train-000002.tar") as caught:
        list(streams.ordered_samples(urls))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_tar_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(b"no tar at all" * 100)
    for call in (lambda url: next(streams.ordered_samples([url])), count_of):
        with pytest.raises(OSError, match=r"shard .*x.tar could not be read") as caught:
            call(str(tmp_path / "x.tar"))
        assert "\n" not in str(caught.value)


def test_refused_modes_name_the_image(tmp_path: Path) -> None:
    url = tar(tmp_path / "x.tar", {"0.png": png(0, "L"), "0.cls": b"0"})
    assert next(streams.ordered_samples([url])).converted
    with pytest.raises(ValueError, match=r"x.tar/0.png has mode L; with modes=refuse"):
        next(streams.ordered_samples([url], modes="refuse"))


def sharded(path: str, **options: object) -> Images:
    return Images(source="shards", path=path, **options)  # type: ignore[arg-type]


def test_paths_expand_numbers_stars_splits_and_file_urls(urls: list[str], tmp_path: Path) -> None:
    (test,) = shards.write_shards(numbered(3), tmp_path, per_shard=3, prefix="test")
    assert open_shards(sharded(f"{tmp_path}/train-{{000000..000007}}.tar"), "train") == urls
    assert open_shards(sharded(f"{tmp_path}/{{split}}-*.tar"), "train") == urls
    assert open_shards(sharded(f"{tmp_path}/{{split}}-*.tar"), "validation") == [test]
    both = sharded(f"{tmp_path}/train-{{000000..000007}}.tar | {test}")
    assert (open_shards(both, "train"), open_shards(both, "test")) == (urls, [test])
    by_url = open_shards(sharded(f"file:{tmp_path}/train-{{000000..000007}}.tar"), "train")
    assert by_url[0] == f"file:{urls[0]}"
    assert first(ShardStream(by_url, 0, 1, 7).samples(33), 20) == first(ShardStream(urls, 0, 1, 7).samples(33), 20)


def test_a_share_to_validate_on_keeps_whole_shards_from_train(urls: list[str], tmp_path: Path) -> None:
    config = sharded(f"{tmp_path}/train-*.tar", validate_on=0.25)
    train, validation = (open_shards(config, split) for split in ("train", "validation"))
    assert (len(train), len(validation), sorted(train + validation)) == (6, 2, urls)
    for share in (0.0, 1.0, 0.99):
        with pytest.raises(ValueError, match=f"validate_on is {share} of 8 shards"):
            open_shards(sharded(f"{tmp_path}/train-*.tar", validate_on=share), "train")


@pytest.mark.parametrize(
    ("path", "split", "message"),
    [
        (None, "train", "path is None; source shards needs"),
        ("/nowhere/{0..3}.tar", "train", "4 of 4 shards do not exist; first /nowhere/0.tar"),
        ("/nowhere/*.tar", "train", r"path /nowhere/\*.tar matches no shards"),
        ("/nowhere/{0..3}.tar", "test", "names no test shards; write {split} in it, or TRAIN | TEST"),
        ("pipe:cat /etc/passwd", "train", "has scheme pipe; it must be a file or file, http"),
    ],
)
def test_paths_that_lead_nowhere_say_so(path: str | None, split: str, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        open_shards(Images(source="shards", path=path), split)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("curl") is None, reason="webdataset fetches URLs with curl")
@pytest.mark.parametrize("counted", [True, False])
def test_shards_behind_a_url_read_like_files(
    urls: list[str], tmp_path: Path, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    if not counted:
        (tmp_path / "shards.json").unlink()
    for name in ("http_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=os.fspath(tmp_path)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        base = f"http://127.0.0.1:{server.server_port}"
        remote = open_shards(sharded(f"{base}/train-{{000000..000007}}.tar"), "train")
        assert first(ShardStream(remote, 1, 2, 7).samples(33), 8) == first(ShardStream(urls, 1, 2, 7).samples(33), 8)
        with pytest.raises(OSError, match=r"shard http://.*absent.tar could not be read"):
            next(streams.ordered_samples([f"{base}/absent.tar"]))
    finally:
        server.shutdown()
        server.server_close()


def test_no_more_encoded_samples_are_held_than_are_looked_at() -> None:
    class Content:
        """Stands for the bytes of an image."""

    held: weakref.WeakSet[Content] = weakref.WeakSet()

    def made() -> Iterator[Any]:
        for label in range(200):
            held.add(content := Content())
            yield shards.Raw(f"{label}.jpg", content, label)  # type: ignore[arg-type]
            del content

    def decode(content: Any, name: str) -> Any:
        if name in ("50.jpg", "51.jpg"):
            raise BrokenImage(name)
        return content, False

    most, labels = 0, []
    for sample in streams._readable(made(), range(200), decode):
        labels.append(sample.label)
        del sample
        most = max(most, len(held))
    assert labels == [*range(50), 52, 52, *range(52, 200)]
    assert most <= 5
