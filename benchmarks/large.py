"""Images that do not fit: time and memory of a model of windows on memory-mapped images of growing size.

    python benchmarks/large.py results/large/size.jsonl                            on a GPU, about a minute
    python benchmarks/large.py rows.jsonl --device cpu --precision fp32 --sides 500 1000 --rounds 1

An image is read in tiles (`tiles`), or as a whole into the device's memory (`whole`); its file is in the page cache.
`peak_mb` is what tensors take at the peak, with the model's weights, gradients and the optimizer's moments: counted by
the device's allocator, or on a CPU, in a call of its own, from the storages that operations make. `keys_mb` is one
float for each cell; `host_mb` is the most that the process has allocated meanwhile, without mapped files.
`cpu_seconds` is processor time of all threads, which other processes of a busy machine change less than `seconds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from record import Row, add_rows, parser_of, settings_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adatape
from adatape.data.large import LargeImage
from adatape.models.windows import WindowTape
from adatape.windows.sources import TiledImage
from adatape.windows.tiles import tiles_of

BAND = 64  # rows of noise that an image repeats
COLUMNS = ("seconds", "cpu_seconds", "scan_seconds", "windows_seconds", "peak_mb", "keys_mb", "host_mb", "gmac")


class Setting(NamedTuple):
    model: WindowTape
    optimizer: torch.optim.Optimizer
    device: torch.device
    how: argparse.Namespace

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.how.precision == "bf16")

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def setting(how: argparse.Namespace) -> Setting:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=4, **json.loads(how.options))
    model = adatape.wrap(
        vit, bank="windows", image=(800, 1360), window=64, steps=how.steps, search=how.search, view=how.view
    ).to(how.device)
    return Setting(model, torch.optim.AdamW(model.parameters(), 1e-5), torch.device(how.device), how)


def write_image(path: Path, side: int) -> None:
    """Noise, in bands that repeat."""
    image = np.lib.format.open_memmap(path, "w+", np.uint8, (side, side, 3))
    band = np.random.default_rng(side).integers(0, 256, (BAND, side, 3), dtype=np.uint8)
    for top in range(0, side, BAND):
        image[top : top + BAND] = band[: side - top]
    image.flush()


def whole(path: Path, device: torch.device) -> Tensor:
    pixels = torch.from_numpy(np.load(path)).to(device)
    return pixels.movedim(-1, 0)[None].float() / 127.5 - 1


def inference(setting: Setting, images: Callable[[], Tensor | list[LargeImage]]) -> None:
    setting.model.eval()
    with torch.no_grad(), setting.autocast():
        setting.model(images())


def training(setting: Setting, images: Callable[[], Tensor | list[LargeImage]]) -> None:
    model, key, target = setting.model.train(), torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    with setting.autocast():
        out = model(images(), output=True, key=key.to(setting.device))
        loss = model.loss(out, target.to(setting.device))
    loss.backward()
    setting.optimizer.step()
    setting.optimizer.zero_grad()


def scanning(setting: Setting, images: Callable[[], Tensor | list[LargeImage]]) -> None:
    """The part of inference that looks at the whole image."""
    model, given = setting.model.eval(), images()
    with torch.no_grad(), setting.autocast():
        if isinstance(given, Tensor):
            model.scan(given)
        else:
            TiledImage(given[0], setting.device, model.view).scanned(model.scan)


def seconds(call: Callable[[], None], setting: Setting, clock: Callable[[], float] = time.perf_counter) -> float:
    took = []
    for _ in range(setting.how.rounds):
        setting.synchronize()
        began = clock()
        call()
        setting.synchronize()
        took.append(clock() - began)
    return statistics.median(took)


class LiveStorages(TorchDispatchMode):
    """Bytes of the storages that operations make, at their peak; where a device has no allocator that counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each.untyped_storage() not in self.seen:
                self._add(each.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        self.seen[storage] = None
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._remove, storage.nbytes())

    def _remove(self, size: int) -> None:
        self.live -= size


