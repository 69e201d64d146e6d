"""Throughput of decoding and augmenting JPEGs of ImageNet's size, beside torchvision's pipeline and bare processes.

    python benchmarks/loader.py results/loader.jsonl --workers 2
    python benchmarks/loader.py results/loader.jsonl --workers 16 --images 20000 --batch 256 --batches 40

Ours and torchvision's decode with PIL, crop, flip and apply two operations of RandAugment (`--randaug`), in DataLoaders
of the same settings, in turn; torchvision's resize also antialiases, and its operations differ slightly. Bare are as
many processes that decode with PIL and resize the whole image, and hand nothing over. With workers the figure is images
per second of wall time; with `--workers 0`, of processor time, which does not depend on other programs.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from record import add_rows, parser_of, settings_of
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from adatape.data.batch import Shard
from adatape.data.images import open_images
from adatape.data.loaders import PREFETCHED, DecodingLoader
from adatape.data.sampler import Order
from adatape.data_config import Augment, Images

SIZE, AREA, MAGNITUDE = 224, (0.05, 1.0), 10
WIDTH, HEIGHT = 500, 375
SCALES, GRAIN = (3, 7, 17, 43, 111, 250), 18
CLASSES = 4


def photograph(draws: np.random.Generator) -> Image.Image:
    """Noise of several scales, about as large as a JPEG of ImageNet."""
    scene = np.zeros((HEIGHT, WIDTH, 3))
    for side in SCALES:
        coarse = Image.fromarray(draws.integers(0, 256, (side, side, 3), np.uint8))
        scene += np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float64) / side**0.5
    scene /= sum(side**-0.5 for side in SCALES)
    return Image.fromarray((scene + draws.normal(0, GRAIN, (HEIGHT, WIDTH, 1))).clip(0, 255).astype(np.uint8))


def write_folder(folder: Path, count: int, processes: int = 1) -> float:
    """Writes the images that are missing, in parallel; returns the mean size of all in bytes."""
    every = [(folder, split, i) for split, n in (("train", count), ("test", CLASSES)) for i in range(n)]
    with multiprocessing.get_context("fork").Pool(max(1, processes)) as pool:
        return statistics.mean(pool.imap_unordered(write_image, every, chunksize=8))


def write_image(place: tuple[Path, str, int]) -> int:
    folder, split, i = place
    path = folder / split / str(i % CLASSES) / f"{i:05d}.jpg"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        photograph(np.random.default_rng([split == "test", i])).save(path, "JPEG", quality=90)
    return path.stat().st_size


def ours(folder: Path, batch: int, workers: int, operations: int) -> Iterator[Any]:
    augment = Augment(crop="inception", area=AREA, flip=True, randaug=operations, magnitude=MAGNITUDE)
    data = Images("folder", str(folder), SIZE, augment)
    images = open_images(data, "train")
    loader = DecodingLoader(images, data, Order(len(images), batch, 0), Shard(), torch.device("cpu"), workers)
    return loader.decoded(0, 0, batch)


def torchvisions(folder: Path, batch: int, workers: int, operations: int) -> Iterator[Any]:
    randaug = v2.RandAugment(operations, MAGNITUDE, interpolation=v2.InterpolationMode.BILINEAR, fill=128)
    varied = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE, AREA),
            v2.RandomHorizontalFlip(),
            *([randaug] if operations else []),
            v2.PILToTensor(),
        ]
    )
    images = ImageFolder(folder / "train", varied)
    order = Order(len(images), batch, 0)
    plan = (order.slots(step, 0, batch).ids.tolist() for step in itertools.count())
    prefetched = PREFETCHED if workers else None
    return iter(DataLoader(images, batch_sampler=plan, num_workers=workers, prefetch_factor=prefetched))


def rate(batches: Iterator[Any], batch: int, count: int, warm_up: int, clock: Callable[[], float]) -> float:
    """Images per second, after the workers' prefetch queues are full."""
    for _ in range(warm_up):
        next(batches)
    began = clock()
    for _ in itertools.islice(batches, count):
        pass
    return batch * count / (clock() - began)


def decode_and_resize(paths: Sequence[Path]) -> None:
    for path in paths:
        with Image.open(path) as image:
            np.asarray(image.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR))


def bare_rate(folder: Path, count: int, workers: int, clock: Callable[[], float]) -> float:
    """Images per second of processes that decode and resize, each its share; without workers, of this process."""
    paths = list(itertools.islice(itertools.cycle(sorted((folder / "train").glob("*/*.jpg"))), count))
    if not workers:
        began = clock()
        decode_and_resize(paths)
        return count / (clock() - began)
    context = multiprocessing.get_context("fork")
    together = context.Barrier(workers + 1)
    processes = [context.Process(target=_bare, args=(together, paths[n::workers])) for n in range(workers)]
    for process in processes:
        process.start()
    together.wait()
    began = clock()
    together.wait()
    took = clock() - began
    for process in processes:
        process.join()
    return count / took


def _bare(together: Any, paths: Sequence[Path]) -> None:
    together.wait()
    decode_and_resize(paths)
    together.wait()


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--folder", help="where the images are written and kept; default a temporary folder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--batches", type=int, default=12, help="timed in each round")
    parser.add_argument("--randaug", type=int, default=2, help="operations of RandAugment; 0 has none")
    parser.add_argument("--rounds", type=int, default=5)
    chosen = parser.parse_args(given)
    torch.set_num_threads(1)
    clock = time.perf_counter if chosen.workers else time.process_time
    rates: dict[str, list[float]] = {"adatape": [], "torchvision": [], "bare": []}
    with nullcontext(chosen.folder) if chosen.folder else tempfile.TemporaryDirectory() as name:
        size = write_folder(Path(name), chosen.images, chosen.workers)
        print(f"{chosen.images} images of {size:,.0f} bytes", flush=True)
        for _ in range(chosen.rounds):
            for who, loader in (("adatape", ours), ("torchvision", torchvisions)):
                batches = loader(Path(name), chosen.batch, chosen.workers, chosen.randaug)
                rates[who].append(rate(batches, chosen.batch, chosen.batches, 1 + 2 * chosen.workers, clock))
                del batches  # ends its workers
            rates["bare"].append(bare_rate(Path(name), chosen.batch * chosen.batches, chosen.workers, clock))
            print("  ".join(f"{who} {found[-1]:.1f} images/s" for who, found in rates.items()), flush=True)
    medians = {who: statistics.median(found) for who, found in rates.items()}
    ratio, to_bare = (
        statistics.median(mine / theirs for mine, theirs in zip(rates["adatape"], rates[other], strict=True))
        for other in ("torchvision", "bare")
    )
    row = {
        "case": f"{chosen.workers} workers" + ("" if chosen.randaug == 2 else f", RandAugment {chosen.randaug}"),
        "images_per_second": medians,
        "ratio": ratio,
        "ratio_to_bare": to_bare,
        "rounds": rates,
        "clock": "wall" if chosen.workers else "processor",
        "jpeg_bytes": size,
        "settings": settings_of(chosen),
    }
    add_rows(chosen.out, [row], "cpu", torchvision=torchvision.__version__, pillow=PIL.__version__)
    told = f"torchvision {medians['torchvision']:.1f}: {100 * ratio:.0f} %, bare {medians['bare']:.1f}"
    print(f"{medians['adatape']:.1f} images/s, {told}: {100 * to_bare:.0f} %")


if __name__ == "__main__":
    main()