def peak_mb(call: Callable[[], None], setting: Setting) -> float:
    """Of one call, with what stays between calls."""
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(setting.device)
        call()
        return torch.cuda.max_memory_allocated(setting.device) / 2**20
    moments = [each for state in setting.optimizer.state.values() for each in state.values()]
    stay = [*setting.model.parameters(), *setting.model.buffers(), *(each for each in moments if torch.is_tensor(each))]
    with LiveStorages() as memory:
        call()
    return (memory.peak + sum(each.nbytes for each in stay)) / 2**20


@contextmanager
def host_peak() -> Iterator[list[float]]:
    """The most that the process has allocated within, looked at every 5 ms."""
    found, done = [host_mb() or 0.0], threading.Event()

    def look() -> None:
        while not done.wait(0.005):
            found[0] = max(found[0], host_mb() or 0.0)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def host_mb() -> float | None:
    """Memory that the process has allocated itself, which mapped files are no part of."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon")), None)


def gmac(setting: Setting, side: int, tile: int | None) -> float:
    """Of inference; tiles overlap."""
    scan, parts = setting.model.scan, {part.name: part.macs for part in setting.model.cost(image=(side, side))}
    if tile is not None:
        cell = scan.shape.cell
        tiles = tiles_of(*scan.grid(side, side), max(1, tile // cell), scan.shape.halo)
        parts["scan"] = sum(scan.macs(each.around.height * cell, each.around.width * cell) for each in tiles)
    return sum(parts.values()) / 1e9


def measured(setting: Setting, path: Path, side: int, kind: str, mode: str) -> Row:
    how, tiled = setting.how, kind == "tiles"

    def images() -> Tensor | list[LargeImage]:
        return [adatape.open_image(path, tile=how.tile)] if tiled else whole(path, setting.device)

    step = inference if mode == "inference" else training
    row: Row = {"case": f"{kind} {mode} {side}, {setting.device.type}", "kind": kind, "mode": mode, "side": side}
    row["settings"] = settings_of(how)
    rows, columns = setting.model.scan.grid(side, side)
    row |= {"megapixels": side * side / 1e6, "keys_mb": rows * columns * 4 / 2**20}
    try:
        step(setting, images)
        with host_peak() as most:
            row["seconds"] = seconds(lambda: step(setting, images), setting)
        row["cpu_seconds"] = seconds(lambda: step(setting, images), setting, time.process_time)
        row |= {"host_mb": most[0], "peak_mb": peak_mb(lambda: step(setting, images), setting)}
        if mode == "inference":
            row["gmac"] = gmac(setting, side, how.tile if tiled else None)
            row["scan_seconds"] = seconds(lambda: scanning(setting, images), setting)
            row["windows_seconds"] = row["seconds"] - row["scan_seconds"]
    except torch.OutOfMemoryError as error:
        setting.optimizer.zero_grad()
        row["error"] = str(error).splitlines()[0]
    return row


def line(row: Row) -> str:
    cells = [f"{row[name]:>16.3f}" if row.get(name) is not None else f"{'–':>16}" for name in COLUMNS]
    return f"{row['case']:<24}" + "".join(cells) + ("  " + row["error"] if "error" in row else "")


def main(given: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sides", type=int, nargs="+", default=[1500, 3000, 6000, 12000])
    parser.add_argument("--kinds", nargs="+", choices=["tiles", "whole"], default=["tiles", "whole"])
    parser.add_argument("--modes", nargs="+", choices=["inference", "training"], default=["inference", "training"])
    parser.add_argument("--tile", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=8, help="windows that are read")
    parser.add_argument("--search", type=int, default=64, help="random windows in training; 0 guesses at all cells")
    parser.add_argument("--view", type=int, help="the ViT also sees the image at this size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--options", default="{}", help="of the ViT, as JSON")
    how = parser.parse_args(given)
    chosen = setting(how)
    rows = []
    print(" " * 24 + "".join(f"{name:>16}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.npy"
        for mode in how.modes:  # the optimizer has no moments before training
            for side in how.sides:
                write_image(path, side)
                for kind in how.kinds:
                    rows.append(measured(chosen, path, side, kind, mode))
                    print(line(rows[-1]), flush=True)
                path.unlink()
    add_rows(how.out, rows, how.device)


if __name__ == "__main__":
    main()
